"""What torch did until 2.1 (2023)."""

from contextlib import AbstractContextManager
from unittest import mock

import torch

from evidence.libraries.behaviour import Behaviour

aten = torch.ops.aten
_flash, _flash_backward = (
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_backward,
)
_addcdiv = torch._foreach_addcdiv_


def _by_tokens(*tensors):
    """The tokens of all texts end to end. Of several texts that is a copy, unless they lie so
    already; a single text is only seen otherwise, and its heads stay where they are."""
    texts, heads = tensors[0].shape[:2]
    ends = [x.transpose(1, 2).reshape(-1, heads, x.shape[-1]) for x in tensors]
    return [x.view(texts, -1, heads, x.shape[-1]).transpose(1, 2) for x in ends]


class _FlashByTokens(torch.autograd.Function):
    """FlashAttention's first version wanted texts end to end, and its result lay as the queries
    then did; what is kept for backward is what came in. Until torch 2.2 `query.transpose(1, 2)` was
    reshaped to (tokens, heads, size) and the result made like it (`meta__scaled_dot_product_flash`
    in torch/_meta_registrations.py of 2.1.0 says the same of
    aten/src/ATen/native/transformers/cuda/attention.cu)."""

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


_flash_by_tokens.default = _flash.default  # fake tensors ask for it by this name (fake_utils.py)


def _beside_the_roots(parameters, averages, roots, *rest):
    """`denom = torch._foreach_add(exp_avg_sq_sqrt, eps)`, where today eps is added in place
    (`_multi_tensor_adam` in torch/optim/adam.py of torch 2.0, not of 2.1.0)."""
    denominators = torch._foreach_add(roots, 1e-8)
    _addcdiv(parameters, averages, denominators, *rest)


def _flash_attention_by_tokens() -> AbstractContextManager:
    return mock.patch.object(aten, "_scaled_dot_product_flash_attention", _flash_by_tokens)


def _a_list_of_denominators() -> AbstractContextManager:
    return mock.patch.object(torch, "_foreach_addcdiv_", _beside_the_roots)


BEHAVIOURS = (
    # Pull request 105602, FlashAttention-2, came after the cut of 2.1 and was in by this day.
    Behaviour("flash attention by tokens", "2.2.0.dev20230906", _flash_attention_by_tokens),
    # The nightly builds of June 2023 had it, 2.1.0 not any more.
    Behaviour("a list of denominators", "2.1.0", _a_list_of_denominators),
)
