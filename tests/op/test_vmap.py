"""torch.func.vmap folds its dimension into the batch: every example must get what it gets alone."""

import pytest
import torch
from op.calls import close, draw, leaf
from torch.func import grad, vmap

from flex_inductor import AuxRequest, Sequences, create_block_mask, flex_attention, varlen_attention
from flex_inductor.masks.schedule import schedule_parts
from flex_inductor.op import Inputs, attention
from flex_inductor.reference import reference

EXAMPLES = 3


def one_by_one(fn, in_dims, *args):
    """What vmap(fn, in_dims) means."""
    results = [
        fn(*(a if dim is None else a.select(dim, i) for a, dim in zip(args, in_dims, strict=True)))
        for i in range(EXAMPLES)
    ]
    if isinstance(results[0], tuple):
        return tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return torch.stack(results)


def shifted_mask(batch, compact):
    return create_block_mask(
        lambda b, h, q, kv: q + 3 * b >= kv, batch, None, 6, 6, device="cpu", BLOCK_SIZE=2, compact=compact
    )


@pytest.mark.parametrize("q_dim, kv_dim", [(0, 0), (0, None), (None, 0), (2, 4), (-1, 1)])
def test_query_key_and_value(q_dim, kv_dim):
    def stacked(dim):
        return draw(2, 2, 6, 4) if dim is None else draw(EXAMPLES, 2, 2, 6, 4).movedim(0, dim)

    q, k, v = stacked(q_dim), stacked(kv_dim), stacked(kv_dim)
    dims = (q_dim, kv_dim, kv_dim)
    close(vmap(flex_attention, dims)(q, k, v), one_by_one(lambda *a: reference(*a)[0], dims, q, k, v))


@pytest.mark.parametrize("kv_dim", [0, None])
def test_key_and_value_of_batch_one(kv_dim):
    q = draw(EXAMPLES, 2, 2, 6, 4)
    k, v = (draw(*[EXAMPLES] * (kv_dim == 0), 1, 2, 6, 4) for _ in range(2))

    def per_example(attend):
        return grad(lambda q, k, v: attend(q, k, v).sin().sum(), (0, 1, 2))

    dims = (0, kv_dim, kv_dim)
    ours = vmap(per_example(flex_attention), dims)(q, k, v)
    close(ours, one_by_one(per_example(lambda *a: reference(*a)[0]), dims, q, k, v))


def test_lse_and_max_scores():
    q, k, v = (draw(EXAMPLES, 2, 2, 6, 4) for _ in range(3))

    def attend(q, k, v):
        out, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True, max_scores=True))
        return out, aux.lse, aux.max_scores

    close(vmap(attend)(q, k, v), one_by_one(reference, (0, 0, 0), q, k, v))


def biased(attend):
    """A loss with every kind of capture: shared and per example, scalar, table, and indices."""

    def loss(q, k, v, slopes, table, temperature, rel):
        def score_mod(score, b, h, q_idx, kv_idx):
            near = table[b, q_idx] + table[b, kv_idx]
            return score * temperature + slopes[h] * (q_idx - kv_idx) + near + table[b, rel[q_idx, kv_idx]]

        return attend(q, k, v, score_mod).sin().sum()

    return loss


def biased_inputs(capture_dim):
    shared = capture_dim is None
    lead = [] if shared else [EXAMPLES]
    captures = [
        draw(*lead, 2).movedim(0, 0 if shared else -1),
        draw(*lead, 2, 6),
        draw(*lead),
        torch.randint(6, (6, 6)),
    ]
    dims = (0, 0, 0, None if shared else -1, capture_dim, capture_dim, None)
    return [draw(EXAMPLES, 2, 2, 6, 4) for _ in range(3)] + captures, dims


@pytest.mark.parametrize("capture_dim", [0, None])
def test_captures(capture_dim):
    args, dims = biased_inputs(capture_dim)
    ours = vmap(biased(flex_attention), dims)(*args)
    close(ours, one_by_one(biased(lambda *a: reference(*a)[0]), dims, *args))


