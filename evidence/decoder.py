"""The decoder of an assignment that many solve, written anew: Stanford's CS336, the second.

A model in plain operations: RMSNorm, SwiGLU, rotary positions, causal attention by matrices, a
softmax. Its editions and the students who wrote theirs anew differ in a few places; `Student.code`
names whose code a run had.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WORDS = 10_000


@dataclass(frozen=True)
class Student:
    """One run: the sizes of the model, and what this student does otherwise than the others."""

    width: int
    layers: int
    heads: int
    inner: int
    length: int
    batch: int = 4
    bf16: bool = False  # autocast
    # Whose model: the assignment's of a year, or this student's own.
    code: Literal["2026", "2025", "niuhuang", "luke396"] = "2026"
    loss: str = "every token"  # | flat | of torch | of the last token | logsumexp
    adamw: str = "decay first"  # when it shrinks the weights | decay last | new weights | in place
    steps: int = 2  # (AdamW also "of torch")
    stage: str = "train"  # | one step after all passes | backward | forward | forward and loss
    no_grad: Callable = nullcontext  # around a forward pass
    holds: bool = False  # the results of a step live until the next ones replace them
    tried: bool = False  # one forward pass before the first step
    gradients: str = "freed after a step"  # | freed before backward
    waits: bool = False  # the host waits for each stage, as one does to time them apart
    segments: int = 0  # of layers that are checkpointed
    halved: bool = False  # layers are checkpointed by halves, and those by halves again
    named: bool = True  # what the table gave is, and lives as long as a forward pass (2026's code)
    whole: bool = False  # the log holds the whole run, not only its last step


class Linear(nn.Module):
    def __init__(self, into: int, out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, into))

    def forward(self, x):
        return torch.einsum("...i,oi->...o", x, self.weight)


class Table(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WORDS, width))

    def forward(self, words):
        return self.weight[words]


class Norm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):  # (batch, length, width), and so is what is returned
        kind, x = x.dtype, x.to(torch.float32)
        return (self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))).to(kind)


class NormOfNiuhuang(Norm):
    def forward(self, x):
        kind, x = x.dtype, x.to(torch.float32)
        return (x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-5) * self.weight).to(kind)


class Rotation(nn.Module):
    """Rotary positions (arXiv 2104.09864), the pairs interleaved; 2026's code."""

    def __init__(self, student: Student):
        super().__init__()
        self.half = student.width // student.heads // 2
        self.make_tables(student)

    def make_tables(self, student: Student) -> None:
        table = torch.empty(2, student.length, self.half)
        self.register_buffer("table", table, persistent=False)

    def forward(self, x):  # (batch, heads, length, size), and so is what is returned
        one, two = x.unflatten(-1, (self.half, 2)).movedim(-1, 0).unbind(0)
        cos, sin = self.table[:, : x.shape[-2]].unbind(0)  # (length, half) each
        return torch.cat((cos * one - sin * two, sin * one + cos * two), dim=-1)


class RotationOf2025(Rotation):
    """The tables are looked up by positions."""

    def forward(self, x, at=None):
        one, two = x.unflatten(-1, (self.half, 2)).movedim(-1, 0).unbind(0)
        cos, sin = self.table[:, at]
        left, right = cos * one - sin * two, sin * one + cos * two
        return torch.stack((left, right), dim=-1).flatten(-2)


class RotationOfNiuhuang(Rotation):
    """The tables stay in the CPU's memory and are copied each time."""

    def make_tables(self, student: Student) -> None:
        pass

    def forward(self, x):
        sin, cos = (torch.empty(x.shape[-2], self.half, 1) for _ in range(2))
        x = x.unflatten(-1, (self.half, 2))
        one = cos * x[..., :1] - sin * x[..., 1:]
        two = sin * x[..., :1] + cos * x[..., 1:]
        return torch.cat([one, two], dim=-1).flatten(-2)


class NoRotation(nn.Module):
    def __init__(self, student: Student):
        super().__init__()

    def forward(self, x):
        return x


def _powers(x, top):
    below = x - top  # named: it lives until the function ends
    powers = torch.exp(below)
    return powers / torch.sum(powers, dim=-1, keepdim=True)


def softmax(x):
    return _powers(x, x.max(-1, keepdim=True)[0])


def softmax_of_luke396(x):
    """`amax` keeps its input for backward, `max` the places only."""
    return _powers(x, x.amax(dim=-1, keepdim=True))


def softmax_of_niuhuang(x):
    """It takes the exponential twice."""
    top = torch.max(x, dim=-1, keepdim=True)[0]
    return torch.exp(x - top) / torch.sum(torch.exp(x - top), dim=-1, keepdim=True)


