"""Context parallelism: one sequence over several ranks, with any mods."""
