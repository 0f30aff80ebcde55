"""Random calls against the fp64 reference: `make fuzz HOURS=0.5`, or a few of them in `make test`.

A case is plain data, of `plain.py` or `packed.py`. A failure is made smaller:
`check("cpu", Program(...), [Values(...)])` runs it again.
"""

from hypothesis import HealthCheck, Phase, settings


def a_fixed_few(examples: int):
    """The same cases every time, and none smaller of one that fails: `make fuzz` looks for those."""
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
