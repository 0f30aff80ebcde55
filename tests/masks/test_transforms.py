"""Masks that are made inside of torch.func's transforms, and what belongs to a transform that has ended."""

import pytest
import torch
from torch.func import functionalize, grad, jacrev, jvp, vmap
from torch.nn.attention.flex_attention import BlockMask

from flex_inductor import FlexError, Sequences, create_block_mask, flex_attention, masks, varlen_attention
from flex_inductor.masks.library.combine import intersect

LENGTH = 12
IDS = torch.tensor([0] * 5 + [1] * 7)
MODS = {
    "window": lambda b, h, q, kv: q >= kv,
    "documents": lambda b, h, q, kv: IDS[q] == IDS[kv],
    "analysed": lambda b, h, q, kv: (q * q + kv) % 3 != 0,
}
SEQUENCES = Sequences.from_lengths([5, 7])


def rows(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


Q, K, V = (rows(2, 2, LENGTH, 8, seed=seed) for seed in range(3))


def blocks(mask_mod, **options):
    return create_block_mask(mask_mod, None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=4, **options)


def tiles_of(mask):
    return (mask if isinstance(mask, BlockMask) else mask.to_block_mask()).to_dense().float()


def plain(mask_mod, options):
    def attend(query, made=None):
        return flex_attention(query, K, V, block_mask=made or blocks(mask_mod, **options))

    return Q, attend, blocks(mask_mod, **options)


def packed(mask_mod, _):
    def attend(query, made=None):
        mask = made or SEQUENCES.mask(mask_mod)
        return varlen_attention(
            query, K[0].mT.permute(2, 0, 1), V[0].mT.permute(2, 0, 1), SEQUENCES, None, mask
        )

    return Q[0].transpose(0, 1), attend, SEQUENCES.mask(mask_mod)


@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("kind, options", [(plain, {}), (plain, {"compact": True}), (packed, {})])
def test_a_mask_made_inside_is_one_made_outside(name, kind, options):
    query, attend, made = kind(MODS[name], options)

    def loss(query, made=None):
        return attend(query, made).square().sum()

    outside, inside = grad(loss)(query, made), grad(loss)(query)
    assert torch.equal(outside, inside)
    assert torch.equal(vmap(lambda factor: grad(loss)(query) * factor)(torch.ones(2))[1], outside)
    assert torch.equal(functionalize(attend)(query), attend(query, made))


@pytest.mark.parametrize("compact", [False, True])
def test_every_transform_sees_the_same_tiles(compact):
    def tiles(scale):
        ids = IDS * scale  # a tensor of the transform
        mask = blocks(lambda b, h, q, kv: ids.detach()[q] == ids[kv], compact=compact)
        mask = intersect(mask, blocks(masks.document(lengths=[5, 7]), compact=compact))
        return tiles_of(mask) * scale

    one = torch.ones(())
    want = tiles(one)
    assert 0 < want.sum() < want.numel()
    assert torch.equal(jvp(tiles, (one,), (one,))[0], want)
    assert torch.equal(jacrev(tiles)(one), want)
    of_documents = vmap(lambda x: x * tiles_of(blocks(MODS["documents"], compact=compact)))(torch.ones(2))
    assert torch.equal(of_documents[1], tiles_of(blocks(MODS["documents"])))


def test_a_mask_for_each_example_is_refused():
    with pytest.raises(FlexError, match=r"inside of torch.func.vmap depends on a tensor that differs"):
        vmap(lambda ids: blocks(lambda b, h, q, kv: ids[q] == ids[kv]).kv_indices)(IDS.expand(2, -1))
    with pytest.raises(FlexError, match=r"inside of torch.func.vmap depends on a tensor that differs"):
        vmap(grad(lambda at: at * blocks(lambda b, h, q, kv: q >= kv + at).kv_indices.sum()))(torch.ones(2))


def test_packed_sequences_in_vmap_are_refused_in_the_users_words():
    query, attend, _ = packed(MODS["window"], {})
    text = r"packed sequences \(varlen_attention, nested tensors\) is not served inside of torch.func.vmap"
    with pytest.raises(FlexError, match=text):
        vmap(attend)(query.expand(2, *query.shape))
    with pytest.raises(FlexError, match=text):
        jacrev(attend)(query)


def test_what_a_transform_leaves_behind():
    """Masks are data. Tensors of a grad that has ended are their values, as in torch's functions."""
    left = []

    def loss(query):
        ids = IDS + 0
        left[:] = [blocks(MODS["analysed"]), ids, Sequences(SEQUENCES.cu_q + 0)]
        return query.sum()

    grad(loss)(Q)
    mask, ids, sequences = left
    assert torch.equal(flex_attention(Q, K, V, block_mask=mask), plain(MODS["analysed"], {})[1](Q))
    by_ids = blocks(lambda b, h, q, kv: ids[q] == ids[kv])
    assert torch.equal(flex_attention(Q, K, V, block_mask=by_ids), plain(MODS["documents"], {})[1](Q))
    query, attend, made = packed(MODS["documents"], {})
    by_ids = sequences.mask(lambda b, h, q, kv: ids[q] == ids[kv])
    key, value = (t[0].transpose(0, 1) for t in (K, V))
    assert torch.equal(varlen_attention(query, key, value, sequences, None, by_ids), attend(query, made))


def test_an_example_of_a_vmap_that_has_ended_is_refused():
    left = []
    vmap(lambda bias: left.append(bias) or bias)(rows(2, LENGTH))
    with pytest.raises(FlexError, match=r"made inside of a torch.func.vmap that has ended. Return it"):
        flex_attention(Q, K, V, lambda score, b, h, q, kv: score + left[0][kv])
