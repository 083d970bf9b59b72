"""FlashAttention alone, timed on an H20 and a B200 in issues of Dao-AILab/flash-attention."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from evidence.cards import card
from fake_cuda import Simulation, simulate


class Attention(nn.Module):  # a module's call marks where the pass begins
    def __init__(self, causal: bool):
        super().__init__()
        self.causal = causal

    def forward(self, q, k, v):  # (batch, heads, length, size) each
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


def flash(
    name: str, batch: int, heads: int, length: int, size: int, causal=False, back=False
) -> Simulation:
    """A pass in float16, or one with its backward."""

    def run():
        shape = batch, heads, length, size
        q, k, v = (torch.zeros(shape, dtype=torch.half, requires_grad=back) for _ in range(3))
        gradient = torch.zeros(shape, dtype=torch.half)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            for _ in range(1 + back):
                q.grad = k.grad = v.grad = None
                y = Attention(causal)(q, k, v)
                if back:
                    y.backward(gradient)
        return q, k, v, y

    return simulate(run, card=card(name))


def on_h20() -> Iterator[tuple[str, Callable]]:
    for size in (64, 128):
        for kind in ("whole", "causal"):
            job = partial(flash, "H20", 2, 2048 // size, 2048, size, kind == "causal")
            yield f"{size} a head, {kind}", job


def on_b200() -> Iterator[tuple[str, Callable]]:
    for length in (512, 1024, 2048, 4096, 8192, 16384):
        for stage in ("forward", "forward and backward"):
            job = partial(flash, "B200", 16384 // length, 32, length, 64, back=stage != "forward")
            yield f"{length} tokens, {stage}", job


STEPS = {"attention-h20": on_h20, "attention-b200": on_b200}
