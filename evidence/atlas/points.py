"""One recipe of one model for a family of cards: bytes and seconds of all micro-batches.

Four twins are simulated: of two and of three blocks (`Depth`), and of three with twice the length
and with twice the samples. Their logs grow to the whole model's (`growth`) and to any micro-batch
(`laws`), and are replayed; their operations grow alike (`pace`). Where the loss is in chunks, two
more tell what one more of them adds (`chunks`). Where blocks are not that regular, twins of three
and four are tried; and then all blocks, so that nothing but the micro-batch grows.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from evidence.atlas.amounts import point_rows, sizes
from evidence.atlas.chunks import FEWEST, Grouped, by_chunks
from evidence.atlas.laws import CHUNK, Point, Seeds
from evidence.atlas.pace import CLIP, ONCE, PASSES, Pace
from evidence.atlas.pieces import NotAlike
from evidence.atlas.twins import Asked, Twins
from fake_cuda import Card, NotSimulated
from fake_cuda.units import SAMPLES, TEXTS, TEXTS_AND_PICTURES, TOKENS
from helpers.hardware import GIB, GPU, cards
from planner.lengths import positions
from planner.question import Question, ask
from planner.techniques import CHUNKED_LOSS, Plan

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
SHORTEST = 512  # where each token is predicted
LONGEST = 512  # of other texts
LONGEST_AFTER_PICTURE = 8192
MICRO_BATCHES = (1, 2, 4, 8, 16)
MOST_TOKENS = 65536  # of a micro-batch
# How often what repeats stands in the shallow twin, as it is tried: what the first and the last
# block of a BERT do is told apart with one more. None: all blocks of the model.
TURNS = (2, 3, None)
FULL = "no card has as much"
MOST = 190 * GIB  # no known card has as much
# With one sample some tensors are laid out in a line that are not with more: two tell of more.
SEEDS = Seeds.of(SHORTEST, 2)
# Of texts that are classified, with the fewest tokens over which sums take memory of their own
# (`fake_cuda.scratch.Sum`); of fewer tokens it is told that they take none.
CLASSIFIED = Seeds.of(LENGTHS[0], 1024 // LENGTHS[0])
# Of four chunks, which is the fewest that tell of more.
CHUNKED_SEEDS = Seeds.of(SHORTEST, FEWEST * CHUNK // SHORTEST)


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
    workload = ask(model, FAMILIES["ampere"].card).workload
    if workload.task in SAMPLES:  # of sound the longest text
        return (workload.length,)
    config = workload.config.get_text_config()
    least, most = {
        TOKENS: (SHORTEST, LENGTHS[-1]),
        TEXTS_AND_PICTURES: (SHORTEST, LONGEST_AFTER_PICTURE),
    }.get(workload.task, (LENGTHS[0], LONGEST))
    known = positions(config) or most
    window = getattr(config, "sliding_window", None) or math.inf
    if window > least:
        most = min(most, window - 1)
    return tuple(n for n in LENGTHS if least <= n <= min(most, known))


def all_points(model: str) -> list[Point]:
    """Every micro-batch that is asked of a model."""
    found = [Point(length, n) for length in lengths_of(model) for n in MICRO_BATCHES]
    return [point for point in found if point.tokens <= MOST_TOKENS]


def seeds_of(question: Question, plan: Plan, point: Point) -> Seeds:
    """The micro-batches that tell of another one.

    Each is itself where pictures are classified or speech is written down, which have one length.
    One sample is not laid out as more are where texts are classified, and where attention is
    written out. Pictures in texts take their turns in attention, so that with more samples more
    happens. A loss in chunks is told by micro-batches that have enough of them.
    """
    alone, task = Seeds.only(point), question.workload.task
    if task in SAMPLES:
        return alone
    if task == TEXTS:
        if question.workload.config.max_position_embeddings < CLASSIFIED.far.length:
            return alone
        one = Seeds.of_samples(LENGTHS[0], 1)
        return one if point.micro_batch == 1 else CLASSIFIED
    chunked = CHUNKED_LOSS in plan.techniques
    if chunked and point.chunks < FEWEST:
        return alone
    written_out = question.skeleton.config._attn_implementation == "eager"
    if task == TOKENS and not (written_out and point.micro_batch == 1):
        return CHUNKED_SEEDS if chunked else SEEDS
    # As many tokens as the other seeds have: of one or two samples, so many of each.
    least = FEWEST * CHUNK if chunked else 2 * SHORTEST
    near = max(SHORTEST, least // point.micro_batch)
    return Seeds.of_samples(near, point.micro_batch) if point.length >= near else alone


def timed_cards(family: Family) -> list[Card]:
    """Those whose rates are known; before Ampere a recipe is in fp16, for which bf16 stands."""
    known = [Card.of(gpu.name, gpu.capability, gpu.facts) for gpu in family.cards()]
    known = [card for card in known if card.sms and card.bandwidth and card.rates.get("fp16")]
    if min(family.majors) < 8:
        known = [replace(card, rates=card.rates | {"bf16": card.rates["fp16"]}) for card in known]
    return [card for card in known if card.rates.get("bf16")]


def _digits(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def each_of_several(pace: Pace, parts: np.ndarray, plan: Plan, gradients: int) -> np.ndarray:
    """Seconds of each micro-batch where there are several, from the parts of a step of one."""
    if plan.kind.adapters:
        return parts[PASSES] + parts[CLIP]
    # as the planner predicts two micro-batches for all
    added = [3 * gradients / kernel.rates["stream"] for kernel in pace.kernels]
    return parts[PASSES] + (parts[CLIP] + np.array(added)[None, :, None]) / 2


def paces(
    pace: Pace, spent: np.ndarray, once: np.ndarray, each: np.ndarray, points: Sequence[Point]
) -> dict:
    """Of each card and point: seconds of a step of one micro-batch, the shortest and the longest
    as shares of it; where there are several, seconds of its end and of each; the limit."""
    parts = spent.sum(axis=1)  # [part, point, card, factor]
    whole, kinds = parts.sum(axis=0), spent.sum(axis=0)[..., 0]
    found = {}
    for k, card in enumerate(pace.cards):
        rows = {}
        for at, point in enumerate(points):
            first, low, high, slow_host, slow_card = whole[at, k]
            limit = 0 if slow_host > slow_card else 1 + int(kinds[1:, at, k].argmax())
            row = [_digits(first), round(float(low / first), 2), round(float(high / first), 2)]
            row += [_digits(once[at, k, 0]), _digits(each[at, k, 0]), limit]
            rows[point] = row
        found[card.name] = rows
    return found


def recipe(model: str, family: str, name: str) -> dict:
    """All that the atlas has of a recipe; {"why": a sentence} where it can have nothing."""
    why = ""
    for turns in TURNS:
        try:
            return _recipe(model, family, name, turns)
        except NotAlike as error:
            why = str(error)
        except NotSimulated as error:
            return {"why": str(error)}
    return {"why": why}


def _recipe(model: str, family: str, name: str, turns: int | None = TURNS[0]) -> dict:
    cards_of_it, most = FAMILIES[family], FAMILIES[family].most()
    plan, every = Plan.named(name), all_points(model)
    question = ask(model, cards_of_it.card, length=every[0].length, batch=every[0].micro_batch)
    if question.need(plan.kind.least * question.workload.parameters()) > most:
        return {"why": FULL}
    asked = Asked(model, cards_of_it.card, plan, turns, two=question.workload.task == TEXTS)
    seeds = {point: seeds_of(question, plan, point) for point in every}
    amounts, seconds = {}, {}
    for three in dict.fromkeys(seeds.values()):
        points = [point for point in every if seeds[point] == three]
        for some, twins in _twins(asked, three, points):
            own, timed = _told_by(asked, twins, three, some, most, timed_cards(cards_of_it))
            amounts |= own
            seconds |= {card: seconds.get(card, {}) | rows for card, rows in timed.items()}
    points = [point for point in every if point in amounts]
    if not points:
        return {"why": FULL}
    ordered = {card: [rows[point] for point in points] for card, rows in seconds.items()}
    return {"points": point_rows(amounts, points), "seconds": ordered}


def _twins(asked: Asked, seeds: Seeds, points: Sequence[Point]) -> Iterable[Grouped]:
    """Twins of the seeds, with the points that they tell of."""
    if CHUNKED_LOSS in asked.plan.techniques and seeds.wide == seeds.near and not seeds.alone:
        raise NotAlike("more tokens are more chunks")  # of one number of samples: not held yet
    twins = Twins.of(asked, seeds)
    return by_chunks(twins, seeds, points) if twins.more_chunks else [Grouped(points, twins)]


def _told_by(
    asked: Asked,
    twins: Twins,
    seeds: Seeds,
    points: Sequence[Point],
    most: int,
    cards: Sequence[Card],
) -> tuple[dict, dict]:
    """Of each point that needs at most so many bytes its `Amounts`; and `paces` of each card."""
    kind = asked.plan.kind
    amounts = sizes(twins, seeds, points, asked.plan, most)
    points = list(amounts)
    if not points:
        return {}, {}
    pace = Pace(twins, seeds, cards)
    spent = pace.step(points)
    gradients = amounts[points[0]].gradients
    parts = spent.sum(axis=1)
    each = each_of_several(pace, parts, asked.plan, gradients)
    if kind.accumulates and not kind.adapters and (seeds.alone or asked.two):
        two = Twins.of(asked, seeds, 2)
        again = sizes(two, seeds, points, asked.plan, math.inf)
        amounts = {point: amounts[point]._replace(more=again[point].one) for point in points}
        parts = Pace(two, seeds, cards).step(points).sum(axis=1)
        each = (parts[PASSES] + parts[CLIP]) / 2
    return amounts, paces(pace, spent, parts[ONCE], each, points)
