"""How long a step takes on a card: its kernels one after another, and the host that issues them.

A matrix product is cut into tiles that the multiprocessors take wave by wave, fused attention has
shares of the peak of its own, a copy waits for the bus, and all else moves bytes. The host issues
operation after operation into a queue: the slower of the two sets the pace, and both meet wherever
the run asks for a value (`.item()`). Of Triton kernels only the bytes are seen. Not seen are
the host's part of a compiled call, an optimizer's pages, which travel only where memory is short,
and what stays in the L2 cache.

The ranges were chosen on 70 rows of data/speeds.csv, so that nine of ten lay inside. Then 136
others were predicted blind (data/blind_speeds.csv): 79% of them lay inside. Since then layouts
of convolutions and FlashAttention on newer cards have been put in, and the ranges stayed. Of 164
more that were predicted blind (data/blind_speeds_2.csv) 89% lay inside. Of all judged rows 92% lie
in their ranges today, and 100% of those that wait for their host: the range of a host is that of
eleven machines, most of these rows' among them.
"""

from collections import Counter
from dataclasses import dataclass, field

from .card import Card
from .constants import CONSTANTS, HOST_SECONDS, Constants
from .kernels import TILES, Kernels, Missing
from .operations import Operation
from .queued import Row, run

__all__ = ["CONSTANTS", "HOST_SECONDS", "KINDS", "TILES", "Card", "Constants", "Estimate"]
__all__ += ["Kernels", "Missing", "Time", "Timed", "step_time"]
KINDS = ("host", "matrix products", "attention", "memory traffic", "copies")
MOST_OF_A_HOST = 1e-3  # seconds for an operation: no machine takes as long
HALVINGS = 30  # of these seconds, by which a host is found: to less than a picosecond
FUSED_AS_THEY_ARE = ("matrix products", "attention", "copies")  # which no compiler makes less of


class Estimate(float):
    """A number, and the range `low` to `high` in which it should lie."""

    def __new__(cls, value: float, low: float, high: float):
        self = super().__new__(cls, value)
        self.low, self.high = low, high
        return self

    def __str__(self) -> str:
        return f"{self:.3g} ({self.low:.3g} to {self.high:.3g})"


class Timed(float):
    """The seconds that a step took on a real card: in place of a host's, they tell the host."""


@dataclass(frozen=True)
class Time:
    """A step's time in seconds, and the range that the comparisons with real cards justify.

    `shares` splits it by `KINDS` (host: the card stands idle) and `phases` by phase. `limited_by`
    is "host" where a slower host would cost more than a slower card: the step then takes as long
    on a faster card, though this one may be busy; else the largest of the card's shares. `flops`
    are those of all products, `model_flops` without recomputation; `ideal_seconds` is what they
    would take at the data sheet's rates. `fused_seconds` is a lower bound of what a compiler could
    reach with the same kernels: products, attention, copies and the update as they are, all other
    traffic and the host for nothing. `ends` is when the card is done with each operation of a pass.
    `launches` and `moved` count, by phase, the operations that the card is given and their bytes;
    `busy` is for how many seconds it works on them.
    `note` says what is not timed or only assumed; without `step_seconds`, what is missing. `what`
    is "step", or "pass" of a run without a step. `host` is the host's seconds for one operation.
    """

    step_seconds: float | None = None
    low: float | None = None
    high: float | None = None
    limited_by: str = ""
    shares: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    flops: float = 0.0
    model_flops: float = 0.0
    ideal_seconds: float = 0.0
    fused_seconds: float | None = None
    launches: dict[str, int] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)
    note: str = ""
    ends: list[float] = field(default_factory=list, repr=False)
    what: str = "step"
    host: float | None = None

    def __str__(self) -> str:
        if not self.step_seconds:
            return self.note
        seconds = Estimate(self.step_seconds, self.low, self.high)
        return f"{seconds} s a {self.what}, limited by {self.limited_by}"

    def per_second(self, n: int | None) -> Estimate | None:
        """The rate of what a step has `n` of; None if that or the time is not known."""
        known = n and self.step_seconds
        return Estimate(n / self.step_seconds, n / self.high, n / self.low) if known else None

    @property
    def model_flops_utilisation(self) -> float | None:
        """The share of the data sheet's rates that the model's own operations reach."""
        return self.ideal_seconds / self.step_seconds if self.step_seconds else None


