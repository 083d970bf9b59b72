"""PyTorch's `MemTracker` on the code of published runs: fake tensors of a CPU, and its own peak.

A run's own module simulates it; here the simulation is that of a CPU, and the tracker lies around
the run, whose autocast for CUDA is one for CPUs here, as its tensors are. The tracker keeps
statistics of modules for one pass, so they are forgotten after each, as it asks.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from unittest.mock import patch

import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.modules.module import register_module_forward_pre_hook

from evidence import runs
from fake_cuda import NotSimulated
from fake_cuda.simulation import simulate

TOTAL = "Total"  # a key of its snapshot
FROZEN = "cannot register a hook on a tensor that doesn't require gradient"  # what it says then


class _Tracked(Exception):
    """Ends the work when the tracker has its peak; what would follow is of no concern here."""


class Whole(MemTracker):
    """Without the peaks of single modules, which take four fifths of its time; the whole's is its.

    A hack on a private method: `tests/test_calculators.py` holds it to the tracker's own.
    """

    def _update_peak_stats(self, _) -> None:
        for device, now in self._curr_mem_snap.items():
            if now[TOTAL] > self._peak_mem.get(device, 0):
                self._peak_mem[device] = now[TOTAL]
                self._peak_mem_snap[device] = dict(now)


def tracked(run: Callable, kind: type[MemTracker] = Whole) -> int:
    """The tracker's peak of a function that trains, in bytes."""
    tracker = kind()

    def forget(module, _):
        """The statistics of the last pass, which it wants before a model is called again."""
        calls = tracker._mod_tracker  # a private name, as its own question of whom it is called by
        again = module in tracker.memory_tracking and not calls.is_bw  # there it is a checkpoint's
        if again and set(calls.parents) == {"Global"}:
            tracker.reset_mod_stats()

    def around():
        with tracker:
            return run()

    def autocast(device_type, *args, real=torch.autocast, **named):
        return real("cpu", *args, **named)

    hook = register_module_forward_pre_hook(forget)  # before the tracker's own
    try:
        with patch.object(torch, "autocast", autocast):
            simulate(around, None)
    finally:
        hook.remove()
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
