"""What autograd's engine and formulas do in place with all but fake tensors."""

import functools
import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

# Formulas of gradients write into fresh zeros, but into a copy of them where tensors are fake
# (areAnyTensorSubclassLike in torch/csrc/autograd/FunctionsManual.cpp).
INTO_ZEROS = {
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.index_put.default: aten.index_put_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.masked_scatter.default: aten.masked_scatter_.default,
}
ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)


def _holders(tensor) -> tuple[int, int]:
    """How many hold a tensor, and how many its storage."""
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@functools.cache
def alone() -> tuple[int, int]:
    """The holders of a gradient that nobody but autograd's engine has, as a dispatch sees them.

    An experiment finds them: two gradients of `x` are added up, and the first is of that kind.
    """
    seen = []

    class Adds(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is aten.add.Tensor:
                seen.append(_holders(args[0]))
            return func(*args, **(kwargs or {}))

    with torch.enable_grad(), Adds():
        x = torch.zeros(2, requires_grad=True) * 2
        (x * x.sigmoid()).sum().backward()
    if not seen:
        raise RuntimeError(
            f"torch {torch.__version__} adds gradients in a way that is not seen here: take a "
            "version of constraints.txt"
        )
    return seen[0]


def in_place(func, args, zeros: int | None):
    """What the engine and formulas of gradients do in place with all but fake tensors.

    A hack: who calls a dispatch is read from Python's frames. The engine's own additions have
    `torch.autograd.graph`, from which backward was started, right below this one; a backward
    written in Python has its own. Where torch puts a frame of another module between, or moves
    `backward`, nothing is done in place, and gradients that are added up are counted twice:
    tests/test_real_runs.py holds it to what a real run needs. `alone` says which gradients
    nobody else holds, by torch's counts of references.

    Args:
        func: the operation, as the dispatch is asked for it.
        args: what it is given.
        zeros: the `id` of the last operation's result, if that was zeros.

    Returns:
        The operation in place that it stands for, or None.
    """
    caller = sys._getframe(2)
    while caller.f_globals.get("__name__") in ("torch._compile", "torch._dynamo.eval_frame"):
        caller = caller.f_back  # around every dispatch to Python
    if caller.f_globals.get("__name__") != "torch.autograd.graph":
        return None  # a backward written in Python, or by torch's compiler
    if func is aten.add.Tensor:  # two gradients of one tensor (autograd/input_buffer.cpp)
        old = args[0]
        nobody_else = old.dtype == torch.result_type(*args) and _holders(old) == alone()
        return aten.add_.Tensor if nobody_else else None
    return INTO_ZEROS.get(func) if id(args[0]) == zeros else None
