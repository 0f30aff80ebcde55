"""From a mask's expression to the tiles to visit: trace, bounds, refinement, runs."""
