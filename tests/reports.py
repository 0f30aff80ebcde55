"""Inspections of the functions in tests/inspected.py, each made once in a process; `inspected_anew` makes another."""

import functools

import flex_inductor
from tests import inspected


def inspected_anew(name, target, **options):
    fn, args = getattr(inspected, name)()
    return flex_inductor.inspect(fn, *args, target=target, **options)


report = functools.cache(inspected_anew)
