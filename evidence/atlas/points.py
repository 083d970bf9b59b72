"""One recipe of one model for a family of cards: bytes and seconds of all micro-batches.

Four twins are simulated: of two and of three blocks (`Depth`), and of three with twice the length
and with twice the samples. Their logs grow to the whole model's (`growth`) and to any micro-batch
(`laws`), and are replayed; their operations grow alike (`pace`). Where blocks are not that regular,
all of the model's stand in their place, and nothing but the micro-batch grows.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from evidence.atlas.growth import Growth, NotAlike, grown
from evidence.atlas.laws import Point, Seeds, sizes_at
from evidence.atlas.pace import CLIP, ONCE, PASSES, Pace
from evidence.atlas.twins import Depth, Seen, collated_like, seen
from fake_cuda import Card, NotSimulated, Simulation
from fake_cuda.replay import replay
from helpers.hardware import GIB, GPU, cards
from planner.question import Question, ask
from planner.techniques import Plan

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
SHORTEST = 512  # where each token is predicted
LONGEST = 512  # where texts are classified
CLASSIFIES = "text_classification"
MICRO_BATCHES = (1, 2, 4, 8, 16)
TOKENS = 65536  # of a micro-batch, at most
FULL = "no card has as much"
MOST = 190 * GIB  # no known card has as much
# With one sample some tensors are laid out in a line that are not with more: two tell of more.
SEEDS = Seeds.of(SHORTEST, 2)
ONE_SAMPLE = Seeds.of_one(2 * SHORTEST)
MiB = 2**20
BEGINNING = 8  # events of a backward pass until the gradient of a loss is added
CATEGORIES = ("parameters", "gradients", "optimizer states", "activations", "temporaries")


class Family(NamedTuple):
    """Cards on which the same kernels run, so that they need the same bytes."""

    card: str  # the one that stands for all
    majors: tuple[int, ...]  # of compute capability

    def cards(self) -> list[GPU]:
        """All of them, the smallest first."""
        known = sorted(cards().values(), key=lambda card: card.memory)
        return [card for card in known if card.capability[0] in self.majors]

    def most(self) -> int:
        """Bytes beyond which nobody asks: twice the largest card."""
        return min(MOST, 2 * self.cards()[-1].memory)


FAMILIES = {
    "ampere": Family("A100-80GB", (8, 12)),
    "hopper": Family("H100", (9, 10)),
    "turing": Family("T4", (7,)),
}


def lengths_of(model: str) -> tuple[int, ...]:
    """Tokens of a sample that are asked of a model: within its positions, and all on one side of a
    window of its attention, if it has one. From the window on transformers gives attention a mask
    (`_ignore_causal_mask_sdpa` in masking_utils.py), which no twin of a shorter sample has."""
    workload = ask(model, FAMILIES["ampere"].card, length=LENGTHS[0], batch=1).workload
    config, classifies = workload.config, workload.task == CLASSIFIES
    least, most = (LENGTHS[0], LONGEST) if classifies else (SHORTEST, LENGTHS[-1])
    positions = getattr(config, "max_position_embeddings", None) or most
    window = getattr(config, "sliding_window", None) or math.inf
    if window > least:
        most = min(most, window - 1)
    return tuple(n for n in LENGTHS if least <= n <= min(most, positions))


def all_points(model: str) -> list[Point]:
    """Every micro-batch that is asked of a model."""
    found = [Point(length, n) for length in lengths_of(model) for n in MICRO_BATCHES]
    return [point for point in found if point.tokens <= TOKENS]


def seeds_of(question: Question, point: Point) -> Seeds:
    """The micro-batches that tell of another one.

    Each is itself where texts are classified: sums over few tokens, for the gradient of a bias, say,
    take no memory of their own, and over more they do, which does not grow as a line
    (`fake_cuda.scratch`). Where attention is written out, one sample is not laid out as more are.
    """
    alone = Seeds(point, point, point)
    if question.workload.task == CLASSIFIES:
        return alone
    if point.micro_batch > 1 or question.skeleton.config._attn_implementation != "eager":
        return SEEDS
    return ONE_SAMPLE if point.length >= ONE_SAMPLE.near.length else alone


def timed_cards(family: Family) -> list[Card]:
    """Those whose rates are known; before Ampere a recipe is in fp16, for which bf16 stands."""
    known = [Card.of(gpu.name, gpu.capability, gpu.facts) for gpu in family.cards()]
    known = [card for card in known if card.sms and card.bandwidth and card.rates.get("fp16")]
    if min(family.majors) < 8:
        known = [replace(card, rates=card.rates | {"bf16": card.rates["fp16"]}) for card in known]
    return [card for card in known if card.rates.get("bf16")]


class Amount(NamedTuple):
    """Bytes of a step: at its peak, of the allocator, and by category at the peak."""

    allocated: int
    reserved: int
    by_category: list[int]


def single(found: Simulation) -> Amount:
    """A step of one micro-batch."""
    parts = [found.by_category[name] for name in CATEGORIES]
    return Amount(found.peak_allocated, found.peak_reserved, parts)


def several(found: Simulation, adapters: bool, tied: bool) -> Amount:
    """A step of more than one: the later ones find the gradients of the first.

    Where all weights learn, each new gradient stands beside the old one until it is added: at once,
    but that of a tied head waits for the embedding's, at the end of the backward pass, and what
    Liger's loss makes in the forward pass for the backward pass to begin.

    Args:
        found: a step of one micro-batch.
        adapters: whether only they learn; the planner adds their gradients and no more.
        tied: whether head and embedding are one parameter.
    """
    names = list(found.by_category)
    column = names.index("gradients")
    bytes_ = found.timeline.copy()
    before = bytes_.sum(axis=1).max()
    born = np.diff(bytes_[:, column], prepend=bytes_[0, column]).clip(min=0)
    bytes_[:, column] = found.peak_by_category["gradients"]
    if not adapters:
        starts = {name: row for row, name in reversed(found.phases)}
        head = int(born.argmax())
        until = starts["optimizer step"] if tied else starts["backward"] + BEGINNING
        born[head + 1 : until] += born[head]
        bytes_[:, names.index("temporaries")] += born
    total = bytes_.sum(axis=1)
    more = int(total.max() - before)
    at_peak = dict(zip(names, bytes_[total.argmax()].tolist(), strict=True))
    parts = [at_peak[name] for name in CATEGORIES]
    allocated = found.peak_allocated + more
    # The timeline is the last step's. Where the first one needs more, that is a passing thing.
    parts[CATEGORIES.index("temporaries")] += allocated - sum(parts)
    return Amount(allocated, found.peak_reserved + more, parts)


class Twins(NamedTuple):
    """What is simulated of a recipe.

    Args:
        shallow: a twin with few blocks, or as many as the others.
        near, far, wide: the deeper twin with each of the three micro-batches.
        more: how often the model has once more what the deeper twin has more than the shallow one.
    """

    shallow: Seen
    near: Seen
    far: Seen
    wide: Seen
    more: int

    @classmethod
    def of(cls, model: str, card: str, plan: Plan, seeds: Seeds, whole: bool = False) -> "Twins":
        """Of a recipe; all have all of the model's blocks if `whole`."""
        asked = {p: ask(model, card, length=p.length, batch=p.micro_batch) for p in seeds}
        depth = Depth.of(asked[seeds.near].workload.config)
        whole = whole or depth.more <= 1  # such twins take as long
        deep, more = (0, 0) if whole else (depth.deep, depth.more)
        found = {p: seen(question, plan, p.length, deep) for p, question in asked.items()}
        near, far, wide = (found[point] for point in seeds)
        shallow = near
        if not whole:
            shallow = seen(asked[seeds.near], plan, seeds.near.length, depth.shallow)
        return cls(shallow, near, far, collated_like(wide, near), more)


