"""What concerns real tensors of the host alone, told quickly: it needs none of the modes.

A script that reads its data one sample after another does it a hundred thousand times.
"""

import numpy as np
import torch
from torch._C._functorch import peek_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

# What has no place of its own: with these and real tensors alone a function stays on the host.
PLAIN = {torch.Tensor, np.ndarray, np.memmap, int, float, bool, type(None), slice, type(...)}
PLAIN |= {torch.dtype, torch.Size}
IN_OPERATIONS = PLAIN | {torch.device, torch.layout, torch.memory_format, torch.Generator, str}
IN_C = {type(torch.add), type(torch.Tensor.add)}
IN_C |= {type(torch.Tensor.__getitem__), type(torch.Tensor.shape.__get__)}
# Functions that place real tensors, too, and those that make large ones without values.
PLACES = {torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu, torch.empty, torch.empty_strided}
PLACES |= {torch.Tensor.grad.__get__, torch.Tensor.data.__get__, torch.Tensor.data.__set__}
PLACES.add(torch._C._nn._parse_to)  # a place in words, or as a number
SAY = {"device", "pin_memory"}  # arguments that say where
WITHOUT_VALUES = {*map(torch.ops.aten.empty.__getattr__, torch.ops.aten.empty.overloads())}
WITHOUT_VALUES |= {torch.ops.aten.empty_strided.default}


def tensors(values) -> list[torch.Tensor]:
    """The tensors among these, which may be in lists, tuples and dictionaries, or in whatever torch
    can flatten: it takes ten times as long for the few arguments of an operation."""
    found: list[torch.Tensor] = []
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            found.append(value)
        elif kind is tuple or kind is list:
            found += tensors(value)
        elif kind is dict:
            found += tensors(value.values())
        elif isinstance(value, torch.Tensor):
            found.append(value)
        elif kind not in IN_OPERATIONS:
            found += (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return found


def plain(values, kinds: set[type] = PLAIN) -> bool:
    """Whether all of these, which may be in lists, are of these kinds."""
    for value in values:
        kind = type(value)
        if kind not in kinds and not (kind in (list, tuple) and plain(value, kinds)):
            return False
    return True


def plain_function(func, args: tuple, kwargs: dict) -> bool:
    """Whether a function of torch works on the host alone, where nobody said otherwise: it is one
    of C (Python's may have a model behind them), and is told no place. Within vmap a tensor that
    seems real may stand for a fake one."""
    if type(func) not in IN_C or func in PLACES or kwargs.keys() & SAY:
        return False
    if peek_interpreter_stack() is not None:
        return False
    return plain(args) and plain(kwargs.values())


def plain_operation(func, args: tuple, kwargs: dict) -> bool:
    """The same of an operation, as a dispatch mode sees it."""
    if func in WITHOUT_VALUES:
        return False
    return plain(args, IN_OPERATIONS) and plain(kwargs.values(), IN_OPERATIONS)
