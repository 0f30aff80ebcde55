"""Compiled calls checked against float64 as they run: the option `verify`. No kernel depends on it."""
