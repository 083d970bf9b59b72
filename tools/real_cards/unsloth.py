"""The longest text of Llama 3.1 8B that a card holds, as Unsloth published it for the usual stack.

QLoRA of rank 32 on all linear layers, one text in a batch, "Hugging Face + FA2". The page states
no precision, preparation or versions: `context` names what is assumed. The six numbers lie on one
straight line. With one text in a batch the loss of 2024 copied no logits (`behaviours_2024`).
"""

from collections.abc import Callable, Iterator
from functools import cache, partial

from helpers.prediction import CONTEXT
from recorded.lesson_13 import context

GIB = 2**30
NEAR = 16  # tokens; a step of this model takes 40 MiB more for them
PUBLISHED = {12: 932, 16: 2551, 24: 5789, 40: 12264, 48: 15502, 80: 28454}  # GB: tokens


@cache
def need(length: int) -> int:
    """Reserved bytes of a step with a text of so many tokens."""
    return context(length).peak_reserved


def longest(room: int) -> int:
    """Tokens of the text whose step reserves `room` bytes, to within `NEAR`.

    By secants: what a step needs grows almost evenly with its text.
    """
    old, new = 512, 2048
    while abs(new - old) >= NEAR:
        slope = (need(new) - need(old)) / (new - old)
        old, new = new, int(new + (room - need(new)) / slope)
    return new


def compared(size: int) -> dict[str, int]:
    """For a card of `size` GB: tokens that fit beside half a GiB for the context, and the bytes
    that the published number of tokens takes with it."""
    return {
        "longest context (tokens)": longest(size * GIB - CONTEXT),
        "used at the published context": need(PUBLISHED[size]) + CONTEXT,
    }


def unsloth() -> Iterator[tuple[str, Callable]]:
    for size in PUBLISHED:
        yield f"{size} GB", partial(compared, size)


SETS = {"unsloth": unsloth}
