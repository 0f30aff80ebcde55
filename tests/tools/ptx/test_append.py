"""The kernel of append_kv as cards get it, executed: where it writes, and that it writes nowhere else."""

import pytest
import torch

from flex_inductor.sequences import append_kernel
from flex_inductor.tools import ptx
from tests.marks import slow_but
from tests.sequences import appended

KINDS = {
    "rows": torch.float64,
    "padding": torch.float32,
    "1": torch.float16,
    "16": torch.bfloat16,
    "3": torch.float8_e4m3fn,
}
CLOSE = {
    torch.float64: 1e-12,
    torch.float32: 1e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
    torch.float8_e4m3fn: 2**-4,
}
CASES = [
    (kind, target, rotary)
    for kind in KINDS
    for target in ("sm_80", "sm_90")
    for rotary in (None, True, False)
]
RUN = [
    ("16", "sm_80", True),
    ("padding", "sm_90", None),
    ("3", "sm_80", None),  # no such numbers there
    ("3", "sm_80", False),
]


class Executed:
    """In place of the kernel."""

    def __init__(self, target):
        self.kernel, self.target, self.launches = append_kernel.append, target, 0

    def __getitem__(self, grid):
        def launch(*args, **constants):
            self.launches += 1
            ptx.run(self.kernel, grid, *args, target=self.target, **constants)

        return launch


@pytest.mark.parametrize("case", slow_but(CASES, *RUN), ids=str)
def test_where_tokens_go(case, monkeypatch):
    kind, target, interleaved = case
    kernel = Executed(target)
    monkeypatch.setattr(append_kernel, "append", kernel)
    given, rotary = appended.case(kind, KINDS[kind]), interleaved is not None
    own, (q, k, v) = given.sequences, given.new
    cos, sin = given.rotary if rotary else (None, None)
    turned = append_kernel.launch(
        *given.caches, k, v, q if rotary else None, cos, sin, own.cu_q, None, own.used_q, own.used_k,
        own.left_pad_k, own.cache_rows, own.pages, bool(interleaved), True,
    )  # fmt: skip
    *caches, queries = appended.expected(appended.case(kind, KINDS[kind]), rotary, bool(interleaved))
    assert kernel.launches == 1
    found = [*given.caches, turned[: sum(appended.NEW)]] if rotary else given.caches
    for got, want in zip(found, [*caches, queries], strict=False):
        torch.testing.assert_close(got.double(), want, rtol=CLOSE[got.dtype], atol=CLOSE[got.dtype])
