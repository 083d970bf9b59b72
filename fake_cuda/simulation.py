"""A run on fake tensors, replayed through the allocator's model: peaks, categories, timeline."""

import dataclasses
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

import numpy as np
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from . import cost
from .card import Card
from .choices import cuda_choices, fake_modules
from .compiled import Compiler, compiled
from .depth import MORE, SHALLOW, deeper
from .here import Here
from .mode import OneMode
from .passages import Irregular, Seen
from .refusals import NO_TRITON, NO_VALUES, NotSimulated, what_it_uses
from .replay import Events, Simulation, replay, step_ends
from .scripts import Script
from .state import undisturbed
from .trace import Trace
from .versions import Versions, chosen
from .watch import watched

__all__ = ["NotSimulated", "Simulation", "simulate"]
_LOCK = threading.RLock()  # one at a time: functions are replaced and put back in their order
NO_STEP = "No optimizer step was seen: timed are the last forward passes and what follows."


def simulate(
    run: Callable,
    card: Card | tuple[int, int] | None = (8, 0),
    *,
    versions: Versions | None = None,
    inside: Callable[[Trace], AbstractContextManager] | None = None,
    compiler: Callable[[Trace], Compiler] = Compiler,
    few: Sequence[Callable] = (),
    layers: int = 0,
    log: bool = False,
    **speed: float,
) -> Simulation | Seen:
    """Simulate `run`, a function that builds its model on the CPU and takes two optimizer steps.

    Tensors have no values but small ones that numbers alone make; else `.item()` is 1 and a
    condition is False. Other threads may train meanwhile: libraries are changed for this one
    alone, and Accelerate's state is put back. Random numbers are put back, too, but they are the
    whole process's: a thread that draws some meanwhile does not draw what it would have drawn.

    Args:
        run: it is called once, without arguments; what it returns lives to the end of the log. A
            `Script` is simulated in a process of its own.
        card: with its rates the time of a step is predicted as well. A compute capability alone
            stands for a card of which no more is known, None for a CPU.
        versions: of libraries, by whose rules is simulated; those of `rules_of` or the installed
            ones if not told.
        inside: what a script's process puts around its run, in all of its threads.
        compiler: who compiles there.
        few: the same runs of models with `depth.SHALLOW` layers, and of `depth.MORE` as many as
            there are, where all layers are alike. If the log follows from two of theirs, it is
            written, and `run` is not called. A `Script` has its own.
        layers: how many the model of `run` has, where there are `few`.
        log: whether to return what was seen, as `depth.deeper` takes it; without `few`.
        speed: keywords of `cost.step_time`: `host` and `repeat`.

    Returns:
        Its peaks in bytes, its log and timeline, and with a card's rates its time in seconds.

    Raises:
        NotSimulated: a ValueError. `run` needs values, a GPU, compiled code, or a tensor or model
            made outside of it.

    >>> def run():
    ...     model = torch.nn.Linear(1000, 1000, bias=False)
    ...     optimizer = torch.optim.Adam(model.parameters())
    ...     for _ in range(2):
    ...         model(torch.zeros(8, 1000)).sum().backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    >>> found = simulate(run, (7, 5))
    >>> found.peak_by_category["gradients"], found.peak_reserved  # bytes
    (4000256, 44040192)
    """
    versions = versions or chosen()
    if isinstance(run, Script):
        if run.few:
            with suppress(Irregular):
                return _deep_script(run, card, versions, speed)
        return run.simulated(card=card, versions=versions, **speed)
    if few:
        with suppress(Irregular):
            return _deep(few, layers, card, versions, compiler, speed)
    trace = _trace(card, versions, inside is not None)

    def told(seen: Seen) -> Simulation | Seen:
        return seen if log else _found(trace, card, seen, inside is not None, speed)

    if inside:  # one that cannot be ended asks for its answer from within
        run.found = lambda: told(_seen(trace))
    seen, kept = _run(run, trace, compiler, inside)
    found = told(seen)
    del kept
    return found


def _deep(
    few: Sequence[Callable], layers: int, card, versions: Versions, compiler: Callable, speed: dict
) -> Simulation:
    """The simulation of a deep run by those of few layers; or `Irregular`, also where one of them
    fails: if the deep run does, too, its own error is the one to tell."""
    seen: list[Seen] = []
    for run, depth in zip(few, SHALLOW + MORE, strict=False):
        trace = _trace(card, versions, False)
        try:
            found, kept = _run(run, trace, compiler)
        except Exception as error:
            raise Irregular("one of few layers fails") from error
        seen.append(found)
        del kept
        if len(seen) > 1:
            with suppress(Irregular):
                whole = deeper(seen[-2:], layers, first=depth - 1)
                return _found(trace, card, whole, False, speed)
    raise Irregular("no two of few layers tell")


