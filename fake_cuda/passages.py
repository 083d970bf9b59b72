"""What a trace has seen as one list, in which passages can be compared, cut out and put back."""

import bisect
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .operations import Operation
from .replay import Events
from .streams import DEFAULT, Reusable


class Irregular(Exception):
    """Logs of few layers do not tell that of many."""


class Seen(NamedTuple):
    """What a trace has seen: its events and phases, its operations, and what is said of them."""

    events: Events
    phases: list[str]
    operations: list[Operation]
    notes: dict[str, int]


class Token(NamedTuple):
    """An event or an operation, without its place: `sizes` may grow with the depth."""

    what: tuple
    sizes: tuple = ()


class Log(NamedTuple):
    """Events and operations in one order.

    `younger` tells which tensor dies at a place: how many of those that live, and are of its kind
    and size, are younger. Layers free theirs in an order of their own, so that this hardly changes
    with the depth, where their places do.
    """

    tokens: list[Token]
    younger: dict[int, int]


MARK = "a passage that is told by a rule"  # in its place
# Of each token, and with how many are younger for what dies.
Passage = Sequence[tuple[Token, int | None]]
Rule = Callable[[Sequence[Token]], list[Passage]]  # passages that follow from the rest of a log


def read(seen: Seen) -> Log:
    """The log of what a trace has seen."""
    events, sizes, kinds, made_on, late = (
        seen.events.events, seen.events.sizes, seen.events.kinds, seen.events.made_on,
        seen.events.late,
    )  # fmt: skip
    if late or seen.events.since:
        raise Irregular("blocks that wait for streams, or memory that ran out")
    streams = made_on or [DEFAULT] * len(kinds)
    kinds = list(zip(kinds, streams, strict=True))  # a block is another one on another stream
    tokens, younger, operations = [], {}, iter(seen.operations)
    alive: dict[tuple[str, int], list[int]] = defaultdict(list)
    operation = next(operations, None)
    for at, event in enumerate([*events, None]):
        while operation and operation.event <= at:
            _, _, issued, kind, work, moved, listed, flops, again, name = operation
            tokens.append(Token((issued, kind, work, again, name), (moved, listed, flops)))
            operation = next(operations, None)
        if isinstance(event, Reusable):
            raise Irregular("streams")
        if isinstance(event, str):
            tokens.append(Token((event,)))
        elif event is not None:
            i = event if event >= 0 else ~event
            same = alive[kinds[i], sizes[i]]
            if event < 0:
                place = bisect.bisect_left(same, i)
                younger[len(tokens)] = len(same) - 1 - place
                same.pop(place)
            else:
                same.append(i)
            tokens.append(Token((event >= 0, kinds[i]), (sizes[i],)))
    return Log(tokens, younger)


# ------------------------------------------------------------- what does not repeat with the layers
def cut(log: Log, rule: Rule) -> Log:
    """The log with a mark in place of each passage that the rule tells.

    Raises:
        Irregular: one of them is not there, to the last token.
    """
    tokens: list[Token] = []
    younger: dict[int, int] = {}
    at = 0
    for number, passage in enumerate(rule(log.tokens)):
        place = _place(log, passage, at)
        _append(tokens, younger, log, range(at, place))
        tokens.append(_mark(number))
        at = place + len(passage)
    _append(tokens, younger, log, range(at, len(log.tokens)))
    return Log(tokens, younger)


def put_back(log: Passage, rule: Rule) -> Passage:
    """A whole log, with what the rule tells in place of its marks.

    Raises:
        Irregular: it has other marks.
    """
    found: list[tuple[Token, int | None]] = []
    tokens = [token for token, _ in log]
    told = {_mark(n): one for n, one in enumerate(rule(tokens))}
    if [*told] != [token for token in tokens if token.what[0] == MARK]:
        raise Irregular("other passages")
    for token, younger in log:
        found += told[token] if token in told else [(token, younger)]
    return found


def _mark(number: int) -> Token:
    return Token((MARK, str(number)))


def _place(log: Log, passage: Passage, begin: int) -> int:
    """Where a passage stands, from a place on."""
    tokens = [token for token, _ in passage]
    for at in range(begin, len(log.tokens) - len(tokens) + 1):
        if log.tokens[at : at + len(tokens)] == tokens:
            if [log.younger.get(at + k) for k in range(len(tokens))] == [y for _, y in passage]:
                return at
    raise Irregular(MARK)


def _append(tokens: list[Token], younger: dict[int, int], log: Log, places: range) -> None:
    for at in places:
        if at in log.younger:
            younger[len(tokens)] = log.younger[at]
        tokens.append(log.tokens[at])
