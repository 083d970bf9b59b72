"""What a caller has, made again inside of a simulation: a model, a batch, an optimizer.

As `.to("cuda")` does, each tensor gets memory of its own; what is one tensor stays one.
"""

import copy
import inspect
from collections.abc import Callable, Mapping

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from .trace import Trace
from .values import MOST

PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)
HOST = ("cpu", "meta")
BY_FUNCTION = "pass a function that builds it"


class Refused(ValueError):
    """The model, its batch or its loss do not go together. Its text is one sentence."""


def blank(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of the same type and order of dimensions."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda k: (-strides[k], k))
    return torch.empty_permuted(shape, order, dtype=tensor.dtype)


def tensors_of(model: torch.nn.Module) -> dict[int, torch.Tensor]:
    """The tensors of a model by their id, also those that no module registered.

    Raises:
        Refused: one lies on a card, or is of a kind of which only its maker knows the memory.
    """
    leaves = [leaf for module in model.modules() for leaf in tree_leaves(vars(module))]
    found = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
    for tensor in found.values():
        if type(tensor) not in PLAIN or tensor.layout is not torch.strided:
            kind = f"{type(tensor).__name__} ({tensor.layout})"
            raise Refused(f"the model holds a tensor of the kind {kind}: {BY_FUNCTION}")
        if tensor.device.type not in HOST:
            where = f"the model already lives on {tensor.device}"
            raise Refused(f"{where}: give it on the CPU or the meta device, or {BY_FUNCTION}")
    return found


def twin(model: torch.nn.Module) -> tuple[torch.nn.Module, dict[int, torch.nn.Parameter]]:
    """The same model with tensors of this simulation; its parameters by the id of the originals."""
    memo: dict[int, object] = {}
    for key, tensor in tensors_of(model).items():
        new = blank(tensor, tensor.shape)
        if isinstance(tensor, torch.nn.Parameter):
            new = torch.nn.Parameter(new, tensor.requires_grad)
        elif isinstance(tensor, torch.nn.Buffer):
            new = torch.nn.Buffer(new)
        else:
            _tell_values(new, tensor, len(tensor) if tensor.dim() else 0, 0)
        memo[key] = new
    parameters = {id(p): memo[id(p)] for p in model.parameters()}
    try:
        return copy.deepcopy(model, memo), parameters
    except Exception as error:  # of whatever a module keeps beside its tensors
        raise Refused(f"the model cannot be copied ({first_line(error)}): {BY_FUNCTION}") from error


def _tell_values(new: torch.Tensor, old: torch.Tensor, size: int, dimension: int) -> None:
    """Give a fake tensor the values of a small one of whole numbers, by which models choose."""
    real = type(old) in PLAIN and not isinstance(old, FakeTensor) and old.device.type == "cpu"
    if real and not old.dtype.is_floating_point and new.numel() <= MOST:
        with _disable_current_modes():
            values = old.detach().clone()
            if old.dim():
                rows = torch.arange(size) % max(1, old.shape[dimension])
                values = values.index_select(dimension, rows)
            new._known = values


def leaves_of(batch) -> list[torch.Tensor]:
    """The tensors of a batch."""
    parts = dict(batch) if isinstance(batch, Mapping) else batch
    return [leaf for leaf in tree_leaves(parts) if isinstance(leaf, torch.Tensor)]


def samples_of(batch, dimension: int) -> int | None:
    """How many samples a batch has: the size of its first tensor in that dimension."""
    sizes = (leaf.shape[dimension] for leaf in leaves_of(batch) if leaf.dim() > dimension)
    return next(sizes, None)


def batch_of(batch, samples: int, dimension: int):
    """The batch with tensors of this simulation, and so many samples.

    They count as activations: what is made before the first forward pass would be parameters.
    """
    given = samples_of(batch, dimension)
    trace = next(m for m in _get_current_dispatch_mode_stack() if isinstance(m, Trace))

    def part(value):
        if isinstance(value, torch.Tensor):
            shape = list(value.shape)
            if value.dim() > dimension and shape[dimension] == given:
                shape[dimension] = samples
            new = blank(value, tuple(shape))
            trace.see(new, "activations")
            along = dimension if value.dim() > dimension else 0
            _tell_values(new, value, shape[along] if shape else 0, along)
            return new
        if isinstance(value, Mapping):
            return {key: part(one) for key, one in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(part, value))
        return type(value)(map(part, value)) if isinstance(value, list | tuple) else value

    return part(batch)


def optimizer_of(
    optimizer: Callable | torch.optim.Optimizer,
    model: torch.nn.Module,
    parameters: dict[int, torch.nn.Parameter],
) -> torch.optim.Optimizer:
    """The optimizer of the model: made by a class or a function, or one like an instance.

    Raises:
        Refused: an instance has parameters that are not this model's.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        made = optimizer(model.parameters())
        if not hasattr(made, "step"):
            raise TypeError(f"{type(made).__name__} is no optimizer")
        return made
    groups = []
    for group in optimizer.param_groups:
        if any(id(p) not in parameters for p in group["params"]):
            raise Refused(
                "the optimizer was made for another model: pass its class, such as "
                f"torch.optim.{type(optimizer).__name__}, or one of this model's parameters"
            )
        groups.append(group | {"params": [parameters[id(p)] for p in group["params"]]})
    takes = inspect.signature(type(optimizer)).parameters
    return type(optimizer)(groups, **{k: v for k, v in optimizer.defaults.items() if k in takes})


def first_line(error: BaseException) -> str:
    """What an error says, without its explanations."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".:") if lines else type(error).__name__
