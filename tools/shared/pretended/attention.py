"""Attention on the pretended card: one kernel where the card has one, else plain matrices."""

import torch
import torch.nn.functional as F

from .card import Card


class Attention(torch.autograd.Function):
    """Attention in one kernel: nothing of the size of its matrix is kept, nor seen in between."""

    @staticmethod
    def forward(ctx, card, options, q, k, v, mask):
        ctx.card, ctx.options, ctx.state = card, options, torch.get_rng_state()
        with card.kernel():
            out = F.scaled_dot_product_attention(q, k, v, mask, **options)
            rows = torch.empty(q.shape[:-1], dtype=torch.float32)
        for tensor in (out, rows):  # the kernel keeps one number a row
            card.place(tensor, True)
        ctx.save_for_backward(q, k, v, mask, out, rows)
        return out

    @staticmethod
    def backward(ctx, gradient):
        given, card = ctx.saved_tensors[:4], ctx.card
        with card.kernel(), torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.set_rng_state(ctx.state)
            inputs = [
                None if t is None else t.detach().requires_grad_(t.is_floating_point())
                for t in given
            ]
            out = F.scaled_dot_product_attention(*inputs, **ctx.options)
            wanted = [i for i, needed in enumerate(ctx.needs_input_grad[2:]) if needed]
            found = torch.autograd.grad(out, [inputs[i] for i in wanted], gradient)
        gradients = [None] * 4
        for i, one in zip(wanted, found, strict=True):
            card.place(one, True)
            gradients[i] = one
        return None, None, *gradients


def attention(
    card: Card,
    q,
    k,
    v,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
):
    """Attention by the kernel that the card would take: one, or plain matrices."""
    if torch.is_autocast_enabled():
        dtype = torch.get_autocast_dtype("cuda")
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    flash = card.capability >= (8, 0)
    asked = torch.backends.cuda
    grouped = enable_gqa and q.shape[-3] != k.shape[-3]
    half = q.dtype in (torch.float16, torch.bfloat16)
    by_flash = flash and half and attn_mask is None and asked.flash_sdp_enabled()
    efficient = asked.mem_efficient_sdp_enabled() and not grouped
    efficient = efficient and (flash or q.dtype != torch.bfloat16)
    if q.dim() != 4 or q.dtype == torch.float64 or not (by_flash or efficient):
        if not asked.math_sdp_enabled():
            raise RuntimeError("No available kernel. Aborting execution.")
        options = {"scale": scale, "enable_gqa": enable_gqa}
        plain = torch.ops.aten._scaled_dot_product_attention_math
        if is_causal:  # its own mask would be made beside the card
            shape = q.shape[-2], k.shape[-2]
            attn_mask, is_causal = torch.ones(shape, dtype=torch.bool, device="cpu").tril(), False
            card.place(attn_mask, True)
        return plain(q, k, v, attn_mask, dropout_p, is_causal, **options)[0]
    options = dict(dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    return Attention.apply(card, options, q, k, v, attn_mask)
