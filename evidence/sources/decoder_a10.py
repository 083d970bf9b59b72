"""One more decoder of the assignment in `evidence/decoder.py`, on an A10: TobinZuo's own model.

It is written as functions of a table of weights: softmax, RMSNorm and SwiGLU from plain operations,
rotary positions computed anew in each layer, an AdamW that works in place.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from evidence.cards import card
from evidence.sources.course import LARGE, MEDIUM, SMALL, XL
from fake_cuda import Simulation, simulate

WORDS, BATCH, LENGTH = 10_000, 4, 512
SIZES = {"small": SMALL, "medium": MEDIUM, "large": LARGE, "xl": XL}
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STAGES = ("forward", "forward and backward", "step")


def norm(x, weight):
    return x / torch.sqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-5) * weight


def softmax(x):
    powers = torch.exp(x - torch.max(x, dim=-1, keepdim=True).values)
    return powers / torch.sum(powers, dim=-1, keepdim=True)


def rotated(x):  # (batch, heads, length, size), and so is what is returned
    half = x.shape[-1] // 2
    rates = 1.0 / (10_000.0 ** (2 * torch.arange(0, half, dtype=torch.float32) / x.shape[-1]))
    angles = torch.arange(x.shape[-2])[None, None].to(torch.float32)[..., None] * rates
    cos, sin = torch.cos(angles).to(x.dtype), torch.sin(angles).to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    one, two = even * cos - odd * sin, even * sin + odd * cos
    out = torch.empty_like(x)
    out[..., 0::2] = one
    out[..., 1::2] = two
    return out


class Block(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, **_):
        super().__init__()
        self.heads = heads
        shapes = [(width, width)] * 4 + [(inner, width), (width, inner), (inner, width)]
        self.weights = nn.ParameterList(torch.empty(shape) for shape in shapes)
        self.norms = nn.ParameterList(torch.ones(width) for _ in range(2))

    def attend(self, x):
        q, k, v = (
            (x @ weight.T).reshape(*x.shape[:-1], self.heads, -1).transpose(-3, -2)
            for weight in self.weights[:3]
        )
        q, k = rotated(q), rotated(k)
        seen = torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        mixed = softmax(scores.masked_fill(~seen, -math.inf)) @ v
        return mixed.transpose(-3, -2).reshape(x.shape) @ self.weights[3].T

    def forward(self, x):  # (batch, length, width), and so is what is returned
        x = x + self.attend(norm(x, self.norms[0]))
        one, two, three = self.weights[4:]
        y = norm(x, self.norms[1])
        gate, wide = y @ one.T, y @ three.T
        return x + (wide * (gate * torch.sigmoid(gate))) @ two.T


class Decoder(nn.Module):
    def __init__(self, width: int, layers: int, **shape):
        super().__init__()
        self.table = nn.Parameter(torch.empty(WORDS, width))
        self.blocks = nn.ModuleList(Block(width, **shape) for _ in range(layers))
        self.norm = nn.Parameter(torch.ones(width))
        self.head = nn.Parameter(torch.empty(WORDS, width))

    def forward(self, ids):
        for known in (torch.all(ids >= 0), torch.all(ids < WORDS)):
            known.item()  # he asks whether they are words
        x = self.table[ids]
        for block in self.blocks:
            x = block(x)
        return norm(x, self.norm) @ self.head.T


class AdamW(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
            p.data.mul_(0.99)
            state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
            state["v"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
            p.data.addcdiv_(state["m"], state["v"].sqrt().div_(0.1).add_(1e-8), value=-0.1)


def passes(size: str, kind: str, stage: str) -> Simulation:
    """Two steps, two passes with backward, or one without gradients."""
    back = stage != "forward"

    def run():
        model = Decoder(**SIZES[size])
        optimizer = AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cpu", enabled=kind == "fp16" and back)
        ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
        for _ in range(1 + back):  # without backward all passes would count as one
            model.zero_grad()
            with torch.set_grad_enabled(back):
                with torch.autocast("cuda", TYPES[kind], enabled=kind != "fp32"):
                    loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            if back:
                scaler.scale(loss).backward()
            if stage == "step":
                scaler.step(optimizer)
                scaler.update()
        return model, optimizer

    return simulate(run, card=card("A10"))


RUNS = {  # of each size and type the stages that he timed and that were drawn
    **{("small", kind): STAGES for kind in TYPES},
    ("medium", "fp32"): STAGES[1:],
    ("medium", "bf16"): STAGES,
    ("medium", "fp16"): STAGES[1:],
    **{("large", kind): STAGES[:2] for kind in TYPES},
    **{("xl", kind): STAGES[:1] for kind in TYPES},
}


def runs() -> Iterator[tuple[str, Callable]]:
    for (size, kind), stages in RUNS.items():
        for stage in stages:
            yield f"{size} {kind}, {stage}", partial(passes, size, kind, stage)


STEPS = {"decoder-a10": runs}
