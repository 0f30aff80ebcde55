"""The Triton kernels on a card: `tools/gpu_check.sh` runs the same calls."""

import card
import pytest
import torch

from flex_inductor.tools.bench.gpu_calls import Setting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]


@pytest.mark.parametrize("call", card.CALLS, ids=lambda call: call.title)
def test_as_right_as_dense_attention(call):
    if lacking := card.without(call, torch.cuda.get_device_capability(), torch.cuda.device_count()):
        pytest.skip(lacking)
    call.check(Setting())