@pytest.mark.parametrize("capture_dim", [0, None])
def test_gradients_of_each_example(capture_dim):
    args, dims = biased_inputs(capture_dim)

    def per_example(attend):
        return grad(biased(attend), tuple(range(6)))

    ours = vmap(per_example(flex_attention), dims)(*args)
    close(ours, one_by_one(per_example(lambda *a: reference(*a)[0]), dims, *args))


@pytest.mark.parametrize("capture_dim", [0, None])
def test_gradient_of_all_examples(capture_dim):
    args, dims = biased_inputs(capture_dim)

    def total(attend):
        return grad(lambda *a: vmap(biased(attend), dims)(*a).sum(), tuple(range(6)))

    leaves = [leaf(a) if a.is_floating_point() else a for a in args]
    expected = one_by_one(biased(lambda *a: reference(*a)[0]), dims, *leaves).sum()
    close(total(flex_attention)(*args), torch.autograd.grad(expected, leaves[:6]))


def test_autograd_through_vmap():
    args, dims = biased_inputs(0)
    leaves = [leaf(a) if a.is_floating_point() else a for a in args]
    ours, expected = (
        torch.autograd.grad(run(biased(attend), dims, leaves).sum(), leaves[:6])
        for run, attend in (
            (lambda fn, dims, a: vmap(fn, dims)(*a), flex_attention),
            (lambda fn, dims, a: one_by_one(fn, dims, *a), lambda *a: reference(*a)[0]),
        )
    )
    close(ours, expected)


@pytest.mark.parametrize("compact", [False, True], ids=["lists", "runs"])
@pytest.mark.parametrize("batch", [1, 2])
def test_block_mask_shared_by_examples(batch, compact):
    q, k, v = (draw(EXAMPLES, 2, 2, 6, 4) for _ in range(3))
    mask = shifted_mask(batch, compact)

    def per_example(attend):
        return grad(lambda q, k, v: attend(q, k, v).sin().sum(), (0, 1, 2))

    ours = vmap(per_example(lambda *a: flex_attention(*a, block_mask=mask)))(q, k, v)
    expected = per_example(lambda *a: reference(*a, block_mask=mask)[0])
    close(ours, one_by_one(expected, (0, 0, 0), q, k, v))


def stacked(tensors):
    """As one tensor; runs, of which examples have different numbers, are filled up with ones that no row has."""
    most = max(t.size(0) for t in tensors)
    return torch.stack([torch.cat([t, t.new_zeros(most - t.size(0), *t.shape[1:])]) for t in tensors])


@pytest.mark.parametrize("form", ["lists", "runs", "bounds"])
def test_block_mask_of_each_example(form):
    q, k, v = (draw(EXAMPLES, 2, 2, 8, 4) for _ in range(3))
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1]])
    if form == "runs":  # which those have that go on after another one
        documents[:, 7] = 0

    def same_document(documents):
        return lambda b, h, q_idx, kv_idx: documents[q_idx] == documents[kv_idx]

    masks = [
        create_block_mask(same_document(row), 2, None, 8, 8, "cpu", BLOCK_SIZE=2, compact=form != "lists")
        for row in documents
    ]
    schedules = [schedule_parts(mask)[0] for mask in masks]
    assert {schedule.form for schedule in schedules} == {form}
    places = [i for i, field in enumerate(schedules[0]) if isinstance(field, torch.Tensor)]
    tensors = [stacked([schedule[i] for schedule in schedules]) for i in places]

    def attend(q, k, v, documents, *tensors):
        given = dict(zip(places, tensors, strict=True))
        fields = (given.get(i, field) for i, field in enumerate(schedules[0]))
        inputs = Inputs(schedule=type(schedules[0])(*fields))
        return attention(q, k, v, None, same_document(documents), 0.5, inputs)[0]

    ours = vmap(attend)(q, k, v, documents, *tensors)
    expected = [reference(q[i], k[i], v[i], None, masks[i], 0.5)[0] for i in range(EXAMPLES)]
    close(ours, torch.stack(expected))


