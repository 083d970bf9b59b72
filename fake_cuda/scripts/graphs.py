"""CUDA graphs and profilers: what was captured runs as eager code, nothing is profiled."""

import json
import pickle
from collections.abc import Iterator
from contextlib import ContextDecorator

import torch
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerAction

from ..operations import Operation
from ..trace import EMPTY_CACHE

GRAPHED = (
    "CUDA graphs were run as eager code, and a replay takes the time of what was captured: on the "
    "card launches take less, and a graph keeps memory of its own."
)
NOT_PROFILED = "Profilers were left out: what they write here is empty."


def graphs(run) -> Iterator[tuple]:
    """(owner, name, value) of CUDA graphs."""

    def callables(what, *_, **__):
        run.note(GRAPHED)
        return what

    class Graph(Captured):
        def __init__(self, *_, **__):
            run.note(GRAPHED)
            super().__init__(run)

    for owner in (torch.cuda, torch.cuda.graphs):
        yield owner, "CUDAGraph", Graph
        yield owner, "graph", Capture
        yield owner, "make_graphed_callables", callables


class Captured:
    """A graph: the operations that were run while it was captured."""

    def __init__(self, run):
        self.run, self.operations, self.events, self.steps = run, [], [], []
        self.start, self.passes, self.phase = 0, 0, run.trace.phases[-1]

    def capture_begin(self, *_, **__) -> None:
        trace = self.run.trace
        self.first, self.before = len(trace.work.operations), self.run.taken.copy()
        self.passes, self.start = len(trace.passes), len(trace.events)
        self.phase = trace.phases[-1]

    def capture_end(self) -> None:
        trace = self.run.trace
        self.operations = trace.work.operations[self.first :]
        self.events = trace.events[self.start :]
        self.passes = len(trace.passes) - self.passes
        self.steps = list((self.run.taken - self.before).elements())

    def replay(self) -> None:
        """What was captured happens once more; each step of an optimizer in it counts."""
        self.repeat()
        for optimizer in self.steps:
            self.run.step_of(optimizer)
        if self.passes and not self.steps:
            self.run.passed()

    def repeat(self) -> None:
        """The operations, births and deaths that were captured happen once more."""
        trace, again, born = self.run.trace, iter([*self.operations, None]), {}
        dead = {~e for e in self.events if isinstance(e, int) and e < 0}
        trace.passes += [len(trace.work.operations)] * self.passes
        op = next(again)
        trace.phase(self.phase)
        for at, event in enumerate([*self.events, ""], start=self.start):
            while op and (op.event <= at or event == ""):
                place = len(trace.phases) - 1, len(trace.events)
                trace.work.operations.append(Operation(*place, *op[2:]))  # quicker than _replace
                op = next(again)
            if event in dead:  # what outlives the capture keeps its place
                trace.streams.enter(trace.streams.made_on[event])
                born[event] = trace.add(trace.size[event], trace.kind[event])
                trace.streams.leave()
            elif isinstance(event, int) and ~event in born:
                trace.events.append(~born.pop(~event))
            elif isinstance(event, str) and event not in ("", EMPTY_CACHE):
                trace.phase(event)

    def pool(self) -> tuple[int, int]:
        return 0, 1

    def __getattr__(self, name: str):
        return lambda *_, **__: None


class Capture:
    """`with torch.cuda.graph(g):`"""

    def __init__(self, cuda_graph, *_, **__):
        self.graph = cuda_graph

    def __enter__(self) -> None:
        self.graph.capture_begin()

    def __exit__(self, *error) -> None:
        self.graph.capture_end()


def profilers(run) -> Iterator[tuple]:
    """(owner, name, value) of profilers, which print megabytes about fake tensors."""

    class Profile(Unprofiled):
        def __init__(self, *_, **options):
            run.note(NOT_PROFILED)
            super().__init__(**options)

    yield from ((torch.profiler, name, Profile) for name in ("profile", "_KinetoProfile"))
    yield torch.profiler.profiler, "profile", Profile
    owner = torch.autograd.profiler
    yield from ((owner, name, Profile) for name in ("profile", "emit_nvtx", "emit_itt"))
    for name in ("start", "stop", "init", "profile"):
        yield torch.cuda.profiler, name, Profile
    yield torch.cuda.memory, "_dump_snapshot", _dump


class Unprofiled(ContextDecorator):
    """A profiler that sees nothing, and hands on what it has when its schedule says so."""

    step_num, profiler = 0, None

    def __init__(self, schedule=None, on_trace_ready=None, **_):
        self.schedule, self.on_trace_ready = schedule, on_trace_ready

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *error) -> None:
        self.stop()

    def start(self) -> None:
        self.step_num = 0

    def stop(self) -> None:
        if self.schedule is None:
            self.ready()

    def step(self) -> None:
        saves = ProfilerAction.RECORD_AND_SAVE
        if self.schedule and self.schedule(self.step_num) == saves:
            self.ready()
        self.step_num += 1

    def ready(self) -> None:
        if self.on_trace_ready:
            self.on_trace_ready(self)

    def key_averages(self, *_, **__) -> EventList:
        return EventList([])

    events = key_averages

    def table(self, *_, **__) -> str:
        return ""

    def export_chrome_trace(self, path: str, *_, **__) -> None:
        with open(path, "w") as file:
            json.dump({"traceEvents": []}, file)

    def export_stacks(self, path: str, *_, **__) -> None:
        open(path, "w").close()

    export_memory_timeline = export_chrome_trace

    def __getattr__(self, name: str):
        return lambda *_, **__: None


def _dump(filename: str = "dump_snapshot.pickle", *_, **__) -> None:
    """torch.cuda.memory._dump_snapshot: a history without entries."""
    with open(filename, "wb") as file:
        pickle.dump(dict(segments=[], device_traces=[], allocator_settings={}), file)
