"""What a trace saw, replayed through the allocator's model: peaks, categories, timeline."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from . import cost
from .allocator import Allocator
from .streams import Reusable
from .trace import CATEGORIES, EMPTY_CACHE, HOST

# oneDNN lays inputs, weights and results out anew for its kernels (its developer guide, "Memory
# Format Propagation"), and other kernels unfold their input (aten/src/ATen/native/im2col.h).
CONVOLUTIONS = "A CPU's convolutions take scratch of their own, which is not counted."


class Entry(NamedTuple):
    """A tensor is born or dies, or the cache is emptied.

    `tensor` is its number, `size` its bytes, below 0 where it dies. (-1, 0): the cache is emptied.
    """

    tensor: int
    size: int


class PhaseStart(NamedTuple):
    """Where a phase starts: before that row of the timeline (which counts births and deaths).

    `name` is "forward", "backward" or "optimizer step".
    """

    row: int
    name: str


@dataclass
class Simulation:
    """What a run needs. All sizes in bytes.

    `log` has each birth and death of a tensor in the whole run, in bytes, and `phases` where each
    part of the last step starts. `timeline` is that step's: bytes [events, categories] after each
    of its births and deaths. `peak_allocated` is all tensors at the worst moment, `by_category`
    splits that moment, and `peak_by_category` holds each category's own maximum. `peak_reserved` is
    what the caching allocator takes for them; None for a CPU, which has none. `time` is the last
    step's, where a card was given, and `seconds` goes with the rows of the timeline. `convolves`
    says whether a convolution was run.
    """

    peak_allocated: int
    by_category: dict[str, int]
    peak_by_category: dict[str, int]
    peak_reserved: int | None = None
    log: list[Entry] = field(default_factory=list, repr=False)
    timeline: np.ndarray | None = field(default=None, repr=False)
    phases: list[PhaseStart] = field(default_factory=list, repr=False)
    time: cost.Time | None = None
    convolves: bool = False
    seconds: np.ndarray | None = field(default=None, repr=False)  # when the card is there

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a step; None where no time is predicted."""
        return self.time.step_seconds if self.time else None

    @property
    def step_seconds_low(self) -> float | None:
        """The shortest that a step should take; None where no time is predicted."""
        return self.time.low if self.time else None

    @property
    def step_seconds_high(self) -> float | None:
        """The longest that a step should take; None where no time is predicted."""
        return self.time.high if self.time else None

    @property
    def host(self) -> float | None:
        """The host's seconds for an operation; None where no time is predicted."""
        return self.time.host if self.time else None

    @property
    def limited_by(self) -> str | None:
        """What a step waits for, of `cost.KINDS`; None without a card."""
        return self.time.limited_by if self.time else None

    @property
    def shares(self) -> dict[str, float] | None:
        """The step's time by `cost.KINDS`, which add up to 1; None without a card."""
        return self.time.shares if self.time else None

    @property
    def model_flops_utilisation(self) -> float | None:
        """The share of the data sheet's rates that the model's own operations reach."""
        return self.time.model_flops_utilisation if self.time else None


class Events(NamedTuple):
    """What a trace saw, in its order.

    `events` are births i, deaths ~i, and as text phases or that the cache was emptied; `kinds` and
    `sizes` are those of storage i. The run counts from event `since` on: memory had run out before.
    `made_on` is the stream of storage i, and `late` are those that wait for others when they die.
    """

    events: Sequence[int | str | Reusable]
    kinds: Sequence[str]
    sizes: Sequence[int]
    since: int
    made_on: Sequence[int] = ()
    late: frozenset[int] = frozenset()

    @property
    def several_streams(self) -> bool:
        """Whether something is made on another stream than the usual one."""
        return any(self.made_on)


class Log(NamedTuple):
    """The births and deaths that count."""

    entries: list[Entry]
    phases: list[PhaseStart]  # their rows count from the run's begin
    rows: list[int]  # of each event: how many entries precede it
    reusable: Mapping[int, list[int]]  # how many entries precede it: what waits no more for streams
    built: int  # how many entries build the model, where they count


