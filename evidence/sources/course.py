"""Runs of an assignment that many solve: Stanford's CS336, the second, on several cards.

It asks for memory logs and for times of the model in `evidence/decoder.py`. Some students published
logs of CUDA's allocator, others the peaks, others times, and some both; what differs between them
is a field of `Student`. Sources: the column `source` of data/measurements/peaks.csv and speeds.csv.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch

from evidence.cards import card
from evidence.decoder import Decoder, Student, softmax
from evidence.decoder_training import AdamW, loss_of, simulated
from fake_cuda import Card, Simulation, simulate

# The card of a log by its compute capability and multiprocessors, without a name; an A100's
# where the card is unknown.
UNKNOWN = Card("a card", (8, 0), 108)
HOPPER = Card("a card", (9, 0), 132)
RTX_PRO_6000 = Card("a card", (12, 0), 188)
B200 = card("B200")
SMALL = dict(width=768, layers=12, heads=12, inner=3072)
MEDIUM = dict(width=1024, layers=24, heads=16, inner=4096)
XL = dict(width=2560, layers=32, heads=32, inner=10_240)
LARGE = dict(width=1280, layers=36, heads=20, inner=5120)
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
    **dict(width=512, layers=4, heads=16, inner=1344, batch=10, steps=3),
    **dict(code="niuhuang", loss="of the last token", adamw="new weights", whole=True),
)
NIUHUANG = {
    f"{stage}, length {length}{', bf16' * bf16}": _niuhuang(length=length, bf16=bf16, **options)
    for stage, options in (("training", dict(holds=True)), ("forward", dict(stage="forward")))
    for length, bf16 in ((100, False), (150, False), (200, False), (200, True))
}
_sidsoc12 = partial(
    Student, **XL, **dict(code="2025", loss="flat", adamw="decay last", holds=True, whole=True)
)
SIDSOC12 = {"training, length 128": _sidsoc12(length=128, steps=1, tried=True)} | {
    f"forward, length {length}{', bf16' * bf16}": _sidsoc12(
        length=length, bf16=bf16, stage="forward"
    )
    for length, bf16 in ((128, False), (256, False), (512, False), (512, True))
}
LINYUN = {
    f"training, length {length}{', bf16' * bf16}": Student(
        **XL, length=length, bf16=bf16, loss="of torch", adamw="of torch"
    )
    for length in (128, 512)
    for bf16 in (False, True)
}
_csdiywithme = partial(Student, loss="of torch")  # and the AdamW of the assignment (WORK_LOG.md)
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
_linyun = partial(Student, **XL)
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
    **dict(code="luke396", loss="logsumexp", adamw="in place", steps=3, whole=True),
    **dict(gradients="freed before backward"),
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
_damek = partial(Student, **XL, **dict(code="2025", adamw="decay last", whole=True, named=False))
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

    def attended(q, k, v):  # (batch, length, width) each
        scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(q.shape[-1])
        return torch.einsum("...qk,...kd->...qd", softmax(scores), v)

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

    return {"allocated": simulate(passes, card=UNKNOWN).peak_allocated}


def peaks(student: Student, card: Card = UNKNOWN) -> dict[str, int]:
    found = simulated(student, card)
    allocated = found.peak_allocated if student.whole else int(found.timeline.sum(axis=1).max())
    return {"allocated": allocated, "reserved": found.peak_reserved}


def measured(students: dict[str, Student], card: Card = UNKNOWN) -> Callable[[], Iterator]:
    return lambda: ((name, partial(peaks, student, card)) for name, student in students.items())


def damek() -> Iterator[tuple[str, Callable]]:
    yield from measured(DAMEK)()
    for width in (16, 128):
        for length in (256, 1024, 4096, 8192, 16384):
            job = partial(attention_alone, width, length)
            yield f"attention, width {width}, length {length}", job


PEAKS = {
    "course-csdiywithme": measured(CSDIYWITHME, B200),
    "course-damek": damek,
    "course-linyun": measured(LINYUN, RTX_PRO_6000),
    "course-linyun-2": measured(LINYUN_2, RTX_PRO_6000),
    "course-luke396": measured(LUKE396),
    "course-niuhuang": measured(NIUHUANG),
    "course-sidsoc12": measured(SIDSOC12, HOPPER),
    "course-wedsonlin": measured(WEDSONLIN),
}

# Sizes by the assignment's edition of 2025, which yyin-dev timed.
SIZES = {"small": SMALL, "medium": MEDIUM, "large": LARGE}
XL_2025 = dict(width=1600, layers=48, heads=25, inner=6400)
SIZES_2025 = SIZES | {"xl": XL_2025, "2.7B": XL}
SIZES_2026 = SIZES | {"xl": XL, "10B": dict(width=4608, layers=50, heads=36, inner=12_288)}
STAGES = {"forward": "forward", "forward and backward": "backward", "step": "train"}


def on_b200() -> Iterator[tuple[str, Callable]]:
    """csdiywithme's, whose forward passes compute no loss."""
    for size, shape in SIZES_2026.items():
        for kind in ("fp32", "bf16"):
            for text, stage in STAGES.items():
                how = dict(stage=stage, bf16=kind == "bf16", steps=2 if stage == "train" else 1)
                job = partial(simulated, _csdiywithme(**shape, length=512, **how), B200)
                yield f"{size} {kind}, {text}", job


