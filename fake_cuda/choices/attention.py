"""Attention by the kernel that CUDA picks (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).

The kernels' shape functions and gradient formulas are part of every build of torch.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..ordered import in_order
from ..trace import Trace

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
FLASH, CUDNN, EFFICIENT, PLAIN = "flash", "cudnn", "efficient", "plain"


class Call(NamedTuple):
    """A call of attention, of tensors [batch, heads, length, width].

    `grouped` is whether there are fewer heads of keys than of queries.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    grouped: bool

    @property
    def widths(self) -> tuple[int, int, int]:
        return self.query.shape[-1], self.key.shape[-1], self.value.shape[-1]

    @property
    def trains(self) -> bool:
        tensors = (self.query, self.key, self.value)
        return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)

    @property
    def half(self) -> bool:
        return self.query.dtype in HALF and self.query.dim() == 4


def cast(call: Call) -> Call:
    """As autocast casts it."""
    if not torch.is_autocast_enabled("cpu"):
        return call
    dtype, mask = torch.get_autocast_dtype("cpu"), call.mask
    query, key, value = (x.to(dtype) for x in call[:3])
    if mask is not None and mask.is_floating_point():
        mask = mask.to(dtype)
    return call._replace(query=query, key=key, value=value, mask=mask)


class Kernels:
    """Which kernel a card takes for a call, with the versions of a simulation."""

    def __init__(self, trace: Trace):
        self.trace, self.versions = trace, trace.versions
        self.capability = capability = trace.card.capability
        self.narrow = (8, 6) <= capability <= (8, 9) or capability in ((12, 0), (12, 1))

    def cudnn(self, call: Call) -> bool:
        """16 bits, a dropout in sixteenths, more than one key, heads in eights and not too wide;
        and only where it comes first (check_prefer_cudnn_attention) and may add up in any order
        (check_cudnn_deterministic)."""
        first = self.capability[0] in (9, 10) and self.versions.cudnn_first and not in_order()
        if not (first and call.half and torch.backends.cuda.cudnn_sdp_enabled()):
            return False
        widths, wider = call.widths, self.versions.wide_cudnn
        most = 256 if wider and not call.trains else 128
        wide = wider and (widths[0], widths[2]) in ((192, 128), (256, 256))
        fits = all(n % 8 == 0 for n in widths) and (max(widths) <= most or wide)
        return fits and call.key.shape[-2] > 1 and call.dropout * 16 % 1 == 0

    def flash(self, call: Call) -> bool:
        """16 bits, no mask and heads of one width up to 256; where it is to be trained on 8.6 to
        8.9 or 12, up to 192, or more than 224 without dropout
        (check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120)."""
        width = call.widths[0]
        if self.narrow and call.trains and (192 < width <= 224 or width > 224 and call.dropout):
            return False
        fits = call.half and call.mask is None and len(set(call.widths)) == 1 and width <= 256
        return fits and self.capability >= (8, 0) and torch.backends.cuda.flash_sdp_enabled()

    def efficient(self, call: Call) -> bool:
        """The rest, but bf16 on a card without flash, and heads that it does not read in groups."""
        grouped = call.grouped and not self.versions.efficient_reads_groups
        emulated = self.capability < (8, 0) and not self.trace.fp16
        old = emulated and call.query.dtype == torch.bfloat16
        plain = grouped or old or call.query.dim() != 4 or call.query.dtype == torch.float64
        return not plain and torch.backends.cuda.mem_efficient_sdp_enabled()

    def pick(self, call: Call) -> str:
        """The first that takes the call; RuntimeError as torch's where all are switched off."""
        for name, takes in ((CUDNN, self.cudnn), (FLASH, self.flash), (EFFICIENT, self.efficient)):
            if takes(call):
                return name
        if not torch.backends.cuda.math_sdp_enabled():  # select_sdp_backend
            raise RuntimeError("No available kernel. Aborting execution.")
        return PLAIN


def _full_mask(mask: torch.Tensor | None, query, key) -> torch.Tensor | None:
    """A mask as fused kernels read it: of numbers, expanded to all heads."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -math.inf)
    return mask.expand(*query.shape[:3], key.shape[2])


def attention_of(trace: Trace) -> Callable:
    """`scaled_dot_product_attention` as on the card of `trace`."""
    kernels = Kernels(trace)

    def attention(
        query,
        key,
        value,
        attn_mask=None,
        dropout_p=0.0,
        is_causal=False,
        scale=None,
        enable_gqa=False,
    ):
        grouped = enable_gqa and query.shape[-3] != key.shape[-3]
        call = cast(Call(query, key, value, attn_mask, dropout_p, grouped))
        q, k, v = call[:3]
        if not trace.fp16 and len({q.dtype, k.dtype, v.dtype}) > 1:
            return aten.scaled_dot_product_attention(q, k, v)  # which refuses them
        kernel = kernels.pick(call)
        if kernel == FLASH:
            flash = aten._scaled_dot_product_flash_attention
            return flash(q, k, v, dropout_p, is_causal, scale=scale)[0]
        if kernel == PLAIN:
            options = {"scale": scale, "enable_gqa": enable_gqa}
            plain = aten._scaled_dot_product_attention_math
            return plain(q, k, v, call.mask, dropout_p, is_causal, **options)[0]
        fused = aten._scaled_dot_product_efficient_attention
        if kernel == CUDNN:
            fused = aten._scaled_dot_product_cudnn_attention
        mask = _full_mask(call.mask, q, k)
        return fused(q, k, v, mask, True, dropout_p, is_causal, scale=scale)[0]

    return attention


@contextmanager
def fused_attention(trace: Trace) -> Iterator[None]:
    """Attention takes the kernel of the card."""
    chosen = attention_of(trace)
    with trace.here.replaced((F, "scaled_dot_product_attention", chosen)):
        yield
