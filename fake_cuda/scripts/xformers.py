"""The package xformers, of which scripts take one function: attention that keeps no scores.

It takes the first of its kernels that fits: flash's for 16 bits on Ampere and later, else
CUTLASS's (xformers/ops/fmha/dispatch.py), which are torch's own of these names. Its copy of the
third flash kernels, which it takes on Hopper, is counted as the second.
"""

import torch

from .flash_attn import AMPERE
from .words import Stop

VERSION = "0.0.34"
BIAS = "uses xformers' attention with a bias of the kind {}, whose memory is not known here"


class AttentionBias:
    """What masks scores."""


class LowerTriangularMask(AttentionBias):
    """The causal one."""

    def __init__(self, *_, **__):
        pass


def memory_efficient_attention(
    query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None
):
    """Attention of [batch, length, heads, width], or [batch, length, width].

    `attn_bias` is a `LowerTriangularMask`, or a tensor added to the scores.
    """
    if not query.is_cuda:
        raise NotImplementedError("No operator found for `memory_efficient_attention_forward`")
    causal = isinstance(attn_bias, LowerTriangularMask) or attn_bias is LowerTriangularMask
    bias = None if causal else attn_bias
    if query.dim() not in (3, 4) or not (bias is None or isinstance(bias, torch.Tensor)):
        kind = type(attn_bias).__name__ if query.dim() in (3, 4) else "five dimensions"
        raise Stop(BIAS.format(kind))
    heads = [x if x.dim() == 4 else x[:, :, None] for x in (query, key, value)]
    turned = [x.transpose(1, 2) for x in heads]
    out = _kernel(turned, bias, p, causal, scale).transpose(1, 2)
    return out if query.dim() == 4 else out[:, :, 0]


def _kernel(turned: list, bias, p: float, causal: bool, scale) -> torch.Tensor:
    """The result of the kernel that takes these, [batch, heads, length, width]."""
    widths = {x.shape[-1] for x in turned}
    half = turned[0].dtype in (torch.float16, torch.bfloat16)
    fits = half and bias is None and len(widths) == 1 and max(widths) <= 256
    if fits and not max(widths) % 8 and torch.cuda.get_device_capability() >= AMPERE:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(*turned, p, causal, scale=scale)[0]
    if bias is not None and bias.dim() == 3:
        bias = bias.unflatten(0, (turned[0].shape[0], -1))
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(*turned, bias, True, p, causal, scale=scale)[0]


OF_OPS = dict(
    memory_efficient_attention=memory_efficient_attention,
    LowerTriangularMask=LowerTriangularMask,
    AttentionBias=AttentionBias,
)
BIASES = dict(LowerTriangularMask=LowerTriangularMask, AttentionBias=AttentionBias)
MODULES = {
    "xformers": {},
    "xformers.ops": OF_OPS,
    "xformers.ops.fmha": OF_OPS,
    "xformers.ops.fmha.attn_bias": BIASES,
}
