"""Attention behind a long prefix against PyTorch's own in float64, values and gradients."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sparring.backend.trainer import attention, tail_attention
from sparring.backend.trainer.attention import TreeLayout, attend_by_blocks

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
each_dtype = pytest.mark.parametrize("dtype", TOLERANCES)


def leaves(q, k, dtype, batch=()):
    """Query with 6 heads, key and value with 2."""
    torch.manual_seed(0)
    shapes = ((6, q), (2, k), (2, k))
    return [torch.randn(*batch, heads, n, 16, dtype=torch.float64).to(dtype).requires_grad_() for heads, n in shapes]


def values_and_gradients(function, inputs, grad):
    out = function(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad.to(out.dtype))]


def reference(q, k, v):
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(k.shape[-2] - q.shape[-2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.25, enable_gqa=True)


def assert_near(got, expected, dtype):
    for a, b in zip(got, expected, strict=True):
        assert a.dtype is dtype
        torch.testing.assert_close(a.double(), b, rtol=0, atol=TOLERANCES[dtype] * float(b.abs().max()))


@each_dtype
@pytest.mark.parametrize("queries", [(2, 5), (32, 128)], ids=["many tiles", "one tile"])
@pytest.mark.parametrize("k", [13, 40], ids=["whole", "behind a prefix"])
def test_it_is_causal_attention_of_the_last_tokens(monkeypatch, dtype, queries, k):
    monkeypatch.setattr(tail_attention, "_QUERIES", queries)
    monkeypatch.setattr(tail_attention, "_SCORES", 6 * 3 * 40)  # three queries where all keys are seen
    inputs, grad = leaves(13, k, dtype, batch=(2,)), torch.randn(2, 6, 13, 16)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    got = values_and_gradients(lambda *qkv: tail_attention.tail_attention(*qkv, 0.25), inputs, grad)
    assert_near(got, values_and_gradients(reference, wide, grad), dtype)


def test_autocast_leaves_its_types_alone():
    inputs, grad = leaves(13, 40, torch.bfloat16, batch=(1,)), torch.randn(1, 6, 13, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = values_and_gradients(lambda *qkv: tail_attention.tail_attention(*qkv, 0.25), inputs, grad)
    assert {t.dtype for t in got} == {torch.bfloat16}


def test_nothing_as_large_as_the_scores_is_kept_for_backward():
    sizes = []

    def pack(tensor):
        sizes.append(tensor.numel())
        return tensor

    q, k, v = leaves(200, 300, torch.bfloat16, batch=(1,))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        tail_attention.tail_attention(q, k, v, 0.25).sum().backward()
    assert max(sizes) == q.numel() < 200 * 300


def test_it_is_for_bfloat16_on_a_cpu_where_there_are_many_scores():
    query, key = torch.empty(1, 9, 400, 64), torch.empty(1, 3, 3400, 64)
    assert tail_attention.prefers_tail_attention(query.bfloat16(), key.bfloat16())
    assert not tail_attention.prefers_tail_attention(query, key)
    assert not tail_attention.prefers_tail_attention(query[:, :, :4].bfloat16(), key.bfloat16())


@each_dtype
def test_a_tree_of_long_and_short_chunks_attends_along_its_paths(monkeypatch, dtype):
    monkeypatch.setattr(attention, "_LONG", 8 * 40)
    monkeypatch.setattr(tail_attention, "_WORTHWHILE", 6 * 8 * 40)
    prefix = np.arange(30)
    paths = [np.arange(40), np.r_[prefix, 40:50], np.r_[prefix, 50:58], np.r_[prefix[:20], 58:61]]
    layout = TreeLayout(paths, [40, 10, 8, 3])
    assert sorted(b.queries.shape + b.keys.shape for b in layout.blocks if b.mask is None) == [
        (1, 10, 1, 40),  # 8 of 38 are just too short
        (1, 40, 1, 40),
    ]
    dense = torch.zeros(61, 61, dtype=torch.bool)
    for path in paths:
        dense[path[:, None], path] = torch.ones(len(path), len(path), dtype=torch.bool).tril()
    inputs, grad = leaves(61, 61, dtype), torch.randn(6, 61, 16)

    def ours(*qkv):
        return attend_by_blocks(*(t.transpose(0, 1) for t in qkv), layout, 0.25).transpose(0, 1)

    def whole(q, k, v):
        batch = (q[None], k[None], v[None])
        return F.scaled_dot_product_attention(*batch, attn_mask=dense, scale=0.25, enable_gqa=True)[0]

    wide = [t.detach().double().requires_grad_() for t in inputs]
    assert_near(values_and_gradients(ours, inputs, grad), values_and_gradients(whole, wide, grad), dtype)
