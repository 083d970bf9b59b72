"""Training runs of an assignment that many solve, written anew: a decoder, its loss and optimizer.

The assignment (Stanford's CS336, the second) asks for memory logs of a model in plain operations:
RMSNorm, SwiGLU, rotary positions, causal attention by matrices, a softmax, a loss and an AdamW by
hand. Four students published logs of CUDA's allocator and a fifth the peaks; what differs between
them is a field of `Student`. Sources: the column `source` of data/measurements/peaks.csv.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fake_cuda import Simulation, simulate, trace
from fake_cuda.scratch import workspace

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
    rotate: str = "halves"  # positions: sliced | looked up by index | made on the CPU each time
    loss: str = "every token"  # | flat | of torch | of the last token
    adamw: str = "decay first"  # when it shrinks the weights | decay last | new weights | of torch
    steps: int = 2
    stage: str = "train"  # | backward | forward
    no_grad: Callable = nullcontext  # around a forward pass
    holds: bool = False  # the results of a step live until the next ones replace them
    tried: bool = False  # one forward pass before the first step
    segments: int = 0  # of layers that are checkpointed
    capability: tuple[int, int] = (8, 0)  # where the card is unknown, so are its 108 processors
    sms: int = 108
    torch: str = "2.11.0"
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
    def __init__(self, width: int, student: Student):
        super().__init__()
        self.weight, self.root = nn.Parameter(torch.ones(width)), student.rotate == "each time"

    def forward(self, x):
        kind, x = x.dtype, x.to(torch.float32)
        if self.root:
            return (x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-5) * self.weight).to(kind)
        return (self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))).to(kind)


class Rotation(nn.Module):
    """Rotary positions (arXiv 2104.09864), the pairs interleaved."""

    def __init__(self, student: Student):
        super().__init__()
        self.how, self.half = student.rotate, student.width // student.heads // 2
        if self.how != "each time":
            table = torch.empty(2, student.length, self.half)
            self.register_buffer("table", table, persistent=False)

    def forward(self, x, at=None):
        length = x.shape[-2]
        if self.how == "each time":  # its tables stay in the CPU's memory and are copied each time
            sin, cos = (torch.empty(length, self.half, 1) for _ in range(2))
            x = x.unflatten(-1, (self.half, 2))
            one = cos * x[..., :1] - sin * x[..., 1:]
            two = sin * x[..., :1] + cos * x[..., 1:]
            return torch.cat([one, two], dim=-1).flatten(-2)
        one, two = x.unflatten(-1, (self.half, 2)).movedim(-1, 0).unbind(0)
        if self.how == "looked up":
            cos, sin = self.table[:, at]
        else:
            cos, sin = self.table[:, :length].unbind(0)
        left, right = cos * one - sin * two, sin * one + cos * two
        if self.how == "looked up":
            return torch.stack((left, right), dim=-1).flatten(-2)
        return torch.cat((left, right), dim=-1)


def softmax(x, student: Student):
    if student.rotate == "each time":  # this student takes the exponential twice
        top = torch.max(x, dim=-1, keepdim=True)[0]
        return torch.exp(x - top) / torch.sum(torch.exp(x - top), dim=-1, keepdim=True)
    below = x - torch.max(x, dim=-1, keepdim=True)[0]  # named: it lives until the function ends
    powers = torch.exp(below)
    return powers / torch.sum(powers, dim=-1, keepdim=True)


def attend(q, k, v, student: Student):
    length = q.shape[-2]
    if student.rotate == "each time":
        seen = torch.empty(length, length)  # copied from the CPU
        products = torch.einsum("bhqd,bhkd->bhqk", q, k)
        scores = products / torch.sqrt(torch.full((), q.shape[-1]))
        masked = scores.masked_fill_(~seen.bool(), -math.inf)
        weights = softmax(masked, student)
    else:
        at = torch.arange(length)
        seen = (at[:, None] >= at[None])[None]
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.shape[-1])
        scores = torch.where(seen, scores, -math.inf)
        weights = softmax(scores, student)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


class Attention(nn.Module):
    def __init__(self, student: Student, rotation: nn.Module):
        super().__init__()
        self.student = student
        self.q, self.k, self.v, self.out = (Linear(student.width, student.width) for _ in range(4))
        self.rotation = rotation

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (
            wide.unflatten(-1, (self.student.heads, -1)).transpose(1, 2) for wide in (q, k, v)
        )
        at = torch.arange(q.shape[-2]) if self.student.rotate == "looked up" else None
        q = self.rotation(q, at)
        k = self.rotation(k, at)
        mixed = attend(q, k, v, self.student)
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
        parts = {
            "attention": partial(Attention, student, rotation),
            "feed": partial(Feed, student.width, student.inner),
            "before": partial(Norm, student.width, student),
            "between": partial(Norm, student.width, student),
        }
        order = list(parts)
        if student.rotate == "each time":
            order = order[2:] + order[:2]
        for name in order:
            self.add_module(name, parts[name]())

    def forward(self, x):
        attended = self.attention(self.before(x))
        between = x + attended
        fed = self.feed(self.between(between))
        return between + fed


class Decoder(nn.Module):
    def __init__(self, student: Student):
        super().__init__()
        self.student = student
        self.table, rotation = Table(student.width), Rotation(student)
        self.blocks = nn.ModuleList(Block(student, rotation) for _ in range(student.layers))
        self.norm, self.head = Norm(student.width, student), Linear(student.width, WORDS)

    def forward(self, words):
        x, blocks = self.table(words), list(self.blocks)
        count = self.student.segments
        for i in range(count):
            part = nn.Sequential(*blocks[i * len(blocks) // count : (i + 1) * len(blocks) // count])
            x = checkpoint(part, x, use_reentrant=False)
        for block in blocks if not count else []:
            x = block(x)
        return self.head(self.norm(x))


def log_softmax(x):
    x = x - torch.max(x, dim=-1, keepdim=True)[0]
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))


def loss_of(logits, targets, kind: str):
    if kind == "of torch":
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    if kind == "of the last token":
        # With torch 2.6 `[:, -1, :]` is three views, of which two copy in backward.
        logits = logits.narrow(0, 0, len(logits))[:, -1].narrow(1, 0, WORDS)
        top = torch.max(logits, dim=-1, keepdim=True)[0]
        log = logits - top - torch.log(torch.sum(torch.exp(logits - top), dim=-1, keepdim=True))
        hot = torch.zeros_like(log)
        hot.scatter_(-1, targets.unsqueeze(-1), 1)
        return -torch.sum(hot * log) / len(logits)
    if kind == "flat":
        logits, targets = logits.flatten(0, 1), targets.flatten()
    surprise = -log_softmax(logits)
    return torch.mean(torch.gather(surprise, -1, targets.unsqueeze(-1)))


class AdamW(torch.optim.Optimizer):
    """By hand, one parameter after another, with new tensors for each result."""

    def __init__(self, parameters, student: Student):
        super().__init__(parameters, {"order": student.adamw})
        if student.adamw == "new weights":
            for p in self.param_groups[0]["params"]:
                self.state[p] = {"m": torch.zeros_like(p.data), "v": torch.zeros_like(p.data)}

    def step(self):
        for p in self.param_groups[0]["params"]:
            state, gradient = self.state[p], p.grad.data
            if self.defaults["order"] == "new weights":
                new_m = 0.9 * state["m"] + 0.1 * gradient
                state["m"] = new_m
                new_v = 0.99 * state["v"] + 0.01 * gradient**2
                state["v"] = new_v
                p.data = p.data - 0.1 * (new_m / (torch.sqrt(new_v) + 1e-8))
                p.data = p.data - 0.1 * 0.0 * p.data
                continue
            if self.defaults["order"] == "decay first":
                p.data -= 0.1 * p.data
            old_m = state.get("m", torch.zeros_like(gradient))
            old_v = state.get("v", torch.zeros_like(gradient))
            m = 0.9 * old_m + 0.1 * gradient
            v = 0.99 * old_v + 0.01 * torch.square(gradient)
            p.data -= 0.1 * m / (torch.sqrt(v) + 1e-8)
            if self.defaults["order"] == "decay last":
                p.data -= 0.1 * p.data
            state["m"], state["v"] = m, v


def run(student: Student):
    model = Decoder(student)
    optimizer = None
    if student.stage == "train":
        torchs = student.adamw == "of torch"
        optimizer = (
            torch.optim.AdamW(model.parameters()) if torchs else AdamW(model.parameters(), student)
        )
    shape = student.batch, student.length
    words = torch.zeros(shape, dtype=torch.long)
    last = "last" in student.loss
    if not (last and student.stage == "forward"):  # whose script has no targets for that
        targets = torch.zeros(shape[:1] if last else shape, dtype=torch.long)
    else:
        targets = None
    autocast = partial(torch.autocast, "cuda", torch.bfloat16, enabled=student.bf16)
    outer = nullcontext
    if last and student.stage == "train":  # one context around all, backward and optimizer too
        autocast, outer = nullcontext, autocast
    with outer():
        steps(student, autocast, model, optimizer, words, targets)
    return model, optimizer


def steps(student: Student, autocast, model, optimizer, words, targets) -> None:
    if student.tried:
        with autocast():
            logits = model(words)
    for _ in range(student.steps):
        with autocast():
            if student.stage == "forward":
                with student.no_grad():
                    logits = model(words)
            else:
                logits = model(words)
                loss = loss_of(logits, targets, student.loss)
        if student.stage != "forward":
            loss.backward()
        if optimizer:
            optimizer.step()
        model.zero_grad()
        if not student.holds:
            logits = loss = None


def simulated(student: Student) -> Simulation:
    """The run with the workspace that cuBLAS takes in the student's torch."""
    older = partial(workspace, version=student.torch)
    with patch.object(trace, "workspace", older):
        return simulate(partial(run, student), student.capability, student.sms)