def _deep_script(script: Script, card: Card, versions: Versions, speed: dict) -> Simulation:
    """The same of a script, by those that it has with few layers."""
    asked = dict(card=card, versions=versions, log=True)
    try:
        with script.few[-1].begun(**asked):
            seen = [one.simulated(**asked) for one in script.few]
    except Exception as error:
        raise Irregular("one of few layers fails") from error
    rules = [one.rule for one in (*script.few, script) if one.rule]
    found = deeper(seen, script.layers, rules)
    script.told_by_few()
    return _found(_trace(card, versions, False), card, found, False, speed)


def _trace(card: Card | tuple[int, int] | None, versions: Versions, everywhere: bool) -> Trace:
    known = card if isinstance(card, Card) else card and Card.like(card)
    return Trace(known or None, versions, Here(everywhere=everywhere))


def _run(
    run: Callable, trace: Trace, compiler: Callable, inside: Callable | None = None
) -> tuple[Seen, object]:
    """What the trace has seen of a run, and what the run returned."""
    with _LOCK, _in_words(trace), _fake(trace, compiler(trace), inside):
        kept = run()
        return _seen(trace), kept  # what dies after this line is not part of the run


def _seen(trace: Trace) -> Seen:
    """What the trace has seen until now."""
    if trace.refused:
        raise trace.refused
    events, kinds = trace.so_far()
    made_on, late = trace.streams.made_on, frozenset(trace.streams.late)
    found = Events(events, kinds, trace.size, trace.since, made_on, late)
    return Seen(found, list(trace.phases), trace.work.operations, trace.work.notes)


def _found(trace: Trace, card, seen: Seen, script: bool, speed: dict) -> Simulation:
    """What was seen, replayed."""
    found, rows = replay(seen.events, trace.cuda)
    found.convolves = trace.convolves
    if isinstance(card, Card):
        _add_time(found, rows, trace, seen, script, speed)
    return found


@contextmanager
def _fake(trace: Trace, compiler: Compiler, inside: Callable | None) -> Iterator[None]:
    """Tensors are fake, libraries take them, and the trace sees all of it."""
    with (
        undisturbed(trace.here),
        warnings.catch_warnings(action="ignore"),  # of libraries that look for tensors' data
        fake_modules(trace),
        OneMode(allow_non_fake_inputs=inside is not None),
        trace,
        watched(trace),
        cuda_choices(trace),
        compiled(trace, compiler),
        inside(trace) if inside else nullcontext(),
    ):
        yield


@contextmanager
def _in_words(trace: Trace) -> Iterator[None]:
    """What torch says of a run that cannot be simulated, as `NotSimulated`."""
    try:
        yield
    except NotSimulated:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise NotSimulated(NO_VALUES) from error
    except ModuleNotFoundError as error:
        if error.name not in ("triton", "liger_kernel"):
            raise
        raise NotSimulated.uses(NO_TRITON.format(error.name)) from error
    except (AssertionError, RuntimeError, IndexError, ArithmeticError) as error:
        if what := what_it_uses(error):
            raise NotSimulated.uses(what) from error
        if not trace.guessed:
            raise
        raise NotSimulated(f"{NO_VALUES} (with a guess in its place: {error})") from error


def _add_time(
    found: Simulation, rows: np.ndarray, trace: Trace, seen: Seen, script: bool, speed: dict
) -> None:
    """The time of the last step, and when the card is there in the timeline."""
    card = trace.card
    if trace.fp16:  # for which bf16 stood
        rates = card.rates | {"bf16": card.rates.get("fp16", 0)}
        card = dataclasses.replace(card, rates=rates)
    step, found.time = _time(seen, trace.passes if script else [], card, **speed)
    found.seconds = np.zeros(len(found.timeline))
    for op, end in zip(step, found.time.ends, strict=False):  # no ends without a time
        # Its results are there when it begins, what follows comes when it is done.
        found.seconds[min(max(rows[op.event] + 1, 0), len(found.seconds) - 1)] = end
    found.seconds = np.maximum.accumulate(found.seconds)


def _time(seen: Seen, passes: list[int], card: Card, **speed) -> tuple:
    """The operations of the last step and their time; without a step of an optimizer, from the last
    forward passes in a row on, or of the last whole one of `passes`, which are the numbers of the
    operations that begin them."""
    phases, operations = seen.phases, seen.operations
    ends = step_ends(phases)
    if ends:
        first, last = ends[-2] if len(ends) > 1 else 1, ends[-1]
        notes = []
    else:
        starts = [k for k, name in enumerate(phases) if name == "forward"] or [len(phases)]
        first, last = starts[-1], len(phases)
        notes = [NO_STEP]
    # What precedes the first forward pass builds the model, but between steps gradients are freed.
    step = [op for op in operations if first <= op.phase < last]
    if passes and not ends:
        begin, end = [*passes, len(operations)][-2 - (len(passes) > 1) :][:2]
        step, notes = operations[begin:end], []
    if not step:
        return step, cost.Time(note="No time is predicted: no step was seen.")
    found = cost.step_time(step, phases, card, **speed)
    notes += [note for note, phase in seen.notes.items() if first <= phase < last]
    what = "pass" if passes and not ends else "step"
    return step, dataclasses.replace(found, note=found.note or " ".join(notes), what=what)
