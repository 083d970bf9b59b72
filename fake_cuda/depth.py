"""The log of a deep run, written from those of shallow ones whose layers are alike.

A model of many equal layers does the same for each of them: its log is that of few layers in which
some passages are repeated. Which ones, logs of three and of four layers tell: the second has each
passage once more, right after the first time, and must have it twice to the last size, kind and
operation. Whatever is not that regular is `Irregular`: then, but for a script, logs of four and of
five layers are tried, and of five and of six; if none of them tells, the deep run has to be done.

Not seen is a tensor that dies in the place of another one of its kind and size: then all bytes are
the same at every moment, and the allocator alone, which knows addresses, may reserve otherwise.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .operations import Operation
from .passages import Irregular, Log, Passage, Rule, Seen, Token, cut, put_back, read
from .replay import Events

SHALLOW = (3, 4)  # layers: the first one and the last one may be unlike those between them
# Layers of further runs, while those before do not tell. In a mixture a tensor of each layer dies
# after a step, and something else happens after the third one; and of four layers a size may be by
# chance that of something else: the norms of eight gradients in each take 128 bytes.
MORE = (5, 6)


class Piece(NamedTuple):
    """A passage: where it begins in both logs, its length, and whether it is repeated."""

    starts: tuple[int, int]
    length: int
    repeated: bool


def deeper(
    shallow: Sequence[Seen], layers: int, rules: Sequence[Rule] = (), first: int = SHALLOW[0]
) -> Seen:
    """What a run of so many layers sees, from two runs of few layers.

    Args:
        shallow: what those runs have seen, of which the second has one layer more.
        layers: how many the run has.
        rules: of the two runs and of the deep one, for what is not repeated with the layers.
        first: layers of the first of the two.

    Raises:
        Irregular: they do not tell.
    """
    few, many = shallow
    if few.phases != many.phases or few.notes != many.notes:
        raise Irregular("other phases")
    logs = [read(seen) for seen in shallow]
    if rules:
        logs = [cut(log, rule) for log, rule in zip(logs, rules[:-1], strict=True)]
    phases = [list(_pieces(logs, borders)) for borders in _segments(logs)]
    pieces = [piece for phase in phases for piece in _begun_earlier(logs, phase)]
    tokens = list(_Deep(logs, pieces, 1 + layers - first).tokens())
    return _written(put_back(tokens, rules[-1]) if rules else tokens, many)


# --------------------------------------------------------------------------------- what is repeated
def _segments(logs: list[Log]) -> Iterator[list[tuple[int, int]]]:
    """Where a phase begins and ends in each log."""
    borders = []
    for log in logs:
        starts = [at for at, token in enumerate(log.tokens) if len(token.what) == 1]
        borders.append(list(zip([0, *starts], [*starts, len(log.tokens)], strict=True)))
    yield from zip(*borders, strict=True)


def _pieces(logs: list[Log], borders: list[tuple[int, int]]) -> Iterator[Piece]:
    """A phase in pieces. What occurs as often in both logs is not repeated."""
    parts = [log.tokens[begin:end] for log, (begin, end) in zip(logs, borders, strict=True)]
    both = set(parts[0]) & set(parts[1])
    few, many = parts = [[t if t in both else Token(t.what) for t in part] for part in parts]
    counts = Counter(few), Counter(many)
    fixed = {token for token, n in counts[0].items() if n == counts[1][token]}
    places = [[k for k, token in enumerate(part) if token in fixed] for part in parts]
    if [few[k] for k in places[0]] != [many[k] for k in places[1]]:
        raise Irregular("another order")
    (one, _), (other, _) = borders
    a = b = 0
    for k, m in (*zip(*places, strict=True), (len(few), len(many))):
        yield from _gap(few[a:k], many[b:m], (one + a, other + b))
        if k < len(few):
            yield Piece((one + k, other + m), 1, repeated=False)
        a, b = k + 1, m + 1


def _gap(few: list[Token], many: list[Token], starts: tuple[int, int]) -> Iterator[Piece]:
    """What lies between: at some places a passage that was there comes once more."""
    more, same = len(many) - len(few), _alike(few, many)
    one, other = starts
    if not more:
        if same < len(few):
            raise Irregular("another passage")
        yield Piece(starts, same, repeated=False)
        return
    # The longest passage after which all goes on as before; others may follow.
    longer = next((n for n in range(more, 0, -1) if _goes_on(few, many, same, n)), 0)
    if not longer:
        raise Irregular("another passage")
    yield Piece(starts, same - longer, repeated=False)
    yield Piece((one + same - longer, other + same - longer), longer, repeated=True)
    yield from _gap(few[same:], many[same + longer :], (one + same, other + same + longer))


def _alike(one: list[Token], other: list[Token]) -> int:
    """How many tokens are the same at the begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((k for k, (a, b) in pairs if a != b), min(len(one), len(other)))


