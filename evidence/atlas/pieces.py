"""Where a sequence of events has a piece more than another one: a block, or a chunk of a loss."""

from collections.abc import Sequence
from typing import NamedTuple


class NotAlike(ValueError):
    """Two sequences that do not differ by pieces that repeat, or by their sizes, alone."""


class Cut(NamedTuple):
    """Where a sequence has a piece more: from event `at` on, `size` events."""

    at: int
    size: int


def cuts(fewer: Sequence, more: Sequence, amid: bool = False) -> list[Cut]:
    """Where a sequence has pieces that repeat what precedes them, and another sequence has not.

    Args:
        fewer, more: the sequences.
        amid: whether a piece is put amid those that it repeats, and not behind them.

    >>> cuts("pababsxyxyt", "pabababsxyxyxyt")
    [Cut(at=5, size=2), Cut(at=12, size=2)]
    >>> cuts("pababs", "pabababs", amid=True)
    [Cut(at=3, size=2)]

    Raises:
        NotAlike: they differ otherwise.
    """
    try:
        found = _cuts_from(fewer, more, 0, 0, set())
    except RecursionError:
        found = None
    if found is None:
        raise NotAlike("they differ by more than pieces that repeat")
    return [_amid(more, cut) for cut in found] if amid else found


def _cuts_from(fewer: Sequence, more: Sequence, here: int, there: int, dead: set) -> list | None:
    """The same from some places on; None where there is no way. `dead` are places without one."""
    if (here, there) in dead:
        return None
    same = _same(fewer, more, here, there)
    begun = here + same, there + same
    left = (len(more) - begun[1]) - (len(fewer) - begun[0])
    if begun[0] == len(fewer) and not left:
        return []
    repeats = (
        (_same(fewer, more, begun[0], begun[1] + size), size == left, -size)
        for size in range(1, min(left, begun[1]) + 1)
        if _repeats(more, begun[1], size)
    )
    for *_, size in sorted(repeats, reverse=True):
        rest = _cuts_from(fewer, more, begun[0], begun[1] - size, dead)
        if rest is not None:
            return [Cut(begun[1], -size), *rest]
    dead.add((here, there))
    return None


def _repeats(sequence: Sequence, at: int, size: int) -> bool:
    """Whether so many events repeat those that precede them."""
    if sequence[at : at + 1] != sequence[at - size : at - size + 1]:  # most differ at once
        return False
    return sequence[at - size : at] == sequence[at : at + size]


def _same(fewer: Sequence, more: Sequence, here: int, there: int) -> int:
    """How many of both are alike from there on."""
    pairs = zip(fewer[here:], more[there:], strict=False)
    length = min(len(fewer) - here, len(more) - there)
    return next((k for k, (one, other) in enumerate(pairs) if one != other), length)


def _amid(sequence: Sequence, cut: Cut) -> Cut:
    """The same cut half of the repetitions earlier."""
    times = 0
    while cut.at >= (times + 1) * cut.size and _repeats(
        sequence, cut.at - times * cut.size, cut.size
    ):
        times += 1
    return cut._replace(at=cut.at - times // 2 * cut.size)
