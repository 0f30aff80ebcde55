"""From attention nodes to kernels: the problem, the routes, the decision."""
