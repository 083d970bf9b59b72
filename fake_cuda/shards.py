"""Tensors made of others, as DTensor's shards are: what they hold is on the card, not they."""

from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch.utils._python_dispatch import _disable_current_modes


@cache
def wraps(kind: type) -> bool:
    """Whether tensors of a type hold others, on which their operations work.

    To an operation on one of them a mode returns NotImplemented: then the type takes its turn, and
    the mode sees what is done to what it holds (as MemTracker in torch/distributed/_tools).
    """
    return hasattr(kind, "__tensor_flatten__")


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that this one holds: itself, if it holds none."""
    if not wraps(type(tensor)):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [one for name in names for one in parts(getattr(tensor, name))]


def _uncounted(infer: Callable, where) -> Callable:
    def alone(*args):
        before, where.busy = where.busy, True  # kernels' shape functions ask where tensors lie
        try:
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                return infer(*args)
        finally:
            where.busy = before

    return alone


def _whole(spec) -> torch.Tensor:
    """A tensor of the whole size; where it would lie, does not change its shape."""
    shape, stride, dtype = spec.tensor_meta
    return torch.empty_strided(shape, stride, dtype=dtype, device="cpu")


def of_dtensor(where) -> Iterator[tuple[object, str, Callable]]:
    """(owner, name, function) of what DTensor does beside its work, in a script with this `Where`.

    It finds the shape of a result by the operation, run on fake tensors of the whole size: they are
    on no card (_sharding_prop.py in torch/distributed/tensor). And it sets the card's generator, so
    that each rank draws other numbers (_random.py): here nobody draws on the card.
    """
    from torch.distributed.tensor import _dispatch, _op_schema, _sharding_prop  # takes a second

    infers, name = _sharding_prop.ShardingPropagator, "_propagate_tensor_meta_non_cached"
    yield infers, name, _uncounted(getattr(infers, name), where)
    yield _op_schema, "_rebuild_tensor_from_dtensor_meta", _whole
    yield _dispatch, "is_rng_supported_mesh", lambda mesh: False
