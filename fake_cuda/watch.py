"""Hooks of modules and optimizers: what tensors are for, and where the phases of a step begin."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils._pytree import tree_leaves

from .operations import in_backward
from .trace import HOST, Trace

CONVOLUTIONS = tuple(
    getattr(torch.nn, f"Conv{kind}{n}d") for kind in ("", "Transpose") for n in (1, 2, 3)
)
RECURRENT = "Of recurrent layers cuDNN keeps more than is counted here, and takes other times."
# Each algorithm's workspace, one after another, as much as there is room for (getValidAlgorithms,
# AlgorithmSearch in aten/src/ATen/native/cudnn/Conv_v8.cpp).
TRIALS = (
    "cudnn.benchmark tries the algorithms of convolutions at their first pass, with scratch of "
    "their own: it is not counted, and can be many times a small step's peak."
)


class _Watch:
    """Hooks of modules and optimizers, for a trace."""

    def __init__(self, trace: Trace):
        self.trace = trace
        self.known = weakref.WeakSet()  # modules whose parameters have been seen

    def enter(self, module, given: tuple) -> None:
        trace = self.trace
        if not trace.here():
            return
        if not in_backward():
            trace.begin(module, given)
        if isinstance(module, torch.nn.RNNBase):
            trace.work.note(RECURRENT, trace)
        if trace.cuda and torch.backends.cudnn.benchmark and isinstance(module, CONVOLUTIONS):
            trace.work.note(TRIALS, trace)
        if module not in self.known:
            self.known.update(module.modules())
            for tensor in (*module.parameters(), *module.buffers()):
                trace.see(tensor, "parameters")

    def before(self, optimizer, *_) -> None:
        trace = self.trace
        if not trace.here():
            return
        if not in_backward():  # else an optimizer that works inside of backward
            trace.phase("optimizer step")
        self.states(optimizer)  # made when it was, or loaded: new ones may take their place
        unscaled = 0
        for parameter in (p for g in optimizer.param_groups for p in g["params"]):
            trace.see(parameter, "parameters")
            if parameter.grad is not None:
                trace.see(parameter.grad, "gradients")
                unscaled += parameter.grad.nbytes
        if trace.fp16 and not in_backward():
            trace.work.unscale(unscaled, trace)

    def states(self, optimizer) -> None:
        trace, paged = self.trace, getattr(optimizer, "is_paged", False)
        # bitsandbytes pages states of 100,000 values and more (optim/optimizer.py).
        least = 100_000 if hasattr(optimizer, "get_state_buffer") else 0
        leaves = [leaf for state in optimizer.state.values() for leaf in tree_leaves(state)]
        # GaLore and APOLLO keep their projections in objects of their own.
        inside = [getattr(leaf, "__dict__", {}).values() for leaf in leaves]
        leaves += [t for values in inside for t in values if isinstance(t, torch.Tensor)]
        for tensor in leaves:
            away = paged and isinstance(tensor, torch.Tensor) and tensor.numel() >= least
            if away and trace.cuda:
                trace.work.note("The travel of the optimizer's pages is not timed.", trace)
            trace.see(tensor, HOST if away and trace.cuda else "optimizer states")

    def after(self, optimizer, *_) -> None:
        if not self.trace.here():
            return
        self.states(optimizer)
        if not in_backward():
            self.trace.phase("between steps")


@contextmanager
def watched(trace: Trace) -> Iterator[None]:
    """Label parameters, gradients and optimizer states, and mark the phases of each step.

    Hooks are the whole process's: those of another thread's training are passed over.
    """
    watch = _Watch(trace)
    hooks = [
        modules.register_module_forward_pre_hook(watch.enter),
        optimizers.register_optimizer_step_pre_hook(watch.before),
        optimizers.register_optimizer_step_post_hook(watch.after),
    ]
    resize = torch.UntypedStorage.resize_

    def resized(storage, size: int) -> None:
        resize(storage, size)
        trace.resized(storage)

    try:
        listed = (FakeTensor, "tolist", lambda tensor: trace.listed(tensor))
        with trace.here.replaced((torch.UntypedStorage, "resize_", resized), listed):
            yield
    finally:
        for hook in hooks:
            hook.remove()