def sizes(
    twins: Twins, seeds: Seeds, points: Sequence[Point], plan: Plan, tied: bool, most: int
) -> dict:
    """Of each point that needs at most so many bytes, those of a step of one micro-batch and of
    several, None where there is one alone."""
    growth = Growth(twins.shallow.events, twins.near.events)
    whole = growth.plan(twins.more)
    three, found = [seen.events for seen in (twins.near, twins.far, twins.wide)], {}
    for point in points:
        of = sizes_at(seeds, three, point)
        simulated, _ = replay(grown(whole, twins.near.events.kinds, of), True)
        if simulated.peak_reserved > most:
            continue
        again = several(simulated, plan.kind.adapters, tied) if plan.kind.accumulates else None
        gradients = simulated.peak_by_category["gradients"]
        found[point] = single(simulated), again, gradients
    return found


def _digits(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def paces(pace: Pace, more: int, points: Sequence[Point], plan: Plan, gradients: int) -> dict:
    """Of each card and point: seconds of a step of one micro-batch, the shortest and the longest
    as shares of it, seconds of its end, of each micro-batch where there are several, the limit."""
    spent = pace.step(points, more)
    parts = spent.sum(axis=1)  # [part, point, card, factor]
    whole, kinds = parts.sum(axis=0), spent.sum(axis=0)[..., 0]
    each = parts[PASSES] + parts[CLIP]
    if not plan.kind.adapters:  # as the planner predicts two micro-batches for all
        added = [3 * gradients / kernel.rates["stream"] for kernel in pace.kernels]
        each = parts[PASSES] + (parts[CLIP] + np.array(added)[None, :, None]) / 2
    found = {}
    for k, card in enumerate(pace.cards):
        rows = []
        for at in range(len(points)):
            first, low, high, slow_host, slow_card = whole[at, k]
            limit = 0 if slow_host > slow_card else 1 + int(kinds[1:, at, k].argmax())
            row = [_digits(first), round(float(low / first), 2), round(float(high / first), 2)]
            row += [_digits(parts[ONCE, at, k, 0]), _digits(each[at, k, 0]), limit]
            rows.append(row)
        found[card.name] = rows
    return found


def point_rows(amounts: dict, points: Sequence[Point]) -> list[list[int]]:
    """Of each point tokens of a sample, samples, and in MiB what `Amount` has: of a step of one
    micro-batch, and where there can be several of such a step."""
    rows = []
    for point in points:
        one, more, _ = amounts[point]
        row = [point.length, point.micro_batch]
        for amount in filter(None, (one, more)):
            parts = amount.allocated, amount.reserved, *amount.by_category
            row += [-(-part // MiB) for part in parts]
        rows.append(row)
    return rows


def recipe(model: str, family: str, name: str) -> dict:
    """All that the atlas has of a recipe; {"why": a sentence} where it can have nothing."""
    try:
        return _recipe(model, family, name)
    except NotAlike:
        try:
            return _recipe(model, family, name, whole=True)
        except (NotAlike, NotSimulated) as error:
            return {"why": str(error)}
    except NotSimulated as error:
        return {"why": str(error)}


def _recipe(model: str, family: str, name: str, whole: bool = False) -> dict:
    cards_of_it, most = FAMILIES[family], FAMILIES[family].most()
    plan, every = Plan.named(name), all_points(model)
    question = ask(model, cards_of_it.card, length=every[0].length, batch=every[0].micro_batch)
    if question.need(plan.kind.least * question.workload.parameters()) > most:
        return {"why": FULL}
    seeds = {point: seeds_of(question, point) for point in every}
    tied = bool(question.workload.config.tie_word_embeddings)
    amounts, seconds = {}, {}
    for three in dict.fromkeys(seeds.values()):
        points = [point for point in every if seeds[point] == three]
        twins = Twins.of(model, cards_of_it.card, plan, three, whole)
        own = sizes(twins, three, points, plan, tied, most)
        points = list(own)
        if points:
            pace = Pace(*twins[:4], three, timed_cards(cards_of_it))
            timed = paces(pace, twins.more, points, plan, own[points[0]][2])
            for card, rows in timed.items():
                seconds.setdefault(card, {}).update(zip(points, rows, strict=True))
        amounts |= own
    points = [point for point in every if point in amounts]
    if not points:
        return {"why": FULL}
    ordered = {card: [rows[point] for point in points] for card, rows in seconds.items()}
    return {"points": point_rows(amounts, points), "seconds": ordered}