@pytest.mark.parametrize("dims", [(0, 0, 0, 0), (0, None, None, 0), (None, None, 0, None)])
def test_keys_of_8_bits(dims):
    q = torch.randn(*[EXAMPLES] * (dims[0] == 0), 2, 2, 6, 16)
    kv = torch.randn(*[EXAMPLES] * (dims[1] == 0), 2, 2, 7, 16).to(torch.float8_e4m3fn)
    of_heads = torch.rand(*[EXAMPLES] * (dims[2] == 0), 2, 2) + 0.5
    of_rows = torch.rand(*[EXAMPLES] * (dims[3] == 0), 2, 2, 7) + 0.5

    def attend(q, kv, of_heads, of_rows):
        return flex_attention(q, kv, kv, lambda s, *_: s.tanh(), k_scale=of_heads, v_scale=of_rows)

    given = (q, kv, of_heads, of_rows)
    close(vmap(attend, dims)(*given), one_by_one(attend, dims, *given))


def test_nested():
    q, k, v = (draw(2, EXAMPLES, 2, 2, 6, 4) for _ in range(3))
    slopes, table = draw(2, 2), draw(EXAMPLES, 2, 6)

    def loss(attend):
        def of(q, k, v, slopes, table):
            def score_mod(score, b, h, q_idx, kv_idx):
                return score + slopes[h] * (q_idx - kv_idx) + table[b, q_idx]

            return attend(q, k, v, score_mod).sin().sum()

        return of

    inner, outer = (0, 0, 0, None, 0), (0, 0, 0, 0, None)
    ours = vmap(vmap(grad(loss(flex_attention), (0, 3, 4)), inner), outer)(q, k, v, slopes, table)
    expected = grad(loss(lambda *a: reference(*a)[0]), (0, 3, 4))
    rows = [one_by_one(expected, inner, q[i], k[i], v[i], slopes[i], table) for i in range(2)]
    close(ours, tuple(torch.stack(parts) for parts in zip(*rows, strict=True)))


def test_compiled_with_a_scale_that_changes():
    def attend(query, key, value, scale):
        return vmap(lambda *qkv: flex_attention(*(t.unsqueeze(0) for t in qkv), scale=scale))(
            query, key, value
        )

    compiled = torch.compile(attend, backend="flex_inductor", fullgraph=True, dynamic=True)
    qkv = [torch.randn(2, 2, 20, 16, requires_grad=True) for _ in range(3)]
    for scale in (0.25, -0.5, 1.0):
        found, right = (run(*qkv, scale) for run in (compiled, attend))
        torch.testing.assert_close(found, right)
        grads = (torch.autograd.grad(out.sin().sum(), qkv) for out in (found, right))
        torch.testing.assert_close(*grads)


def test_a_compiled_function_runs_as_it_is_inside_of_a_transform():
    """Dynamo gives up the function there, and could still compile what it calls: traces of mods among it."""
    slopes, two = draw(2), Sequences.from_lengths([3, 3])

    def score_mod(score, b, h, q_idx, kv_idx):
        return score * slopes[h]

    def attend(q, k, v):
        return flex_attention(q, k, v, score_mod)

    def packed(x):
        return varlen_attention(x, x, x, two, score_mod=score_mod).sin().sum()

    q, k, v = draw(EXAMPLES, 2, 2, 6, 4), draw(2, 2, 6, 4), draw(2, 2, 6, 4)
    dims = (0, None, None)
    compiled = torch.compile(attend, backend="flex_inductor")
    expected = one_by_one(lambda *qkv: reference(*qkv, score_mod)[0], dims, q, k, v)
    close(vmap(compiled, dims)(q, k, v), expected)
    x = draw(6, 2, 4)
    close(grad(torch.compile(packed, backend="flex_inductor"))(x), grad(packed)(x))
