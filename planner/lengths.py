"""How long a sample may be: the longest that fits, and what samples of given data mean."""

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
    near, far = max(least, min(SHORT, most // 2)), max(2 * least, min(LONG, most))
    low, high = (single.estimate(plan, 1, length=tokens).need for tokens in (near, far))
    slope = max(1.0, (high - low) / (far - near))  # bytes of a token
    length = int(min(most, near + (room - low) / slope))
    while length >= least:
        if BLOCK < length < most:
            length = max(least, length - length % BLOCK)
        facts = single.predict(plan, 1, length=length)
        need = single.question.need(facts.peak_reserved)
        if need <= room:
            return length
        guess = BACK * length
        if length > near:  # the line through what was just seen
            guess = near + (room - low) * (length - near) / max(1, need - low)
        length = int(min(length * STEP, guess))
    return 0


def about_data(predictions: Predictions, sizes: list[int], recipe: Recipe) -> str:
    """What samples of these lengths in tokens mean for a recipe, in words."""
    length, micro_batch = predictions.question.workload.length, recipe.micro_batch
    beyond = sum(size > length for size in sizes) / len(sizes)
    facts = predictions.predict(recipe.plan, micro_batch, length=max(sizes))
    need = gib(predictions.question.need(facts.peak_reserved))
    return (
        f"{beyond:.1%} of {len(sizes):,} samples have more than {length:,} tokens. "
        f"The longest, of {max(sizes):,}, needs {need} in a micro-batch of {micro_batch} "
        f"with {recipe.name}."
    )
