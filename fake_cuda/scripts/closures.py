"""Optimizers whose step calls the script's closure, and LBFGS, which calls it again and again."""

import functools
import itertools
from collections.abc import Callable, Iterator

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from ..trace import Trace
from ..values import known

aten, STEP, UPDATE = torch.ops.aten, torch.optim.LBFGS.step, "optimizer step"
FALLS = (
    "LBFGS was run as on a loss that falls: all its iterations, each line search ending with its "
    "first evaluation."
)
HISTORY = "LBFGS was given all {} pairs of its history at once, which it gathers with the steps."


def passes_first(trace: Trace) -> Callable:
    """A hook before steps: with a closure, forward and backward passes precede the update."""

    def hook(optimizer, args: tuple, kwargs: dict):
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            return None
        if trace.phases[-1] == UPDATE:  # the trace takes a step for an update from its beginning on
            trace.phases.pop()
            del trace.events[len(trace.events) - 1 - trace.events[::-1].index(UPDATE)]
            trace.born[:] = [min(phase, len(trace.phases) - 1) for phase in trace.born]

        def passes(*more, **options):
            out = closure(*more, **options)
            trace.phase(UPDATE)
            return out

        if "closure" in kwargs:
            return args, kwargs | dict(closure=passes)
        return (args[0], passes, *args[2:]), kwargs

    return hook


class Falling:
    """Values for LBFGS while it computes: the loss falls, and the gradient with it."""

    def __init__(self, trace: Trace):
        self.trace, self.numbers, self.on = trace, itertools.count(2.0**20, -1.0), False

    def number(self, func, args: tuple) -> float | None:
        """What `.item()` is, where it is asked for a number of which nobody knows the value."""
        if not self.on or func is not aten._local_scalar_dense.default:
            return None
        if not args[0].is_floating_point() or known(args[0]) is not None:
            return None
        self.trace.work.add(self.trace, "forward", "wait")  # inside of a step the trace counts none
        return next(self.numbers)

    def answer(self, func, args: tuple, out) -> None:
        """Say yes where LBFGS takes a pair into its history, or a line search accepts its first
        step (`ys > 1e-10` and `abs(gtd_new) <= -c2 * gtd` in torch/optim/lbfgs.py)."""
        curved = func is aten.gt.Scalar and args[1] == 1e-10
        if self.on and (curved or func is aten.le.Tensor) and isinstance(out, FakeTensor):
            with _disable_current_modes():
                out._known = torch.ones(out.shape, dtype=torch.bool)


def changes(run, where) -> Iterator[tuple]:
    """(owner, name, value) of what is replaced for a `Run`."""
    falling = where.falling = Falling(where.trace)

    @functools.wraps(STEP)
    def step(optimizer, closure):
        def evaluated():
            falling.on = False  # the script's own values are as ever
            try:
                return closure()
            finally:
                falling.on = True

        run.note(FALLS)
        _remember(optimizer, where, run)
        falling.on = True
        try:
            return STEP(optimizer, evaluated)
        finally:
            falling.on = False

    yield torch.optim.LBFGS, "step", step


def _remember(optimizer, where, run) -> None:
    """After the first step: as much history as LBFGS will have."""
    state = next(iter(optimizer.state.values()), {})
    most = optimizer.param_groups[0]["history_size"]
    if state.get("d") is None or len(state["old_dirs"]) >= most:
        return
    run.note(HISTORY.format(most))
    flat, card = state["d"], where.on_card(state["d"])
    for _ in range(most - len(state["old_dirs"])):
        for name, like in (("old_dirs", flat), ("old_stps", flat), ("ro", flat[0])):
            state[name].append(where.like(like, card))
