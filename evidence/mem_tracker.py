"""PyTorch's `MemTracker` on the code of published runs: fake tensors of a CPU, and its own peak.

A run's own module simulates it; here the simulation is that of a CPU, and the tracker lies around
the run. It keeps statistics of modules for one pass, so they are forgotten after each, as it asks.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from unittest.mock import patch

import torch
from torch.distributed._tools.mem_tracker import MemTracker

from evidence import runs
from fake_cuda import NotSimulated
from fake_cuda.simulation import simulate

TOTAL = "Total"  # a key of its snapshot
FROZEN = "cannot register a hook on a tensor that doesn't require gradient"  # what it says then


class _Tracked(Exception):
    """Ends the work when the tracker has its peak; what would follow is of no concern here."""


def tracked(run: Callable) -> int:
    """The tracker's peak of a function that trains, in bytes."""
    tracker, backward, depth = MemTracker(), torch.autograd.backward, 0

    def whole_pass(*args, **named):
        nonlocal depth
        depth += 1
        try:
            backward(*args, **named)
        finally:
            depth -= 1
        if not depth:  # inside of another it is a checkpoint's
            tracker.reset_mod_stats()

    def around():
        with tracker:
            return run()

    with patch.object(torch.autograd, "backward", whole_pass):
        simulate(around, None)
    (found,) = tracker.get_tracker_snapshot("peak").values()
    return found[TOTAL]


def peak(set_: str, run: str) -> int | None:
    """The tracker's peak of a published run; None where it cannot run it: it
    refuses models with frozen weights (in torch 2.13), as LoRA's are.

    Raises:
        LookupError: no module has this run.
    """
    module = sys.modules[runs.of_peaks()[set_]]
    job = next((job for name, job in module.PEAKS[set_]() if name == run), None)
    if job is None:
        raise LookupError(f"{set_} has no run {run!r}")
    found = []

    def instead(asked: Callable, *_, **__):
        found.append(tracked(asked))
        raise _Tracked

    with ExitStack() as stack:
        for other in [*sys.modules.values()]:
            if getattr(other, "simulate", None) is simulate and other.__name__ != __name__:
                stack.enter_context(patch.object(other, "simulate", instead))
        try:
            job()
        except _Tracked:
            return found[0]
        except (NotSimulated, RuntimeError) as error:
            if FROZEN not in f"{error} {error.__cause__}":
                raise
            return None
    raise LookupError(f"{set_}, {run} simulates nothing")