def _goes_on(few: list[Token], many: list[Token], at: int, longer: int) -> bool:
    """Whether a passage of this length comes twice where it ends at a place, and fits there."""
    if longer > at or many[at - longer : at] != many[at : at + longer]:
        return False
    if few[at : at + 1] != many[at + longer : at + longer + 1]:
        return False
    try:
        return bool(list(_gap(few[at:], many[at + longer :], (0, 0))))
    except Irregular:
        return False


def _begun_earlier(logs: list[Log], pieces: list[Piece]) -> list[Piece]:
    """The pieces of a phase, each repeated one begun where what dies is as young in all copies.

    A passage that comes twice in a row can begin earlier, if what precedes it is as its own end. At
    its end may die what dies in the last copy for another reason: a variable that the next layer
    sets anew, and that after the last one is gone with all others.
    """
    found: list[Piece] = []
    for piece in pieces:
        ends: list[Piece] = []
        while found and not found[-1].repeated and _is_better_earlier(logs, piece):
            (one, other), length = piece.starts, piece.length
            before = found.pop()
            found += [before._replace(length=before.length - 1)] if before.length > 1 else []
            piece = piece._replace(starts=(one - 1, other - 1))
            end = one + length - 1, other + 2 * length - 1
            ends.insert(0, Piece(end, 1, repeated=False))
        found += [piece, *ends] if piece.length else []
    return found


def _is_better_earlier(logs: list[Log], piece: Piece) -> bool:
    """Whether as much is repeated one token earlier, and what dies is as young only then."""
    (one, other), length = piece.starts, piece.length
    if not piece.repeated:
        return False
    few, many = logs
    before, end, last = (other + k for k in (-1, length - 1, 2 * length - 1))
    tokens = few.tokens[one - 1], many.tokens[before], many.tokens[end]
    now = few.younger.get(one + length - 1), many.younger.get(end), many.younger.get(last)
    then = few.younger.get(one - 1), many.younger.get(before), many.younger.get(end)
    return len(set(tokens)) == 1 and len(set(now)) > 1 and now[0] == now[2] and len(set(then)) == 1


# --------------------------------------------------------------------------------- what is written
class _Deep:
    """The log in which each passage is repeated `copies` times."""

    def __init__(self, logs: list[Log], pieces: list[Piece], copies: int):
        self.logs, self.pieces, self.copies = logs, pieces, copies

    def tokens(self) -> Iterator[tuple[Token, int | None]]:
        """Each with how many are younger, for what dies."""
        for (one, other), length, repeated in self.pieces:
            for copy in range(self.copies if repeated else 1):
                for k in range(length):
                    if repeated:
                        yield self.repeated(one + k, other + k, other + k + length, copy)
                    else:
                        yield self.single(one + k, other + k)

    def single(self, one: int, other: int) -> tuple[Token, int | None]:
        """One that both logs have once. What grows with the depth grows evenly."""
        few, many = self.logs
        token, longer = few.tokens[one], many.tokens[other]
        if token != longer:
            sizes = zip(token.sizes, longer.sizes, strict=True)
            token = Token(token.what, tuple(self.line(*values) for values in sizes))
        younger = few.younger.get(one)
        return token, None if younger is None else self.line(younger, many.younger[other])

    def line(self, few, many):
        """The value with so many copies, through those with one and two."""
        return few + (self.copies - 1) * (many - few)

    def repeated(self, one: int, other: int, again: int, copy: int) -> tuple[Token, int | None]:
        """One of a copy."""
        few, many = self.logs
        token, younger = few.tokens[one], few.younger.get(one)
        if many.tokens[other] != token or many.tokens[again] != token:
            raise Irregular("another passage")
        if younger is None:
            return token, None
        by_copy = many.younger[again] - many.younger[other]
        return token, self.line(younger, many.younger[other]) + copy * by_copy


def _written(deep: Passage, like: Seen) -> Seen:
    """The log as a trace would have it: each tensor dies once, as what it was born."""
    events, sizes, kinds, operations = [], [], [], []
    alive: dict[tuple[str, int], list[int]] = defaultdict(list)
    phase = 0
    for token, younger in deep:
        what, values = token
        if len(what) == 1:
            phase += what[0] == like.phases[min(phase + 1, len(like.phases) - 1)]
            events.append(what[0])
        elif len(what) > 2:
            issued, kind, work, again, name = what
            place = phase, len(events)
            moved, listed, flops = values
            operations.append(
                Operation(*place, issued, kind, work, moved, listed, flops, again, name)
            )
        elif what[0]:
            alive[what[1], values[0]].append(len(sizes))
            events.append(len(sizes))
            sizes.append(values[0])
            kinds.append(what[1])
        else:
            same = alive[what[1], values[0]]
            if not 0 <= younger < len(same):
                raise Irregular("nobody knows which tensor dies")
            events.append(~same.pop(len(same) - 1 - younger))
    if phase != len(like.phases) - 1:
        raise Irregular("other phases")
    made_on = [stream for _, stream in kinds]
    found = Events(events, [kind for kind, _ in kinds], sizes, 0, made_on)
    return Seen(found, like.phases, operations, like.notes)
