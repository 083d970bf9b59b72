"""The package flash-attn: torch has a copy of its kernels, which allocate and keep the same.

Both keep queries, keys, values, the result, a float32 of each row and the generator's state; both
take the same scratch backward (mha_fwd, mha_bwd and their varlen forms in
csrc/flash_attn/flash_api.cpp; aten/src/ATen/native/transformers/cuda/flash_attn). ALiBi's slopes
are read where they lie (set_params_alibi). Whether backward adds up in one order is told by an
argument, and not by torch's switch.
"""

from contextlib import ExitStack

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from ..ordered import told
from .words import Stop

VERSION = "2.8.3"
AMPERE = (8, 0)
LIKE = "flash_attn's {}, whose memory is not known here"
CACHE = "generates text with flash_attn_with_kvcache, which is not predicted"


def _check(q, *others) -> None:
    """As flash_api.cpp checks."""
    if any(not x.is_cuda for x in (q, *others)):
        raise RuntimeError("flash_attn runs on a card alone: a tensor is on the CPU")
    if torch.cuda.get_device_capability() < AMPERE:
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if any(x.dtype != q.dtype for x in others):
        raise RuntimeError("query and key must have the same dtype")
    if q.shape[-1] > 256:
        raise RuntimeError("FlashAttention forward only supports head dimension at most 256")
    if q.shape[-2] % others[0].shape[-2]:
        raise RuntimeError("Number of heads in key/value must divide number of heads in query")


def _check_slopes(q, slopes) -> None:
    """As set_params_alibi checks them."""
    if slopes is None:
        return
    heads, texts = q.shape[-2], slopes.shape[:-1]
    if slopes.dtype != torch.float32:
        raise RuntimeError("ALiBi slopes must have dtype fp32")
    if (
        slopes.shape[-1] != heads
        or len(texts) > 1
        or q.dim() == 4
        and texts not in ((), q.shape[:1])
    ):
        raise RuntimeError("alibi_slopes must have the shape [heads] or [batch, heads]")


def _refuse(**given) -> None:
    """What changes the memory: the attention itself as a result, and keys that lie in pages."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise Stop(f"uses {LIKE.format(name)}")


def _ordered(out, deterministic: bool):
    """A result whose backward pass adds up in one order if that is asked for."""
    node = out.grad_fn
    if node is None:
        return out
    stack = ExitStack()
    node.register_prehook(lambda _: stack.enter_context(told(bool(deterministic))) and None)
    node.register_hook(lambda *_: stack.close())
    return out


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """Attention of [batch, length, heads, width]; keys and values may have fewer heads.

    A window takes no other memory; its time is that of the whole attention, which is longer.
    """
    _check(q, k, v)
    _check_slopes(q, alibi_slopes)
    _refuse(return_attn_probs=return_attn_probs)
    wide = -q.shape[-1] % 8
    q, k, v = (F.pad(x, (0, wide)) if wide else x for x in (q, k, v))
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    out = flash(*turned, dropout_p, causal, scale=softmax_scale)[0]
    out = _ordered(out, deterministic).transpose(1, 2)
    return out[..., : out.shape[-1] - wide] if wide else out


def flash_attn_qkvpacked_func(qkv, *args, **options):
    """As `flash_attn_func`, of [batch, length, 3, heads, width].

    The package writes one gradient where three are put together here; that moment is below the one
    of the kernel's scratch.
    """
    return flash_attn_func(*qkv.unbind(2), *args, **options)


def flash_attn_kvpacked_func(q, kv, *args, **options):
    """As `flash_attn_func`, of keys and values [batch, length, 2, heads, width]."""
    return flash_attn_func(q, *kv.unbind(2), *args, **options)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """Attention of texts end to end, [tokens, heads, width]: its time depends on their lengths."""
    _refuse(block_table=block_table)
    _check(q, k, v)
    _check_slopes(q, alibi_slopes)
    _refuse(return_attn_probs=return_attn_probs)
    wide = -q.shape[-1] % 8
    q, k, v = (F.pad(x, (0, wide)) if wide else x for x in (q, k, v))
    longest = (max_seqlen_q, max_seqlen_k)
    longest = [q.shape[0] if isinstance(n, torch.Tensor) else int(n) for n in longest]
    window = (-1, 0) if causal else (-1, -1)
    options = dict(scale=softmax_scale, window_size=window, enable_gqa=q.shape[1] != k.shape[1])
    out = varlen_attn(q, k, v, cu_seqlens_q, cu_seqlens_k, *longest, **options)
    out = _ordered(out, deterministic)
    return out[..., : out.shape[-1] - wide] if wide else out


def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, *args, **options):
    """As `flash_attn_varlen_func`, of [tokens, 3, heads, width]."""
    ends = 2 * (cu_seqlens,) + 2 * (max_seqlen,)
    return flash_attn_varlen_func(*qkv.unbind(1), *ends, *args, **options)


def flash_attn_varlen_kvpacked_func(q, kv, *args, **options):
    """As `flash_attn_varlen_func`, of keys and values [tokens, 2, heads, width]."""
    return flash_attn_varlen_func(q, *kv.unbind(1), *args, **options)


def flash_attn_with_kvcache(*_, **__):
    raise Stop(CACHE)


def index_first_axis(rows, indices):
    """Rows [n, ...] of these indices, of which alone something is kept."""
    return rows.index_select(0, indices)


def index_put_first_axis(values, indices, n):
    """Rows put to their places among n, the others 0."""
    return values.new_zeros(n, *values.shape[1:]).index_put_((indices,), values)


def unpad_input(hidden_states, attention_mask, unused_mask=None):
    """Tokens of [batch, length, ...] whose mask is 1, their places, borders, longest text, counts.

    How many there are follows from the mask's values: a mask that was made on the card has none.
    """
    both = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = both.sum(-1, dtype=torch.int32)
    indices = torch.nonzero(both.flatten()).flatten()
    borders = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    used = attention_mask.sum(-1, dtype=torch.int32)
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, borders, lengths.max().item(), used


def pad_input(hidden_states, indices, batch, seqlen):
    """Tokens put back to [batch, length, ...]."""
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.unflatten(0, (batch, seqlen))


FUNCTIONS = (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_kvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_with_kvcache,
)
KERNELS = {function.__name__: function for function in FUNCTIONS}
PADDING = (index_first_axis, index_put_first_axis, unpad_input, pad_input)
MODULES = {
    "flash_attn": KERNELS,
    "flash_attn.flash_attn_interface": KERNELS,
    "flash_attn.bert_padding": {function.__name__: function for function in PADDING},
}
