"""What torch 2.0 and 2.1 (2023) did with memory otherwise than today, switched on.

Each behaviour stands in that version's source, named beside it, and has no number to tune. Used by
the tests and by the recorded comparisons with real cards, never by the helpers.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

aten = torch.ops.aten
BEHAVIOURS = ("flash attention by tokens", "a list of denominators")
_flash, _flash_backward = (
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_backward,
)
_addcdiv = torch._foreach_addcdiv_


def _by_tokens(*tensors):
    """Heads of each token side by side: copies, unless they lie so already."""
    return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]


class _FlashByTokens(torch.autograd.Function):
    """FlashAttention's first version wanted texts end to end, and so it gave its result; what is
    kept for backward is what came in (`_scaled_dot_product_flash_attention_cuda` in
    aten/src/ATen/native/transformers/cuda/attention.cu until torch 2.2). Today the result lies as
    the queries do."""

    @staticmethod
    def forward(ctx, q, k, v, dropout, causal, scale):
        out, *more = _flash(*_by_tokens(q, k, v), dropout, causal, scale=scale)
        ctx.save_for_backward(q, k, v, out)
        ctx.more, ctx.options = more, (dropout, causal, scale)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out = ctx.saved_tensors
        sums, begins, ends, most, length, seed, offset = ctx.more[:7]
        dropout, causal, scale = ctx.options
        inputs = _by_tokens(grad, q, k, v)
        more = (out, sums, begins, ends, most, length, dropout, causal, seed, offset)
        return *_flash_backward(*inputs, *more, scale=scale), None, None, None


def _flash_by_tokens(q, k, v, dropout=0.0, causal=False, scale=None):
    return (_FlashByTokens.apply(q, k, v, dropout, causal, scale),)


def _beside_the_roots(parameters, averages, roots, *rest):
    """`denom = torch._foreach_add(exp_avg_sq_sqrt, eps)`, where today eps is added in place
    (`_multi_tensor_adam` in torch/optim/adam.py of torch 2.0, and still in June 2023)."""
    denominators = torch._foreach_add(roots, 1e-8)
    _addcdiv(parameters, averages, denominators, *rest)


@contextmanager
def behaving(behaviours: tuple[str, ...] = BEHAVIOURS) -> Iterator[None]:
    """Switch behaviours of 2023 on for a block."""
    with ExitStack() as stack:
        if "flash attention by tokens" in behaviours:
            name = "_scaled_dot_product_flash_attention"
            stack.enter_context(mock.patch.object(aten, name, _flash_by_tokens))
        if "a list of denominators" in behaviours:
            stack.enter_context(mock.patch.object(torch, "_foreach_addcdiv_", _beside_the_roots))
        yield