def step_ends(names: Sequence[str]) -> list[int]:
    """Where steps end, in a list of phases."""
    ends = [k for k, name in enumerate(names) if name == "between steps"]
    return [k for k in ends if names[k + 1 : k + 2] != ["optimizer step"]]  # two share a step


def _log(seen: Events) -> Log:
    """What is left of the events: without the host's memory, and what dies as a model is built.

    The run takes the blocks that building leaves. But those of one stream are of no use to another,
    so that where there are several, what is built counts for what is reserved.
    """
    events = seen.events
    start = events.index("forward") if "forward" in events else 0
    dead = {~e for e in events[:start] if isinstance(e, int) and e < 0}  # building is not the run
    if seen.several_streams:
        dead = set()
    entries, phases, rows, reusable = [], [], [], defaultdict(list)
    for at, event in enumerate(events):
        rows.append(len(entries))
        if event == EMPTY_CACHE:
            entries.append(Entry(-1, 0))
        elif isinstance(event, str):
            phases.append(PhaseStart(len(entries) + 1, event))
        elif isinstance(event, Reusable):
            reusable[len(entries)].append(event.storage)
        else:
            i, sign = (event, 1) if event >= 0 else (~event, -1)
            if seen.sizes[i] and seen.kinds[i] != HOST and (at >= start or i not in dead):
                entries.append(Entry(i, sign * seen.sizes[i]))
    return Log(entries, phases, rows, reusable, rows[start] if seen.several_streams else 0)


def _bytes(log: Log, seen: Events, since: int, cuda: bool) -> tuple[np.ndarray, int]:
    """Bytes [entries + 1, categories] before the first and after each entry, and the allocator's
    peak since entry `since`. CUDA counts a tensor's whole block, with what it does not split off.
    """
    column = {category: k for k, category in enumerate(CATEGORIES)}
    change = np.zeros((len(log.entries) + 1, len(CATEGORIES)), dtype=np.int64)
    allocator, taken = Allocator(), {}
    for at, (i, size) in enumerate(log.entries, start=1):
        if at == since:  # memory had run out, or the model is built
            allocator.peak = allocator.reserved
        if cuda:
            for waited in allocator.waiting.intersection(log.reusable.get(at - 1, ())):
                allocator.release(waited)
            if size < 0 and i in seen.late:
                allocator.wait(i)
            else:
                allocator.step(i, size, seen.made_on[i] if size > 0 and seen.made_on else 0)
        if size > 0:
            taken[i] = allocator.blocks[allocator.where[i]][0] if cuda else size
        if size:
            change[at, column[seen.kinds[i]]] = math.copysign(taken[i], size)
    return change.cumsum(axis=0), allocator.peak


def replay(seen: Events, cuda: bool) -> tuple[Simulation, np.ndarray]:
    """The simulation, without a time; and of each event the row of the timeline it leads to."""
    log = _log(seen)
    since = max(log.rows[seen.since] if seen.since else 0, log.built)
    now, reserved = _bytes(log, seen, since, cuda)
    top = since + int(now[since:].sum(axis=1).argmax())
    phases = log.phases
    ends = step_ends([name for _, name in phases])
    first, last = (ends[-2] + 1, ends[-1]) if len(ends) > 1 else (0, len(phases) - 1)
    begin = min(phases[first].row, len(log.entries)) if phases else 0
    stop = phases[last + 1].row if last + 1 < len(phases) else None  # an evaluation may follow
    simulation = Simulation(
        peak_allocated=int(now[top].sum()),
        by_category=dict(zip(CATEGORIES, now[top].tolist(), strict=True)),
        peak_by_category=dict(zip(CATEGORIES, now[since:].max(axis=0).tolist(), strict=True)),
        peak_reserved=reserved if cuda else None,
        log=log.entries,
        timeline=now[begin:stop].copy(),
        phases=[
            PhaseStart(at - begin, name)
            for at, name in phases[first:last]
            if name != "between steps"
        ],
    )
    return simulation, np.array([*log.rows, len(log.entries)]) - begin
