"""The values of small tensors that a run makes from numbers alone: lengths, masks, positions.

Models choose by them: which tokens stand for a picture, whether a mask masks anything, how many
labels there are. Fake tensors have none, so each keeps its values beside it, until weights come in.
"""

from contextlib import suppress

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from .versions import Versions

aten = torch.ops.aten
TYPED = (aten.addmm.dtype, aten.addmm.dtype_out, aten.baddbmm.dtype, aten.baddbmm.dtype_out)
TYPED_WORKS = Versions().since(2, 12)  # as it is installed, whatever is simulated
MOST = 2**20  # elements: of a mask [batch, 1, length, length], say
CHOICES = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
MASKED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)
# Results whose values, or number of them, do not follow from the values of an argument of floats.
LIKE = (aten.ones_like.default, aten.zeros_like.default, aten.full_like.default)
LIKE += (aten.new_ones.default, aten.new_zeros.default, aten.new_full.default)
CTC = aten._ctc_loss.Tensor
PICKS = (aten.masked_select.default, CTC, *LIKE)
WANTED = (aten.rand.default, aten.full.default, aten.ones.default)  # masks; others are weights


def known(tensor) -> torch.Tensor | None:
    """The values of a tensor; None if nobody knows them."""
    return getattr(tensor, "_known", None) if isinstance(tensor, FakeTensor) else tensor.clone()


def read(tensor, func):
    """The values of an argument, or what serves as well."""
    if known(tensor) is not None:
        return known(tensor)
    if tensor.is_floating_point() and func in PICKS:
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    if tensor.dim() == 1 and func is aten.nonzero.default:  # of pictures, labels, experts: all
        return torch.ones(tensor.shape)
    raise LookupError


def run(func, args, kwargs):
    """An operation on fake tensors.

    To wait for what was sent makes nothing new (`wait_tensor` in c10d/Functional.cpp of torch's
    C++), though the shape function makes another tensor (_functional_collectives.py).
    torch 2.11 cannot do a product whose type is told: its decomposition takes that type for a
    factor (mended in 2.12). There the result is made, and nothing else.
    """
    if func.namespace == "_c10d_functional" and func.__name__ == "wait_tensor.default":
        return args[0]
    if TYPED_WORKS or func not in TYPED:
        return func(*args, **(kwargs or {}))
    if "out" in (kwargs or {}):
        return kwargs["out"]
    _, left, right, dtype = args
    return left.new_empty((*left.shape[:-1], right.shape[-1]), dtype=dtype)


def compute(func, args, kwargs):
    """What an operation really returns; None if it asks for values that nobody knows."""
    with _disable_current_modes(), suppress(RuntimeError, LookupError):
        args, kwargs = tree_map_only(torch.Tensor, lambda t: read(t, func), (args, kwargs or {}))
        if func is CTC:  # it does not look at labels, and reads other memory with wrong ones
            args = args[0], args[1].clamp(0, args[0].shape[-1] - 1), *args[2:]
        return func(*args, **kwargs)
    return None


def keep(func, args, kwargs, leaves: list) -> None:
    """Give the results of an operation their values, or take them away."""
    if func not in LIKE and isinstance(next(iter(args), None), FakeTensor):
        if known(args[0]) is None:
            return  # most operations
    elif func in LIKE or not any(isinstance(t, torch.Tensor) for t in tree_leaves(args)):
        whole = not any(t.dim() and t.dtype.is_floating_point for t in leaves)
        if "empty" in func.overloadpacket.__name__ or not whole and func not in WANTED:
            return
    listed = func.overloadpacket.__name__.startswith(("_foreach", "_fused", "_amp"))
    changed = [t for t in tree_leaves(args[:1]) if isinstance(t, FakeTensor)] if listed else leaves
    small = not listed and max((t.numel() for t in leaves), default=0) <= MOST
    values = tree_leaves(compute(func, args, kwargs)) if small and leaves else []
    alike = len(values) == len(changed)  # on a CPU some kernels return less
    for fake, value in zip(changed, values if alike else [None] * len(changed), strict=True):
        fake._known = value