def attend(q, k, v, softmax: Callable):
    """q, k, v and what is returned: (batch, heads, length, size)."""
    at = torch.arange(q.shape[-2])
    seen = (at[:, None] >= at[None])[None]  # (1, length, length)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.shape[-1])
    scores = torch.where(seen, scores, -math.inf)
    weights = softmax(scores)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


def attend_of_niuhuang(q, k, v, softmax: Callable):
    length = q.shape[-2]
    seen = torch.empty(length, length)  # copied from the CPU
    products = torch.einsum("bhqd,bhkd->bhqk", q, k)
    scores = products / torch.sqrt(torch.full((), q.shape[-1]))
    masked = scores.masked_fill_(~seen.bool(), -math.inf)
    weights = softmax(masked)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


@dataclass(frozen=True)
class Code:
    """The parts in which the models differ."""

    norm: type[nn.Module] = Norm
    rotation: type[nn.Module] = Rotation
    softmax: Callable = softmax
    attend: Callable = attend
    norms_first: bool = False  # in the order of a block's modules, and so of the gradients


CODES = {
    "2026": Code(),
    "2025": Code(rotation=RotationOf2025),
    "luke396": Code(rotation=NoRotation, softmax=softmax_of_luke396),
    "niuhuang": Code(
        NormOfNiuhuang, RotationOfNiuhuang, softmax_of_niuhuang, attend_of_niuhuang, True
    ),
}


class Attention(nn.Module):
    def __init__(self, student: Student, rotation: nn.Module):
        super().__init__()
        self.heads, self.code = student.heads, CODES[student.code]
        self.q, self.k, self.v, self.out = (Linear(student.width, student.width) for _ in range(4))
        self.rotation = rotation

    def forward(self, x):  # (batch, length, width), and so is what is returned
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (wide.unflatten(-1, (self.heads, -1)).transpose(1, 2) for wide in (q, k, v))
        looked_up = isinstance(self.rotation, RotationOf2025)
        at = (torch.arange(q.shape[-2]),) if looked_up else ()
        q = self.rotation(q, *at)
        k = self.rotation(k, *at)
        mixed = self.code.attend(q, k, v, self.code.softmax)
        mixed = mixed.transpose(1, 2).flatten(-2)
        return self.out(mixed)


def silu(x):
    return x * torch.sigmoid(x)


class Feed(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.one, self.two, self.three = (
            Linear(width, inner),
            Linear(inner, width),
            Linear(width, inner),
        )

    def forward(self, x):
        return self.two(silu(self.one(x)) * self.three(x))


class Block(nn.Module):
    def __init__(self, student: Student, rotation: nn.Module):
        super().__init__()
        code = CODES[student.code]
        parts = {
            "attention": partial(Attention, student, rotation),
            "feed": partial(Feed, student.width, student.inner),
            "before": partial(code.norm, student.width),
            "between": partial(code.norm, student.width),
        }
        order = list(parts)
        for name in order[2:] + order[:2] if code.norms_first else order:
            self.add_module(name, parts[name]())

    def forward(self, x):  # (batch, length, width), and so is what is returned
        attended = self.attention(self.before(x))
        between = x + attended
        fed = self.feed(self.between(between))
        return between + fed


def by_halves(blocks: list[nn.Module], x):
    if len(blocks) == 1:
        return blocks[0](x)
    middle = len(blocks) // 2
    for half in (blocks[:middle], blocks[middle:]):
        x = checkpoint(partial(by_halves, half), x, use_reentrant=False)
    return x


class Decoder(nn.Module):
    def __init__(self, student: Student):
        super().__init__()
        self.student = student
        code = CODES[student.code]
        self.table, rotation = Table(student.width), code.rotation(student)
        self.blocks = nn.ModuleList(Block(student, rotation) for _ in range(student.layers))
        self.norm, self.head = code.norm(student.width), Linear(student.width, WORDS)

    def forward(self, words):
        x, blocks = self.table(words), list(self.blocks)  # (batch, length, width)
        _embedded = x if self.student.named else None
        count = self.student.segments
        for i in range(count):
            part = nn.Sequential(*blocks[i * len(blocks) // count : (i + 1) * len(blocks) // count])
            x = checkpoint(part, x, use_reentrant=False)
        if self.student.halved:
            x = by_halves(blocks, x)
        for block in blocks if not (count or self.student.halved) else []:
            x = block(x)
        return self.head(self.norm(x))  # (batch, length, WORDS)
