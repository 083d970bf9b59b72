"""A model's whole log of births and deaths from those of two shallow twins.

The log of a twin with one block more has, in each phase, one piece more: what the block does
there. That piece is found, and put in as often as the model has blocks more; who dies in a copy is
told by where it was born, which moves on from copy to copy by the same stride. Sizes are found by
`laws`. The grown log is replayed through the allocator's model like any other.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from evidence.atlas.pieces import Cut, NotAlike, cuts
from fake_cuda.replay import Events
from fake_cuda.trace import EMPTY_CACHE, HOST

FEW = 4  # events by which a first block may differ from those that follow
# Bytes in which sizes are compared: the allocator's block, in which all norms of a clipped gradient
# are one; and more, where the norms of all parameters in a row fill a block in one twin alone.
UNITS = 512, 4096


class Place(NamedTuple):
    """Where something was born: the number of its phase, and how many events precede it there."""

    phase: int
    at: int


def tidy(seen: Events) -> list[list[int | str]]:
    """The events of each phase that count in a log; a phase's name comes first.

    What lies in the host's memory and what dies while the model is built does not count.
    """
    found: list[list[int | str]] = [[]]
    for event in seen.events:
        if isinstance(event, str) and event != EMPTY_CACHE:
            found.append([event])
            continue
        i = 0 if isinstance(event, str) else max(event, ~event)
        if isinstance(event, str) or (seen.sizes[i] and seen.kinds[i] != HOST):
            found[-1].append(event)
    built = found[0]
    dead = {~event for event in built if not isinstance(event, str) and event < 0}
    found[0] = [event for event in built if event not in dead and ~event not in dead]
    return found


def _births(phases: list[list]) -> dict[int, Place]:
    return {
        event: Place(number, at)
        for number, events in enumerate(phases)
        for at, event in enumerate(events)
        if not isinstance(event, str) and event >= 0
    }


def _tokens(seen: Events, events: list, unit: int | None) -> list[tuple]:
    """What can be compared of events: of what size, or of what kind, is born, and what dies."""
    told = []
    for event in events:
        if isinstance(event, str):
            told.append((event,))
        else:
            i = max(event, ~event)
            told.append((event >= 0, -(-seen.sizes[i] // unit) if unit else seen.kinds[i]))
    return told


class Growth:
    """How the log of a twin grows with its depth, or with what else repeats a piece of it.

    Args:
        shallow: what was seen of a twin with some blocks.
        deep: of the same with one block more.
        sized: whether sizes are compared. Where they are not, the last piece may be smaller than
            the others, so that a piece is put in amid its like.

    Raises:
        NotAlike: they differ otherwise.
    """

    def __init__(self, shallow: Events, deep: Events, sized: bool = True):
        self.deep = deep
        self.one, self.other = tidy(shallow), tidy(deep)
        if len(self.one) != len(self.other):
            raise NotAlike("the logs have not the same phases")
        if not sized:
            self.tokens, self.cuts = self._compared(shallow, None)
        else:
            try:
                self.tokens, self.cuts = self._compared(shallow, UNITS[0])
            except NotAlike:
                self.tokens, self.cuts = self._compared(shallow, UNITS[1])
        self.born_in_one, self.born_in_other = _births(self.one), _births(self.other)
        self.cuts = [self._slid(number) for number in range(len(self.cuts))]

    def _compared(
        self, shallow: Events, unit: int | None
    ) -> tuple[list[list[tuple]], list[list[Cut]]]:
        """Of each phase what is compared of the deeper twin's events, and where it has more."""
        told = [_tokens(self.deep, events, unit) for events in self.other]
        fewer = (_tokens(shallow, events, unit) for events in self.one)
        pairs = zip(fewer, told, strict=True)
        return told, [cuts(one, other, amid=unit is None) for one, other in pairs]

    def _slid(self, number: int) -> list[Cut]:
        """The cuts of a phase, where what dies was born one block apart, or at the same place.

        A piece that repeats what precedes it can be cut out anywhere along the repetition.
        """
        events, mates = self.other[number], self.one[number]
        found, shift, end = [], 0, 0
        for where in self.cuts[number]:
            window = range(max(self._earliest(number, where), end), where.at)
            as_before = [not self._moves(events[k], mates[k - shift]) for k in window]
            as_after = [
                k - shift < where.size or not self._moves(events[k], mates[k - shift - where.size])
                for k in window
            ]
            faults = [sum(as_after)]
            for before, after in zip(as_before, as_after, strict=True):
                faults.append(faults[-1] + before - after)
            best = len(window) - min(range(len(faults)), key=lambda k: (faults[k], -k))
            found.append(Cut(where.at - best, where.size))
            shift, end = shift + where.size, found[-1].at + where.size
        return found

    def _earliest(self, number: int, where: Cut) -> int:
        """The first place where a piece can be cut out: what precedes it is still its like."""
        told, begin = self.tokens[number], where.at - where.size
        while begin and told[begin - 1] == told[begin - 1 + where.size]:
            begin -= 1
        return min(begin + where.size, max(where.at - where.size + 1, 0))

    def _strides(self, place: Place) -> list[int]:
        """By how many events a birth there can move with one block more: by the pieces that precede
        it, and by the one that it may stand in."""
        found = [0]
        for where in self.cuts[place.phase]:
            found.append(found[-1] + where.size)
            if place.at < where.at + where.size:
                break
        return found

    def _moves(self, event, mate) -> bool:
        """Whether the birth of what dies moves as a birth can."""
        if isinstance(event, str) or event >= 0:
            return True
        if isinstance(mate, str):
            return False
        here, there = self.born_in_other.get(~event), self.born_in_one.get(~mate)
        if here is None or there is None or here.phase != there.phase:
            return False
        return here.at - there.at in self._strides(here)

    def _stride(self, place: Place, other: Place | None) -> int:
        """How far a birth moves, of two places that are a block apart or the same. The first block
        may do a thing more than others, so that its events are a few places off."""
        if other is None or other.phase != place.phase:
            raise NotAlike("what dies was born elsewhere")
        moved = place.at - other.at
        allowed = [sign * size for size in self._strides(place) for sign in (1, -1)]
        nearest = min(allowed, key=lambda size: abs(size - moved))
        return nearest if abs(nearest - moved) <= FEW else moved

    def storages(self) -> dict[int, int]:
        """Of each storage of the deeper twin the one of the shallower that is its like."""
        found = {}
        for number, events in enumerate(self.other):
            shift, cuts_left = 0, [*self.cuts[number], Cut(len(events), 0)]
            for k, event in enumerate(events):
                while k >= cuts_left[0].at:
                    shift += cuts_left.pop(0).size
                if not isinstance(event, str) and event >= 0:
                    found[event] = self.one[number][k - shift]
        return found

    def plan(self, more: int) -> list[list[tuple]]:
        """For each event of a model with `more` blocks more than the deeper twin: ("born", i) of
        the twin's storage i, ("dies", place of its birth) or ("said", a text)."""
        return [self._phase(number, more) for number in range(len(self.other))]

    def _phase(self, number: int, more: int) -> list[tuple]:
        events, mates = self.other[number], self.one[number]
        grown, at, shift = [], 0, 0  # `shift`: how much further the deeper twin is
        for where in [*self.cuts[number], Cut(len(events), 0)]:
            for k in range(at, where.at):
                grown.append(self._event(events[k], mates[k - shift], more))
            at, shift = where.at + where.size, shift + where.size
            for back in range(more if where.size else -1, -1, -1):
                for k in range(where.at, at):
                    before = events[k - where.size]
                    grown.append(self._event(events[k], mates[k - shift], more, back, before))
        return grown

    def _event(self, event, mate, more: int, back: int = 0, before=None) -> tuple:
        """One event of the grown log.

        Args:
            event: of the deeper twin.
            mate: what does the same in the shallower.
            more: blocks.
            back: how many copies of the block follow.
            before: what did the same one block earlier.
        """
        if isinstance(event, str):
            return "said", event
        if event >= 0:
            return "born", event
        place = self.born_in_other[~event]
        old = None if isinstance(mate, str) else self.born_in_one.get(~mate)
        moved = place.at + more * self._stride(place, old)
        if back:
            moved -= back * self._stride(place, self.born_in_other.get(~before))
        return "dies", Place(place.phase, moved)


def grown(plan: list[list[tuple]], kinds: Sequence[str], sizes: Sequence[int]) -> Events:
    """The log of a plan, with the sizes of the twin's storages.

    Raises:
        NotAlike: something dies that is not there.
    """
    events: list[int | str] = []
    new_kinds, new_sizes = [], []
    born: dict[Place, int] = {}
    for number, phase in enumerate(plan):
        for at, (what, told) in enumerate(phase):
            if what == "said":
                events.append(told)
            elif what == "born":
                born[Place(number, at)] = len(new_sizes)
                events.append(len(new_sizes))
                new_kinds.append(kinds[told])
                new_sizes.append(int(sizes[told]))
            else:
                if told not in born:
                    raise NotAlike("something dies that is not there")
                events.append(~born.pop(told))
    return Events(events, new_kinds, new_sizes, 0)


def most_alive(log: Events) -> int:
    """The most bytes that live at a time.

    >>> most_alive(Events(["forward", 0, 1, ~0, 2], ["activations"] * 3, [100, 200, 50], 0))
    300
    """
    change = [
        0 if isinstance(e, str) else log.sizes[e] if e >= 0 else -log.sizes[~e] for e in log.events
    ]
    return max(accumulate(change))
