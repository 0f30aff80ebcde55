"""What a wrong request is told, and what is not wrong."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from mask_helpers import compare
from torch.nn.attention import flex_attention as torch_flex

from flex_inductor import RunSchedule, and_masks, flex_attention, masks, or_masks, take_over
from flex_inductor.masks import library
from flex_inductor.masks.errors import FlexError, MaskArgumentError, MaskModError
from flex_inductor.masks.library.blockmask import HAS_WRITE_ORDER, create_block_mask
from flex_inductor.masks.library.combine import intersect

TABLE = torch.arange(64)
ELSEWHERE = torch.zeros(64, device="meta")


def causal(b, h, q, kv):
    return q >= kv


def branches(b, h, q, kv):
    return q >= kv if q > 5 else q < kv


def uses_and(b, h, q, kv):
    return q >= kv and q < 9


def converts(b, h, q, kv):
    return TABLE[int(q)] >= kv


def three(b, q, kv):
    return q >= kv


def score(score, b, h, q, kv):
    return score


def floats(b, h, q, kv):
    return (q - kv).float()


def python_bool(b, h, q, kv):
    return True


def vector(b, h, q, kv):
    return q == TABLE


def random(b, h, q, kv):
    return torch.rand(()) < 0.5


def writes(b, h, q, kv):
    TABLE.add_(1)
    return q >= kv


def elsewhere(b, h, q, kv):
    return ELSEWHERE[q] > kv


def broken(b, h, q, kv):
    return q >= undefined_name  # noqa: F821


@pytest.mark.parametrize(
    ("mask_mod", "expected"),
    [
        (
            branches,
            r"mask_mod branches needs the value .* at .*test_mask_errors.py:\d+ \(return q >= kv if q > 5",
        ),
        (
            uses_and,
            r"mask_mod uses_and needs the value .* Choose with torch.where, join conditions with &, \| and ~",
        ),
        (converts, "mask_mod converts needs the value .*use 0-d tensors as they are"),
        (three, r"mask_mod must take 4 arguments, mask_mod\(b, h, q_idx, kv_idx\), but `three` takes 3"),
        (score, "takes 5. It looks like a score_mod"),
        (floats, "mask_mod floats must return one bool, .* dtype torch.float32. Compare"),
        (
            python_bool,
            r"mask_mod python_bool must return one bool, .* returned a bool. A constant is torch.ones\(",
        ),
        (vector, r"mask_mod vector must return one bool, .* shape \[64\] .* index what it captures"),
        (random, "mask_mod random draws random numbers .* Draw a tensor before the call"),
        (writes, r"mask_mod writes changes the captured tensor `TABLE` in place \(aten.add_.Tensor\)"),
        (broken, "mask_mod broken: cannot be evaluated: name 'undefined_name' is not defined"),
        ("causal", r"mask_mod must be a function, mask_mod\(b, h, q_idx, kv_idx\), but is a str"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_mask_mod(mask_mod, expected):
    before = TABLE.clone()
    with pytest.raises(FlexError, match=expected):
        create_block_mask(mask_mod, None, None, 64, 64, "cpu")
    assert torch.equal(before, TABLE)


def test_without_a_device_in_a_torch_for_a_gpu_that_is_not_there(monkeypatch):
    def current_accelerator(check_available=False):
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    assert create_block_mask(causal, None, None, 64, 64).kv_indices.device.type == "cpu"


def test_capture_on_another_device():
    with pytest.raises(MaskModError, match="mask_mod elsewhere: captures `ELSEWHERE`, which is on meta, but"):
        create_block_mask(elsewhere, None, None, 64, 64, "cpu")


def test_capture_that_is_too_short():
    with pytest.raises(
        MaskModError, match=r"mask_mod <lambda>: fails at some .* q < 100, .*index 64 is out of bounds"
    ):
        create_block_mask(lambda b, h, q, kv: TABLE[q] > kv, None, None, 100, 64, "cpu")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"B": 0}, "B: expected an integer of at least 1, got 0. Pass None"),
        ({"H": -2}, "H: expected an integer of at least 1, got -2"),
        ({"Q_LEN": -1}, "Q_LEN: expected an integer of at least 0, got -1"),
        ({"KV_LEN": 12.0}, "KV_LEN: expected an integer of at least 0, got 12.0"),
        ({"BLOCK_SIZE": 0}, "BLOCK_SIZE: expected an integer of at least 1, or two of them"),
        ({"BLOCK_SIZE": (128, -1)}, r"BLOCK_SIZE: .* got \(128, -1\)"),
        ({"BLOCK_SIZE": (1, 2, 3)}, r"BLOCK_SIZE: .* got \(1, 2, 3\)"),
        ({"dq_kv_order": torch.zeros(3)}, "dq_kv_order: expected True or False, got Tensor"),
        (
            {"compute_dq_write_order": True, "compact": True},
            "compute_dq_write_order: a compact schedule has none",
        ),
    ],
    ids=str,
)
def test_arguments(change, expected):
    arguments = {"B": 1, "H": 1, "Q_LEN": 64, "KV_LEN": 64, "device": "cpu"} | change
    with pytest.raises(MaskArgumentError, match=expected) as caught:
        create_block_mask(causal, **arguments)
    assert isinstance(caught.value, (FlexError, ValueError))


@pytest.mark.skipif(HAS_WRITE_ORDER, reason="this torch has a write order")
def test_write_order_on_an_older_torch():
    with pytest.raises(MaskArgumentError, match=r"compute_dq_write_order: torch 2\.1[12]"):
        create_block_mask(causal, 1, 1, 64, 64, "cpu", compute_dq_write_order=True)


def test_compile_flag_is_accepted_and_said_to_do_nothing():
    with pytest.warns(DeprecationWarning, match="_compile=True has no effect"):
        made = create_block_mask(causal, 1, 1, 300, 300, "cpu", _compile=True)
    assert torch.equal(made.kv_indices, create_block_mask(causal, 1, 1, 300, 300, "cpu").kv_indices)


class Callable:
    def __init__(self, width):
        self.width = width

    def __call__(self, b, h, q, kv):
        return (q - kv).abs() < self.width


def windowed(width, b, h, q, kv):
    return (q - kv).abs() < width


def test_any_callable_will_do():
    for mask_mod in (Callable(50), functools.partial(windowed, 50), Callable(50).__call__):
        made = create_block_mask(mask_mod, None, None, 300, 300, "cpu", 32)
        expected = create_block_mask(lambda b, h, q, kv: (q - kv).abs() < 50, None, None, 300, 300, "cpu", 32)
        assert torch.equal(made.kv_indices, expected.kv_indices)


def window(width):
    return lambda b, h, q, kv: q - kv < width


def test_one_factory_with_two_numbers_shares_nothing():
    for width in (10, 200, 10):
        compare(window(width), None, None, 300, 300, 32)


def test_capture_changed_in_place_is_seen():
    ids = torch.arange(300) // 40

    def documents(b, h, q, kv):
        return ids[q] == ids[kv]

    first = compare(documents, None, None, 300, 300, 32)
    ids.copy_(torch.arange(300) // 150)
    second = compare(documents, None, None, 300, 300, 32)
    assert not torch.equal(first.kv_num_blocks, second.kv_num_blocks)


def test_inference_tensors_and_inference_mode():
    with torch.inference_mode():
        ids = torch.arange(300) // 40
        compare(lambda b, h, q, kv: ids[q] == ids[kv], None, None, 300, 300, 32)
        ids.add_(torch.arange(300) // 33)
        compare(lambda b, h, q, kv: ids[q] == ids[kv], None, None, 300, 300, 32)
    compare(lambda b, h, q, kv: ids[q] == ids[kv], None, None, 300, 300, 32)


WHERE = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "meta": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("where", WHERE)
def test_a_mask_serves_training_wherever_it_was_made(where):
    """Also what is made from it there, and in a compiled function."""
    build = torch.compile(
        lambda: create_block_mask(library.causal(), 1, 2, 64, 64, "cpu", 16), backend="eager"
    )
    with WHERE[where]():
        documents = library.document(lengths=torch.tensor([20, 44], device="cpu"))
        made = create_block_mask(documents, None, None, 64, 64, "cpu", 16)
        compact = create_block_mask(documents, None, None, 64, 64, "cpu", 16, compact=True)
        several = [made, compact, compact.to_block_mask(), RunSchedule.from_block_mask(made), compact[0]]
        several += [intersect(made, compact), build()]
    query = torch.ones(1, 2, 64, 4, requires_grad=True)
    value = torch.arange(128.0).view(1, 2, 64, 1).requires_grad_()
    index, zero = torch.arange(64), torch.tensor(0)
    for block_mask in several:
        mask_mod = library.causal() if block_mask is several[-1] else documents
        visible = mask_mod(zero, zero, index[:, None], index).float()
        (grad,) = torch.autograd.grad(flex_attention(query, query, value, block_mask=block_mask).sum(), value)
        torch.testing.assert_close(grad[0, 1].view(64), (visible / visible.sum(1, keepdim=True)).sum(0))


def test_a_capture_of_inference_mode_is_refused_in_training():
    with torch.inference_mode():
        ids = torch.arange(64) // 20
        block_mask = create_block_mask(lambda b, h, q, kv: ids[q] == ids[kv], None, None, 64, 64, "cpu", 16)
    query = torch.ones(1, 1, 64, 4)
    flex_attention(query, query, query, block_mask=block_mask)
    expected = (
        "mask_mod captures `ids`, which was made under torch.inference_mode(), so autograd cannot keep it for the "
        "backward. Make it outside, or capture a copy that is made outside: ids.clone()."
    )
    with pytest.raises(FlexError) as error:
        flex_attention(query.requires_grad_(), query, query, block_mask=block_mask)
    assert str(error.value) == expected


def test_capture_that_requires_grad():
    slopes = torch.rand(300, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare(lambda b, h, q, kv: slopes[q] > slopes[kv], None, None, 300, 300, 32)


def test_no_random_state_is_touched():
    before = torch.get_rng_state()
    create_block_mask(lambda b, h, q, kv: (q * 7919 ^ kv * 31) % 9 < 1, None, None, 300, 300, "cpu", 32)
    assert torch.equal(before, torch.get_rng_state())


def per_head(b, h, q, kv):
    return q - kv > 5 * h - 12


LENGTHS = torch.tensor([3, 60])


@pytest.mark.parametrize(
    "mask_mod, batch, heads, expected",
    [
        (per_head, None, None, "H: got None, but mask_mod per_head reads h. Pass the number of heads;"),
        (masks.ragged(LENGTHS), None, 2, "B: got None, but mask_mod ragged reads b. Pass the number of batches;"),
        (and_masks(causal, per_head), 2, None, "H: got None, but mask_mod and_mask reads h. "),
        (or_masks(per_head, masks.ragged(LENGTHS)), None, None, "B and H: got None, but mask_mod or_mask reads b and h. "),
        (masks.offset(masks.causal(), q=LENGTHS), None, None, "B: got None, but mask_mod shifted reads b. "),
        (lambda b, h, q, kv: q - kv < LENGTHS.max().item() * h, None, None, "H: got None, but mask_mod <lambda> reads h. "),
    ],
)  # fmt: skip
@pytest.mark.parametrize("compact", [False, True])
def test_sizes_of_what_a_mask_reads_are_needed(mask_mod, batch, heads, expected, compact):
    with pytest.raises(MaskArgumentError) as caught:
        create_block_mask(mask_mod, batch, heads, 64, 64, "cpu", compact=compact)
    assert str(caught.value).startswith(expected)
    assert str(caught.value).endswith("; with 1, all of them visit the tiles of the first.")


@pytest.mark.parametrize("compact", [False, True])
def test_one_for_all_may_be_asked_for(compact):
    mask = create_block_mask(per_head, None, 1, 64, 64, "cpu", 16, compact=compact)
    assert mask.shape == (1, 1, 64, 64)


def test_what_a_mask_only_seems_to_read_is_not_needed():
    """Constants made like `b`, and evaluation without a trace, say nothing about batches and heads."""
    create_block_mask(and_masks(causal), None, None, 64, 64, "cpu")
    create_block_mask(lambda b, h, q, kv: q - kv < LENGTHS.max().item(), None, None, 64, 64, "cpu")


def test_sizes_are_needed_in_a_graph_and_by_torchs_name():
    def build(x):
        return create_block_mask(per_head, None, None, 64, 64, "cpu").kv_num_blocks.sum() + x

    with pytest.raises(MaskArgumentError, match=r"^H: got None, but mask_mod mask_mod reads h\. "):
        torch.compile(build, backend="eager", fullgraph=True)(torch.zeros(()))
    with take_over(), pytest.raises(MaskArgumentError, match=r"^H: got None"):
        torch_flex.create_block_mask(per_head, None, None, 64, 64, "cpu")
