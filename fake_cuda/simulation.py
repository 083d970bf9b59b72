"""A run on fake tensors, replayed through the allocator's model: peaks, categories, timeline."""

import dataclasses
import math
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from . import cost
from .allocator import Allocator
from .choices import cuda_choices, fake_modules
from .state import undisturbed
from .trace import CATEGORIES, EMPTY_CACHE, HOST, Trace

_LOCK = threading.RLock()  # hooks and replaced functions are the whole process's
GPU = "a GPU: leave the model on the CPU, the simulation stands in"
MISTAKES = {  # what torch says of them: what to say
    "convert all Tensors to FakeTensors": "a tensor or model made outside of it: build them inside",
    "linked with support for cuda": GPU,
    "fake tensor on": GPU,
    "Torch not compiled with CUDA": GPU,
    "Found no NVIDIA driver": GPU,
    "torch.compile stance": "torch.compile (flex attention too), whose code plans its own memory",
    "FlexAttention does not": "flex attention, which a CPU cannot train: take another kernel",
}
NO_VALUES = "the run picks by tensors' values, and fake tensors have none: take a fixed number"
NO_VALUES += ", of a mixture's experts the grouped products"


@dataclass
class Simulation:
    """What a run needs. All sizes in bytes.

    `peak_allocated` is all tensors at the worst moment, `by_category` splits that moment, and
    `peak_by_category` holds each category's own maximum. `peak_reserved` is what the caching
    allocator takes for them; None for a CPU, which has none. `time` is the last step's, where a
    card was given, and `seconds` goes with the rows of the timeline. `convolves` says whether a
    convolution was run.
    """

    peak_allocated: int
    by_category: dict[str, int]
    peak_by_category: dict[str, int]
    peak_reserved: int | None = None
    # Each tensor's birth (number, bytes) and death (number, -bytes); (-1, 0): the cache is emptied.
    log: list[tuple[int, int]] = field(default_factory=list, repr=False)
    # The last step, to its end: bytes [events, categories] after each birth or death of a tensor,
    # and where each phase starts: (event, "forward" | "backward" | "optimizer step").
    timeline: np.ndarray | None = field(default=None, repr=False)
    phases: list[tuple[int, str]] = field(default_factory=list, repr=False)
    time: cost.Time | None = None
    convolves: bool = False
    seconds: np.ndarray | None = field(default=None, repr=False)  # when the card is there

    step_seconds = property(lambda self: self.time and self.time.step_seconds)
    limited_by = property(lambda self: self.time and self.time.limited_by)
    shares = property(lambda self: self.time and self.time.shares)
    model_flops_utilisation = property(lambda self: self.time and self.time.model_flops_utilisation)


def simulate(
    run: Callable,
    capability: tuple[int, int] | None = (8, 0),
    sms: int = 108,
    card: cost.Card | None = None,
    **speed,
) -> Simulation:
    """Simulate `run`, a function that builds its model on the CPU and takes two optimizer steps.

    `capability` is the compute capability of the card, `sms` its number of multiprocessors (an
    A100's if not told), which sums use; None simulates a CPU. A `card` brings both, and the time
    of a step; `speed` are keywords of `cost.step_time`, `host` and `repeat`. Tensors have no
    values but small ones that numbers alone make; else `.item()` is 1 and a condition is False.
    ValueError if `run` needs values, a GPU,
    torch.compile, or a tensor or model made outside of it. Random numbers and Accelerate's state
    are put back.
    """
    if hasattr(run, "simulated"):  # a script, which runs in a process of its own
        return run.simulated(capability=capability, sms=sms, card=card, **speed)
    capability = card.capability if card else capability and tuple(capability)
    sms = card and card.sms or sms
    trace = Trace(cost.Card("a card", capability, sms) if capability else None)
    inside = getattr(run, "inside", None)  # of a script, in that process
    try:
        with (
            _LOCK,
            undisturbed(),
            warnings.catch_warnings(action="ignore"),  # of libraries that look for tensors' data
            fake_modules(trace.cuda),
            FakeTensorMode(allow_non_fake_inputs=inside is not None),
            trace,
            trace.watch(),
            torch.compiler.set_stance("fail_on_recompile"),
            cuda_choices(trace, capability),
            inside(trace) if inside else nullcontext(),
        ):
            kept = run()
            events, kinds = trace.so_far()  # what dies after this line is not part of the run
            phases = list(trace.phases)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(NO_VALUES) from error
    except (AssertionError, RuntimeError, IndexError, ArithmeticError) as error:
        why = next((why for text, why in MISTAKES.items() if text in str(error)), None)
        if why:
            raise ValueError(f"the run uses {why}") from error
        if not trace.guessed:
            raise
        raise ValueError(f"{NO_VALUES} (with a guess in its place: {error})") from error
    found, places = _replay(events, kinds, trace.size, trace.cuda, trace.since)
    found.convolves = trace.convolves
    if card:
        if trace.fp16:  # for which bf16 stood
            rates = card.rates | {"bf16": card.rates.get("fp16", 0)}
            card = dataclasses.replace(card, rates=rates)
        step, found.time = _time(trace.work, phases, trace.passes if inside else [], card, **speed)
        found.seconds = np.zeros(len(found.timeline))
        for op, end in zip(step, found.time.ends, strict=False):  # no ends without a time
            # Its results are there when it begins, what follows comes when it is done.
            found.seconds[min(max(places[op.event] + 1, 0), len(found.seconds) - 1)] = end
        found.seconds = np.maximum.accumulate(found.seconds)
    del kept
    return found


