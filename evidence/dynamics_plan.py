"""What of lesson 20 is recorded: networks, habits, rates, and the copies of each.

`dynamics.py` runs it.
"""

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

from evidence.dynamics_networks import Bytes, Decoder, adamw, sgd

SEEDS, WEIGHTS, ORDERS = range(8), range(4), range(2)


class Kind(NamedTuple):
    """A network, its optimizer, and what is tried with it."""

    make: Callable
    optimizer: Callable
    reads: int  # bytes
    stride: int  # from one stretch of its text to the next
    batch: int
    rates: tuple[float, ...]
    low: tuple[float, ...] = ()  # rates below those: no way should be best at the lowest one
    fewer: tuple[str, ...] = ()  # ways that are not tried
    batches: dict[int, tuple[int, tuple[float, ...]]] = {}  # most steps, and rates, by its size
    goal: float = math.nan  # the held-out loss to which steps are counted
    counted: int = len(SEEDS)  # copies of which they are
    middle: int = 0  # the batch whose betas are Adam's own, where they go with the batch
    labelled: int = 0  # samples with labels, where there are few
    tuned: tuple[float, ...] = ()  # rates for those
    widths: dict[int, tuple[float, ...]] = {}  # of its layers, and rates


STEPS, FEW, SCALED, MUP = 240, 100, "betas with the batch", ", rates by width"
HABIT, FALLING, FREE = "constant rate", "linear to 0", "schedule-free"
KINDS = {
    "decoder, AdamW": Kind(
        make=Decoder,
        optimizer=adamw,
        reads=32,
        stride=8,
        batch=4,
        rates=(0.01, 0.02, 0.04),
        low=(0.005,),
        fewer=("growing batch",),
        batches={
            4: (480, (0.0025, 0.005, 0.01, 0.02, 0.04)),
            16: (240, (0.005, 0.01, 0.02, 0.04)),
            64: (120, (0.005, 0.01, 0.02, 0.04, 0.08)),
        },
        goal=2.6,
        counted=4,
        middle=16,
        widths=dict.fromkeys((32, 64, 128), (0.00125, 0.0025, 0.005, 0.01, 0.02, 0.04)),
    ),
    "MLP, SGD": Kind(
        make=Bytes,
        optimizer=sgd,
        reads=8,
        stride=3,
        batch=16,
        rates=(0.25, 0.5, 1.0, 2.0),
        low=(0.12,),
        batches={
            4: (800, (0.06, 0.12, 0.25)),
            16: (400, (0.12, 0.25, 0.5, 1.0)),
            64: (200, (0.25, 0.5, 1.0, 2.0)),
            256: (120, (0.25, 0.5, 1.0, 2.0)),
        },
        goal=3.2,
        labelled=128,
        tuned=(0.01, 0.025, 0.05, 0.1, 0.25),
    ),
}
WAYS = {
    HABIT: {},
    FALLING: {"schedule": "linear"},
    "WSD": {"schedule": "warmup_stable_decay", "warm_up": 0.1},
    "Trainer's default": {"schedule": "linear", "clip": 1.0},
    "warm-up": {"schedule": "constant_with_warmup", "warm_up": 0.1},
    "clipped": {"clip": 1.0},
    "growing batch": {},
    "one cycle": {"schedule": "cosine", "warm_up": 0.3},
}
BAD = ("start x 3", "start x 3, LayerNorm")
# Rates beyond the network's, for ways that were best at the last of those.
BEYOND = {FREE: (0.08,), "without LayerNorm": (0.0025,), "LayerNorm": (0.03, 0.06)}
ALONE = (*BAD, FALLING, "clipped", "growing batch")  # not tried in two orders
OF_THE_NET = {  # what the network does otherwise, or its optimizer
    "decoder, AdamW": {"without LayerNorm": {"norm": False}, FREE: {}},
    "MLP, SGD": {
        "LayerNorm": {"norm": True},
        "start x 3": {"gain": 3.0},
        "start x 3, LayerNorm": {"norm": True, "gain": 3.0},
    },
}
ADAPTED = ("from scratch", "old body", "old body, gradual", "old body, head alone", "features")


class Group(NamedTuple):
    """The copies of one way at one rate: what is run at once."""

    experiment: str
    network: str
    way: str
    batch: int
    rate: float


def groups() -> Iterator[Group]:
    for name, kind in KINDS.items():
        for way in [*WAYS, *OF_THE_NET[name]]:
            rates = kind.rates[:2] if way in BAD else kind.low + kind.rates + BEYOND.get(way, ())
            rates = () if way in kind.fewer else rates
            for experiment in ("habits", "crossed")[: 1 if way in ALONE else 2]:
                yield from (Group(experiment, name, way, kind.batch, rate) for rate in rates)
        for way in ADAPTED:
            size = kind.labelled // 4
            yield from (Group("few labels", name, way, size, rate) for rate in kind.tuned)
        for size, (_, rates) in kind.batches.items():
            for way in (HABIT, SCALED) if kind.middle and size != kind.middle else (HABIT,):
                yield from (Group("batches", name, way, size, rate) for rate in rates)
        for width, rates in kind.widths.items():
            for rule in ("", MUP)[: 1 if width == min(kind.widths) else 2]:
                way = f"{width} wide{rule}"
                yield from (Group("widths", name, way, kind.batch, rate) for rate in rates)


def copies(group: Group) -> list[tuple[int, int]]:
    """The seed of each copy's first weights, and its order of the data."""
    if group.experiment == "crossed":
        return list(product(WEIGHTS, ORDERS))
    few = group.experiment in ("batches", "widths")
    count = KINDS[group.network].counted if few else len(SEEDS)
    return [(seed, seed) for seed in SEEDS[:count]]
