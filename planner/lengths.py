"""How long a sample may be: the longest that fits, and what samples of given data mean."""

from collections.abc import Callable

import numpy as np

from fake_cuda.units import TEXTS_AND_PICTURES
from helpers.hardware import gib
from helpers.samples import tokens_of_picture
from helpers.workload import Workload

from .answer import Recipe
from .predictions import Predictions
from .techniques import Plan

# The numbers below are choices of ours; no row of data chose them.
# Tokens of the two twins that tell how memory grows with a sample.
SHORT, LONG = 512, 2048
BLOCK = 64  # the longest sample is found in whole blocks, as kernels take them
CLOSE = 0.02  # twins are asked until no more than this is to be won,
TWINS = 8  # or so many lengths were asked
SOON = 4 * LONG  # where no sample is longer than this, the longest one is asked for first
# Where a length does not fit, the next one is at most this share of it: so the search ends.
STEP = 0.98
# Where no line helps, since the length is shorter than those it was drawn through.
BACK = 0.9


def positions(config) -> int | None:
    """The most tokens of a text, which for Whisper is what it writes; None where nothing bounds it.

    >>> from transformers import WhisperConfig
    >>> positions(WhisperConfig())
    448
    """
    names, config = ("max_target_positions", "max_position_embeddings"), config.get_text_config()
    return next(filter(None, (getattr(config, name, None) for name in names)), None)


def tokens_in_front(workload: Workload) -> int:
    """The tokens of the picture with which each sample begins; 0 where there is none."""
    if workload.task != TEXTS_AND_PICTURES:
        return 0
    return len(tokens_of_picture(workload.config, workload.image_size))


def longest_sample(predictions: Predictions, plan: Plan) -> int:
    """The longest sample in tokens that fits with a micro-batch of one; 0 if none does."""
    single = predictions.with_batch(1)
    workload, room = predictions.question.workload, predictions.question.card.memory
    most, least = positions(workload.config) or 2**20, 1 + tokens_in_front(workload)
    near = max(least, min(SHORT, most // 2))
    far = min(most, max(2 * least, LONG))

    def told(tokens: int) -> float:
        return single.estimate(plan, 1, length=tokens).need

    length = most
    if near < far and not (most <= SOON and told(most) <= room):
        asked = (near, far, most) if most <= SOON else (near, far)
        seen = {tokens: told(tokens) for tokens in asked}  # bytes that twins tell, by length
        length = by_twins(seen, told, room, least, most)
    while length >= least:
        facts = single.predict(plan, 1, length=length)
        need = single.question.need(facts.peak_reserved)
        if need <= room:
            return length
        guess = BACK * length
        if length > near:  # the line through what was just seen
            least_need = told(near)
            guess = near + (room - least_need) * (length - near) / max(1, need - least_need)
        length = _in_blocks(min(length * STEP, guess), least, most)
    return 0


def by_twins(
    seen: dict[int, float], told: Callable[[int], float], room: float, least: int, most: int
) -> int:
    """The longest sample that should fit by what twins tell, to `CLOSE`.

    Args:
        seen: bytes of two lengths in tokens, or of more.
        told: bytes of any other.
        room: bytes that there are.
        least: tokens of the shortest sample.
        most: of the longest.

    Returns:
        Tokens; fewer than `least` where none should fit.

    >>> by_twins({512: 512.0, 2048: 2048.0}, float, 10_000.0, 1, 2**20)  # evenly
    9984
    >>> by_twins({512: 512.0**2, 2048: 2048.0**2}, lambda n: float(n) ** 2, 1e8, 1, 2**20)
    9984
    """
    while True:
        fits = max((n for n, need in seen.items() if need <= room), default=0)
        over = min((n for n, need in seen.items() if need > room), default=most + 1)
        guess, close = _where(seen, room), max(BLOCK, CLOSE * fits) if fits else 0
        if len(seen) == TWINS or over - fits <= max(1, close) or fits <= guess <= fits + close:
            break
        # Where the allocator's jumps lead the curve astray, halves come to an end.
        if not fits < guess < over or len(seen) > TWINS // 2:
            guess = (fits + over) / 2 if over <= most else most
        length = _in_blocks(guess, least, most)
        if length in seen or length < least:
            break
        seen[length] = told(length)
    return _in_blocks(max(fits, min(guess, over - 1)), least, most)


def _where(seen: dict[int, float], room: float) -> float:
    """The length that takes as much as there is: on the parabola through those that take nearly as
    much, or on the line where there are two or it does not rise. Attention may take the square."""
    near = sorted(seen, key=lambda n: abs(seen[n] - room))[:3]
    for degree in (len(near) - 1, 1):
        *curve, start = np.polyfit(near, [seen[n] for n in near], degree)
        roots = np.roots([*curve, start - room])
        right = [float(root.real) for root in roots if abs(root.imag) < 1 and root.real > 0]
        if right:
            return min(right, key=lambda n: abs(n - near[0]))
    return 0.0


def _in_blocks(length: float, least: int, most: int) -> int:
    """A length in whole blocks, within what a sample can have; shorter than that as it is."""
    whole = int(min(length, most))
    if BLOCK < whole < most and whole >= least:
        return max(least, whole - whole % BLOCK)
    return whole


def about_data(predictions: Predictions, sizes: list[int], recipe: Recipe) -> str:
    """What samples of these lengths in tokens mean for a recipe, in words."""
    length, micro_batch = predictions.question.workload.length, recipe.micro_batch
    beyond = sum(size > length for size in sizes) / len(sizes)
    plan = Plan.named(recipe.name)  # of what is recorded only the name is known
    facts = predictions.predict(plan, micro_batch, length=max(sizes))
    need = gib(predictions.question.need(facts.peak_reserved))
    return (
        f"{beyond:.1%} of {len(sizes):,} samples have more than {length:,} tokens. "
        f"The longest, of {max(sizes):,}, needs {need} in a micro-batch of {micro_batch} "
        f"with {recipe.name}."
    )