def _time(work, phases: list[str], passes: list[int], card: cost.Card, **speed) -> tuple:
    """The operations of the last step and their time; without a step of an optimizer, from the last
    forward passes in a row on, or of the last whole one of `passes`, which are the numbers of the
    operations that begin them."""
    ends = _ends(phases)
    if ends:
        first, last = ends[-2] if len(ends) > 1 else 1, ends[-1]
        notes = []
    else:
        starts = [k for k, name in enumerate(phases) if name == "forward"] or [len(phases)]
        first, last = starts[-1], len(phases)
        notes = ["No optimizer step was seen: timed are the last forward passes and what follows."]
    # What precedes the first forward pass builds the model, but between steps gradients are freed.
    step = [op for op in work.operations if first <= op.phase < last]
    if passes and not ends:
        begin, end = [*passes, len(work.operations)][-2 - (len(passes) > 1) :][:2]
        step, notes = work.operations[begin:end], []
    if not step:
        return step, cost.Time(note="No time is predicted: no step was seen.")
    found = cost.step_time(step, phases, card, **speed)
    notes += [note for note, phase in work.notes.items() if first <= phase < last]
    what = "pass" if passes and not ends else "step"
    return step, dataclasses.replace(found, note=found.note or " ".join(notes), what=what)


def _ends(names: list[str]) -> list[int]:
    """Where steps end, in a list of phases."""
    ends = [k for k, name in enumerate(names) if name == "between steps"]
    return [k for k in ends if names[k + 1 : k + 2] != ["optimizer step"]]  # two share a step


def _replay(events: list, kinds: list[str], sizes: list[int], cuda: bool, since: int) -> tuple:
    """The peaks, the log and the timeline of what a trace saw; and for each event the row of the
    timeline that it leads to. Peaks are those after the event `since`."""
    start = events.index("forward") if "forward" in events else 0
    dead = {~e for e in events[:start] if isinstance(e, int) and e < 0}  # building is not the run
    log, phases, places = [], [], []
    for at, event in enumerate(events):
        places.append(len(log))
        if event == EMPTY_CACHE:
            log.append((-1, 0))
        elif isinstance(event, str):
            phases.append((len(log) + 1, event))
        else:
            i, sign = (event, 1) if event >= 0 else (~event, -1)
            if sizes[i] and kinds[i] != HOST and (at >= start or i not in dead):
                log.append((i, sign * sizes[i]))
    column = {category: k for k, category in enumerate(CATEGORIES)}
    change, allocator = np.zeros((len(log) + 1, len(CATEGORIES)), dtype=np.int64), Allocator()
    taken = {}  # CUDA counts a tensor's whole block, also what the allocator does not split off
    since = places[since] if since else 0
    for at, (i, size) in enumerate(log, start=1):
        if at == since:  # memory had run out
            allocator.peak = allocator.reserved
        if cuda:
            allocator.step(i, size)
        if size > 0:
            taken[i] = allocator.blocks[allocator.where[i]][0] if cuda else size
        if size:
            change[at, column[kinds[i]]] = math.copysign(taken[i], size)
    bytes_now = change.cumsum(axis=0)
    top = since + int(bytes_now[since:].sum(axis=1).argmax())
    ends = _ends([name for _, name in phases])
    first, last = (ends[-2] + 1, ends[-1]) if len(ends) > 1 else (0, len(phases) - 1)
    begin = min(phases[first][0], len(log)) if phases else 0
    stop = phases[last + 1][0] if last + 1 < len(phases) else None  # an evaluation may follow
    simulation = Simulation(
        peak_allocated=int(bytes_now[top].sum()),
        by_category=dict(zip(CATEGORIES, bytes_now[top].tolist(), strict=True)),
        peak_by_category=dict(zip(CATEGORIES, bytes_now[since:].max(axis=0).tolist(), strict=True)),
        peak_reserved=allocator.peak if cuda else None,
        log=log,
        timeline=bytes_now[begin:stop].copy(),
        phases=[(at - begin, name) for at, name in phases[first:last] if name != "between steps"],
    )
    return simulation, np.array([*places, len(log)]) - begin
