"""Every method under every layout, for every kind of call, over one to eight ranks: test_methods.py has pairs of them."""

import itertools

import pytest
import torch

from tests.distributed.cases import Case
from tests.distributed.test_methods import METHODS, check, idle, reversed_cyclic

CASES = {
    "GQA": Case(heads=8, kv_heads=2),
    "MHA": Case("window", heads=8, kv_heads=8, block=(16, 64)),
    "mask per head": Case("heads", heads=8, kv_heads=4),
    "mask per batch": Case("batches", batch=3, heads=8, kv_heads=8),
    "no mask, uneven": Case("none", batch=2, heads=8, kv_heads=1, length=270),
    "dead rows": Case("dead", heads=8, kv_heads=2, block=(64, 32)),
}
BALANCES = ["contiguous", "head_tail", "documents", "work", "work_and_bytes", reversed_cyclic, idle]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("method", METHODS)
def test_as_one_process(group, method, name, ranks):
    failed = []
    for balance, dtype in itertools.product(BALANCES, (torch.float64, torch.float32)):
        try:
            check(group, CASES[name]._replace(dtype=dtype), method, balance, ranks)
        except AssertionError as error:
            failed.append((balance, dtype, error.args[0]))
    assert not failed, failed
