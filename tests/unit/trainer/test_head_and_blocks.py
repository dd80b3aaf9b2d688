"""The chunked head and the block attention against PyTorch's own, values and gradients."""

import pytest
import torch
import torch.nn.functional as F

from sparring.backend.trainer import head, softmax
from sparring.backend.trainer.block_attention import block_attention, prefers_block_attention
from sparring.backend.trainer.head import chunked_logprobs


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows_at_once", [1, 3, 100])
def test_chunks_change_nothing(monkeypatch, bias, rows_at_once):
    torch.manual_seed(0)
    monkeypatch.setattr(head, "_CHUNK_ELEMENTS", 11 * rows_at_once)
    hidden = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    offset = torch.randn(11, dtype=torch.float64, requires_grad=True) if bias else None
    temperature = torch.rand(7, dtype=torch.float64) + 0.5
    term_row, targets = torch.tensor([0, 3, 3, 6, 1, 3]), torch.tensor([2, 10, 10, 0, 5, 7])  # one pair twice
    coefficients = torch.randn(6, dtype=torch.float64)
    logprobs, entropy = chunked_logprobs(hidden, weight, offset, 1 / temperature, term_row, targets, torch.float64)
    (logprobs * coefficients).sum().backward()

    inputs = [t for t in (hidden, weight, offset) if t is not None]
    got = [t.grad for t in inputs]
    full = (F.linear(hidden, weight, offset) / temperature[:, None]).log_softmax(-1)
    torch.testing.assert_close(logprobs, full[term_row, targets])
    torch.testing.assert_close(entropy, -(full.exp() * full).sum(-1))
    expected = torch.autograd.grad((full[term_row, targets] * coefficients).sum(), inputs)
    torch.testing.assert_close(got, list(expected))


def test_the_head_keeps_one_chunk_of_logits_and_no_more():
    """Saved for backward: inputs and one number a row; never anything of the size of the vocabulary but the weight."""
    sizes = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    hidden, weight = torch.randn(64, 4, requires_grad=True), torch.randn(5000, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        chunked_logprobs(hidden, weight, None, torch.ones(64), torch.arange(64), torch.arange(64), torch.float32)[
            0
        ].sum().backward()
    assert max(sizes) == weight.numel()
    assert sum(size > weight.numel() // 2 for size in sizes) == 1


def test_the_gradient_of_a_sure_policy_survives_rounding():
    """1 - p is a small difference of large numbers: rounding p to bfloat16 before the subtraction would leave noise."""
    chosen = torch.arange(50)
    hidden, weight = (8 * torch.eye(50)).requires_grad_(), torch.eye(50)  # all logits exact in bfloat16
    logprobs, _ = chunked_logprobs(hidden, weight, None, torch.ones(50), chosen, chosen, torch.bfloat16)
    assert 0.98 < logprobs.detach().exp().min() < 0.99
    logprobs.sum().backward()
    wide = hidden.detach().double().requires_grad_()
    wide.log_softmax(-1).diagonal().sum().backward()
    torch.testing.assert_close(hidden.grad.double(), wide.grad, rtol=1e-2, atol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_fused_passes_give_what_the_passes_in_place_give(temperature):
    torch.manual_seed(0)
    logits, scale, inverse = torch.randn(5, 300).mul_(20), torch.randn(5), torch.full((5,), 1 / temperature)
    lse, entropy = softmax._statistics(logits, inverse)
    in_place = softmax.softmax_passes("cpu")
    torch.testing.assert_close([lse, entropy], list(in_place.statistics(logits.clone(), inverse)))
    torch.testing.assert_close(
        softmax._gradient(logits, lse, scale, inverse, torch.float32),
        in_place.gradient(logits.clone(), lse, scale, inverse, torch.float32),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_attention_is_masked_grouped_attention(dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(5, heads, n, 16, dtype=dtype, requires_grad=True) for heads, n in ((6, 7), (2, 19), (2, 19)))
    mask = torch.rand(5, 1, 7, 19) < 0.5
    mask[..., 0] = True
    grad = torch.randn(5, 6, 7, 16, dtype=dtype)
    block_attention(q, k, v, mask, 0.25).backward(grad)
    got = [block_attention(q, k, v, mask, 0.25).detach(), q.grad, k.grad, v.grad]
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out = F.scaled_dot_product_attention(*wide, attn_mask=mask, scale=0.25, enable_gqa=True)
    expected = [out.detach(), *torch.autograd.grad(out, wide, grad.double())]
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=tolerance * float(b.abs().max()))


def test_block_attention_is_for_small_bfloat16_blocks_on_a_cpu():
    small, large = torch.empty(1, 9, 60, 64), torch.empty(1, 9, 3000, 64)
    assert prefers_block_attention(small.bfloat16(), small.bfloat16())
    assert not prefers_block_attention(small, small)
    assert not prefers_block_attention(large.bfloat16(), large.bfloat16())