class _Step:
    """The operations of a step on a card, as rows of the queue.

    `ideal` is the seconds of all products at the data sheet's rates, without recomputation.
    """

    def __init__(
        self,
        operations: list[Operation],
        phases: list[str],
        card: Card,
        host: float,
        constants: Constants,
    ):
        self.operations, self.phases = operations, phases
        self.host, self.shares = constants.host, constants.host.shares()
        self.kernels, self.known = Kernels(card, constants), {}
        self.rows, self.ideal = [], 0.0
        for op in operations:
            self.rows.append(self.row(op, host))
            if op.flops and not op.again:
                self.ideal += op.flops / min(self.kernels.rate(kind) for kind in op.types())

    def row(self, op: Operation, host: float) -> Row:
        issue = host * self.shares[op.issued]
        if op.kind in ("view", "wait"):
            issue *= self.host.view
            kind = "wait" if op.kind == "wait" else ""
            return Row(self.phases[op.phase], kind, 0.0, issue)
        key = op.kind, op.work, op.moved, op.tensors, op.name
        if key not in self.known:
            self.known[key] = self.kernels.seconds(op)
        issue += host * op.tensors * self.host.listed_tensor
        return Row(self.phases[op.phase], *self.known[key], issue)

    def spent(self, again: dict[str, float], card: float, host: float) -> dict:
        """Seconds by (phase, kind), with phases done `again` so many times."""
        spent, _ = run(self.rows, self.host, card, host)
        return {key: n * again.get(key[0], 1) for key, n in spent.items()}

    def ends(self) -> list[float]:
        """When the card is done with each operation, in seconds from the step's begin."""
        return run(self.rows, self.host, 1, 1)[1]

    def fused(self, again: dict[str, float]) -> float:
        return sum(
            row.seconds * again.get(row.phase, 1)
            for row in self.rows
            if row.kind in FUSED_AS_THEY_ARE or row.phase == "optimizer step"
        )

    def counts(self, again: dict[str, float]) -> tuple[dict[str, int], dict[str, int]]:
        """By phase, the operations that the card is given and the bytes that they move."""
        launches, moved = Counter(), Counter()
        for op in self.operations:
            if op.kind not in ("view", "wait"):
                launches[self.phases[op.phase]] += 1
                moved[self.phases[op.phase]] += op.moved
        launched = {name: round(n * again.get(name, 1)) for name, n in launches.items()}
        return launched, {name: round(n * again.get(name, 1)) for name, n in moved.items()}


def _shares(spent: dict[tuple[str, str], float]) -> tuple[dict[str, float], dict[str, float]]:
    """Shares of the seconds, by phase and by kind."""
    by_phase, by_kind = {}, {}
    total = sum(spent.values()) or 1
    for (phase, kind), n in spent.items():
        by_phase[phase] = by_phase.get(phase, 0.0) + n / total
        by_kind[kind] = by_kind.get(kind, 0.0) + n / total
    return by_phase, {kind: by_kind.get(kind, 0.0) for kind in KINDS}


def _busy(spent: dict[tuple[str, str], float]) -> dict[str, float]:
    """Seconds by phase in which the card works."""
    busy: dict[str, float] = {}
    for (phase, kind), seconds in spent.items():
        if kind != "host":
            busy[phase] = busy.get(phase, 0.0) + seconds
    return busy


class _Untold(Exception):
    """Why a step does not tell its host, in a sentence."""


def _host_of(step: _Step, again: dict[str, float], took: Timed, constants: Constants) -> float:
    """The host's seconds for an operation with which a step takes as long as it `took`."""

    def total(host: float) -> float:
        return sum(step.spent(again, 1, host / HOST_SECONDS).values())

    alone, low, high = total(0), 0.0, MOST_OF_A_HOST
    said = f"A step of {took:.3g} s does not tell the host"
    if took <= alone:
        raise _Untold(f"{said}: the card alone needs {alone:.3g} s of it, by prediction.")
    most = alone * constants.ranges.card_slowest
    if took <= most:
        why = f"the card alone may need {alone:.3g} to {most:.3g} s of it"
        raise _Untold(f"{said}: {why}. Time one with fewer samples or tokens.")
    if took > total(high):
        why = f"it would be slower than {high:g} s an operation"
        raise _Untold(f"{said}: {why}. Is it the time of one step?")
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if total(middle) > took else (middle, high)
    return (low + high) / 2


def step_time(
    operations: list[Operation],
    phases: list[str],
    card: Card,
    *,
    host: float | Timed = HOST_SECONDS,
    repeat: float = 1,
    constants: Constants = CONSTANTS,
) -> Time:
    """The time of a step of these operations, whose `phase` counts in `phases`.

    Args:
        operations: of one step, in their order.
        phases: names of phases.
        card: with its rates; one that it lacks is named in `note`, and no time is given.
        host: the host's seconds for one operation, or a step's own, which tell them; where they do
            not, `note` says why, and no time is given.
        repeat: how many times the forward and backward passes are done, where few micro-batches
            stand for many.
        constants: the numbers behind the time.
    """
    again = {"forward": repeat, "backward": repeat}
    try:
        if isinstance(host, Timed):
            step = _Step(operations, phases, card, HOST_SECONDS, constants)
            host = _host_of(step, again, host, constants)
        step = _Step(operations, phases, card, host, constants)
    except (Missing, _Untold) as error:
        note = str(error)
        if isinstance(error, Missing):
            note = f"No time is predicted: the {error} of {card.name} is not known."
        return Time(flops=sum(op.flops for op in operations), note=note)

    def total(card: float, host: float) -> float:
        return sum(step.spent(again, card, host).values())

    spent = step.spent(again, 1, 1)
    by_phase, shares = _shares(spent)
    ranges = constants.ranges
    times = [op.flops * again.get(phases[op.phase], 1) for op in operations]
    launches, moved = step.counts(again)
    return Time(
        step_seconds=sum(spent.values()),
        low=total(ranges.card_fastest, ranges.host_fastest),
        high=total(ranges.card_slowest, ranges.host_slowest),
        limited_by="host" if total(1, 1.1) > total(1.1, 1) else max(KINDS[1:], key=shares.get),
        shares=shares,
        phases=by_phase,
        flops=sum(times),
        model_flops=sum(n for n, op in zip(times, operations, strict=True) if not op.again),
        ideal_seconds=step.ideal * repeat,
        fused_seconds=step.fused(again),
        launches=launches,
        moved=moved,
        busy=_busy(spent),
        ends=step.ends(),
        host=host,
    )
