"""Training runs of an assignment that many solve, written anew: a decoder, its loss and optimizer.

The assignment (Stanford's CS336, the second) asks for memory logs of a model in plain operations:
RMSNorm, SwiGLU, rotary positions, causal attention by matrices, a softmax, a loss and an AdamW by
hand. Four students published logs of CUDA's allocator and three more the peaks; what differs
between them is a field of `Student`. Sources: the column `source` of data/measurements/peaks.csv.
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
    rotate: str = "halves"  # positions: sliced | looked up by index | made on the CPU | none
    loss: str = "every token"  # | flat | of torch | of the last token | logsumexp
    adamw: str = "decay first"  # when it shrinks the weights | decay last | new weights | in place
    steps: int = 2  # (AdamW also "of torch")
    stage: str = "train"  # | one step after all passes | backward | forward | forward and loss
    no_grad: Callable = nullcontext  # around a forward pass
    holds: bool = False  # the results of a step live until the next ones replace them
    tried: bool = False  # one forward pass before the first step
    gradients: str = "freed after a step"  # | freed before backward
    segments: int = 0  # of layers that are checkpointed
    halved: bool = False  # layers are checkpointed by halves, and those by halves again
    named: bool = True  # what the table gave is, and lives as long as a forward pass (2026's code)
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
        if self.how not in ("each time", "none"):
            table = torch.empty(2, student.length, self.half)
            self.register_buffer("table", table, persistent=False)

    def forward(self, x, at=None):
        length = x.shape[-2]
        if self.how == "none":
            return x
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
    # `amax` keeps its input for backward, `max` the places only.
    top = x.amax(dim=-1, keepdim=True) if student.rotate == "none" else x.max(-1, keepdim=True)[0]
    below = x - top  # named: it lives until the function ends
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
        self.table, rotation = Table(student.width), Rotation(student)
        self.blocks = nn.ModuleList(Block(student, rotation) for _ in range(student.layers))
        self.norm, self.head = Norm(student.width, student), Linear(student.width, WORDS)

    def forward(self, words):
        x, blocks = self.table(words), list(self.blocks)
        _embedded = x if self.student.named else None
        count = self.student.segments
        for i in range(count):
            part = nn.Sequential(*blocks[i * len(blocks) // count : (i + 1) * len(blocks) // count])
            x = checkpoint(part, x, use_reentrant=False)
        if self.student.halved:
            x = by_halves(blocks, x)
        for block in blocks if not (count or self.student.halved) else []:
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
    if kind == "logsumexp":
        logits, targets = logits.flatten(0, 1), targets.flatten()
        logits = logits - logits.amax(dim=-1, keepdim=True)
        total = torch.logsumexp(logits, dim=-1)
        return (total - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)).mean()
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
            if self.defaults["order"] == "in place":
                gradient = p.grad
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p.data), torch.zeros_like(p.data)
                state["m"].mul_(0.9).add_(gradient, alpha=0.1)
                state["v"].mul_(0.99).addcmul_(gradient, gradient, value=0.01)
                root = state["v"].sqrt().add_(1e-8)
                p.data.add_(p.data, alpha=-0.1)
                p.data.addcdiv_(state["m"], root, value=-0.1)
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
    if student.stage in ("train", "one step after all passes"):
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
    forward = student.stage.startswith("forward")
    for step in range(student.steps):
        with autocast(), student.no_grad() if forward else nullcontext():
            logits = model(words)
            if student.stage != "forward":
                loss = loss_of(logits, targets, student.loss)
        if student.gradients == "freed before backward":
            model.zero_grad()
        if not forward:
            loss.backward()
        if student.stage == "one step after all passes":
            logits = loss = None
        if optimizer and (student.stage == "train" or step == student.steps - 1):
            optimizer.step()
        if student.gradients == "freed after a step":
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

# What three of them say of further runs in tables, with the same code.
_linyun = partial(Student, **XL, capability=(12, 0), sms=188)
LINYUN_2 = {
    f"forward, length {length}{', bf16' * bf16}": _linyun(
        length=length, bf16=bf16, stage="forward", no_grad=torch.no_grad
    )
    for bf16 in (False, True)
    for length in (128, 512, 1024, 2048)
} | {
    f"training, length 2048, {name}": _linyun(
        length=2048, loss="of torch", adamw="of torch", **options
    )
    for name, options in {
        **{f"{n} segments": dict(segments=n) for n in (32, 16, 8)},
        "halves in halves": dict(halved=True),
    }.items()
}
_luke396 = partial(
    Student,
    **XL,
    **dict(rotate="none", loss="logsumexp", adamw="in place", steps=3, whole=True),
    **dict(gradients="freed before backward", torch="2.8.0"),
)
LUKE396 = {
    f"{name}, length {length}{', bf16' * bf16}": _luke396(length=length, bf16=bf16, stage=stage)
    for bf16 in (False, True)
    for name, stage, lengths in (
        ("forward", "forward", (128, 256, 512)),
        ("training", "train", (128, 256)),
    )
    for length in lengths
}
_damek = partial(
    Student,
    **XL,
    **dict(rotate="looked up", adamw="decay last", torch="2.6.0", whole=True, named=False),
)
DAMEK = {
    f"{name}, length {length}{', bf16' * bf16}": _damek(length=length, bf16=bf16, **options)
    for bf16 in (False, True)
    for name, options in {
        "forward": dict(stage="forward and loss", no_grad=torch.no_grad),
        "training": dict(stage="one step after all passes"),
    }.items()
    for length in (128, 256, 512)
}


def attention_alone(width: int, length: int) -> dict[str, int]:
    """Passes through attention without heads or a mask, while what one gave before is still there
    (damek's attention_benchmarking_script.py)."""
    student = Student(width, 1, 1, width, length)

    def attended(q, k, v):
        scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(q.shape[-1])
        return torch.einsum("...qk,...kd->...qd", softmax(scores, student), v)

    def passes():
        inputs = [torch.empty(8, length, width, requires_grad=True) for _ in range(3)]
        attended(*inputs).sum().backward()
        for x in inputs:
            x.grad = None
        before = attended(*inputs)
        loss = before.sum()
        for _ in range(2):
            out = attended(*inputs)
            out.sum().backward()
            del out
            for x in inputs:
                x.grad = None
        return before, loss

    with patch.object(trace, "workspace", partial(workspace, version="2.6.0")):
        return {"allocated": simulate(passes).peak_allocated}


def damek() -> Iterator[tuple[str, Callable]]:
    yield from _set(DAMEK)()
    for width in (16, 128):
        for length in (256, 1024, 4096, 8192, 16384):
            job = partial(attention_alone, width, length)
            yield f"attention, width {width}, length {length}", job


def _set(students: dict[str, Student]) -> Callable[[], Iterator]:
    return lambda: ((name, partial(peaks, student)) for name, student in students.items())


SETS = {
    "course-csdiywithme": _set(CSDIYWITHME),
    "course-damek": damek,
    "course-linyun": _set(LINYUN),
    "course-linyun-2": _set(LINYUN_2),
    "course-luke396": _set(LUKE396),
    "course-niuhuang": _set(NIUHUANG),
    "course-sidsoc12": _set(SIDSOC12),
    "course-wedsonlin": _set(WEDSONLIN),
}