def on_h20() -> Iterator[tuple[str, Callable]]:
    """ShibukiZero's."""
    for length in (128, 512, 1024):
        for size in ("small", "large", "2.7B"):
            for kind in ("fp32", "bf16"):
                how = dict(length=length, stage="backward", steps=1, bf16=kind == "bf16")
                student = Student(**SIZES_2025[size], **how)
                yield f"{size} {kind}, {length} tokens", partial(simulated, student, card("H20"))


def on_4090() -> Iterator[tuple[str, Callable]]:
    """LINYUN's, who waits for each stage to time it."""
    for size in ("small", "medium"):
        for length in (256, 512, 1024):
            for kind in ("fp32", "bf16"):
                how = dict(length=length, loss="of torch", adamw="of torch", waits=True)
                student = Student(**SIZES[size], **how, bf16=kind == "bf16")
                job = partial(simulated, student, card("RTX 4090"))
                yield f"{size} {kind}, {length} tokens", job


def mean_pass(student: Student, back: bool) -> Simulation:
    """yyin-dev's: the mean of the logits, with backward or without; nobody empties the
    gradients."""

    def run():
        model = Decoder(student)
        for _ in range(1 + back):  # without backward all passes would count as one
            value = model(torch.zeros(4, student.length, dtype=torch.long)).mean()
            if back:
                value.backward()
            value.item()
        return model

    return simulate(run, card=card("A100-40GB"))


def step_within_autocast(student: Student) -> Simulation:
    """yyin-dev's: one context around all."""

    def run():
        model = Decoder(student)
        words = torch.zeros(4, student.length, dtype=torch.long)
        optimizer = AdamW(model.parameters(), student.adamw)
        with torch.autocast("cuda", torch.bfloat16, enabled=student.bf16):
            for _ in range(2):
                model.zero_grad()
                loss = loss_of(model(words), words, student.loss)
                loss.backward()
                optimizer.step()
                loss.item()
        return model, optimizer

    return simulate(run, card=card("A100-40GB"))


_yyin = partial(Student, code="2025", adamw="decay last")


def on_a100() -> Iterator[tuple[str, Callable]]:
    for text in ("forward", "forward and backward"):
        for size, shape in SIZES_2025.items():
            for length in (128, 512):
                job = partial(mean_pass, _yyin(**shape, length=length), text != "forward")
                yield f"{size}, {length} tokens, {text}", job


def steps_on_a100() -> Iterator[tuple[str, Callable]]:
    for kind in ("fp32", "bf16"):
        for size, shape in SIZES_2025.items():
            for length in (128, 512):
                student = _yyin(**shape, length=length, bf16=kind == "bf16")
                yield f"{size} {kind}, {length} tokens", partial(step_within_autocast, student)


STEPS = {
    "decoder-b200": on_b200,
    "decoder-h20": on_h20,
    "decoder-4090": on_4090,
    "decoder-a100": on_a100,
    "decoder-a100-steps": steps_on_a100,
}
