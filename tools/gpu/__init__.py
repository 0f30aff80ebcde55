"""What is measured on a card: the cases, the sides, and how configs are compared."""