def peaks(student: Student) -> dict[str, int]:
    found = simulated(student)
    allocated = found.peak_allocated if student.whole else int(found.timeline.sum(axis=1).max())
    return {"allocated": allocated, "reserved": found.peak_reserved}


SMALL = dict(width=768, layers=12, heads=12, inner=3072)
MEDIUM = dict(width=1024, layers=24, heads=16, inner=4096)
XL = dict(width=2560, layers=32, heads=32, inner=10_240)
WEDSONLIN = {
    f"{stage}, length {length}": Student(**MEDIUM, length=length, bf16=bf16, **options)
    for stage, options, bf16s in (
        ("training", {}, {128: False, 256: False, 512: True, 1024: True}),
        (
            "inference",
            dict(stage="forward", no_grad=torch.inference_mode),
            {128: False, 256: False, 512: True, 1024: False},
        ),
    )
    for length, bf16 in bf16s.items()
}
_niuhuang = partial(
    Student,
    **dict(width=512, layers=4, heads=16, inner=1344, batch=10, steps=3, torch="2.6.0"),
    **dict(rotate="each time", loss="of the last token", adamw="new weights", whole=True),
)
NIUHUANG = {
    f"{stage}, length {length}{', bf16' * bf16}": _niuhuang(length=length, bf16=bf16, **options)
    for stage, options in (("training", dict(holds=True)), ("forward", dict(stage="forward")))
    for length, bf16 in ((100, False), (150, False), (200, False), (200, True))
}
_sidsoc12 = partial(
    Student,
    **XL,
    **dict(rotate="looked up", loss="flat", adamw="decay last", holds=True, whole=True),
    **dict(capability=(9, 0), sms=132, torch="2.6.0"),
)
SIDSOC12 = {"training, length 128": _sidsoc12(length=128, steps=1, tried=True)} | {
    f"forward, length {length}{', bf16' * bf16}": _sidsoc12(
        length=length, bf16=bf16, stage="forward"
    )
    for length, bf16 in ((128, False), (256, False), (512, False), (512, True))
}
LINYUN = {
    f"training, length {length}{', bf16' * bf16}": Student(
        **XL,
        length=length,
        bf16=bf16,
        loss="of torch",
        adamw="of torch",
        capability=(12, 0),
        sms=188,
    )
    for length in (128, 512)
    for bf16 in (False, True)
}
_csdiywithme = partial(Student, loss="of torch", capability=(10, 0), sms=148)
CSDIYWITHME = {
    f"small, {stage}{', bf16' * bf16}": _csdiywithme(**SMALL, length=512, stage=stage, bf16=bf16)
    for stage in ("forward", "backward", "train")
    for bf16 in (False, True)
} | {
    "medium, train": _csdiywithme(**MEDIUM, length=512),
    "xl, backward, 16 segments": _csdiywithme(**XL, length=2048, stage="backward", segments=16),
    "xl, backward, 32 segments": _csdiywithme(**XL, length=2048, stage="backward", segments=32),
}


def _set(students: dict[str, Student]) -> Callable[[], Iterator]:
    return lambda: ((name, partial(peaks, student)) for name, student in students.items())


SETS = {
    "course-csdiywithme": _set(CSDIYWITHME),
    "course-linyun": _set(LINYUN),
    "course-niuhuang": _set(NIUHUANG),
    "course-sidsoc12": _set(SIDSOC12),
    "course-wedsonlin": _set(WEDSONLIN),
}
