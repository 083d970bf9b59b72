"""Indices and labels that are out of range, where their numbers are known.

A card stops at them with an assertion in a kernel (CUDA_KERNEL_ASSERT), and does nothing more for
the process. Numbers are known if they come from the host, or were made from such (`values`). Where
a value was guessed before, they may follow from the guess: then it is said, and the run goes on.
"""

import traceback
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

from ..operations import in_backward
from .words import stood

aten = torch.ops.aten
INDEX = "uses index {} of a dimension with {} entries"
LABEL = "uses label {} where there are {} classes"
ASSERTS = "{},{}: a card stops there with a device-side assert"
PERHAPS = (
    "It {},{}: a card stops there with a device-side assert, unless the number follows from a "
    "value that was guessed."
)
# As torch says it of the host (aten/src/ATen/native).
ON_HOST = {
    INDEX: "index {} is out of bounds for dimension with size {}",
    LABEL: "Target {} is out of bounds (of {} classes).",
}
# Namespaces whose operations say what they write; `group` stands in for the second and third.
TOLD = ("aten", "c10d", "_c10d_functional")
MASKS = (torch.bool, torch.uint8)


class Bounds(NamedTuple):
    """What an operation takes as indices: `least` to `size` - 1 are there, and `ignored`."""

    indices: torch.Tensor
    size: int
    least: int = 0
    words: str = INDEX
    ignored: int | None = None


def _rows(table, indices, *_) -> Iterator[Bounds]:
    yield Bounds(indices, table.shape[0])


def _along(source, dim, indices, *_) -> Iterator[Bounds]:
    yield Bounds(indices, source.shape[dim] if source.dim() else 1)


def _filled(source, dim, indices, *_) -> Iterator[Bounds]:
    """Of this one negative indices count from the end."""
    size = source.shape[dim] if source.dim() else 1
    yield Bounds(indices, size, -size)


def _flat(source, indices, *_) -> Iterator[Bounds]:
    yield Bounds(indices, source.numel(), -source.numel())


def _listed(source, indices, *_) -> Iterator[Bounds]:
    """What stands in brackets: negative ones count from the end, masks take their dimensions."""
    at = 0
    for index in indices:
        mask = index is not None and index.dtype in MASKS
        if index is not None and not mask and at < source.dim():
            yield Bounds(index, source.shape[at], -source.shape[at])
        at += index.dim() if mask else 1


def _labels(scores, labels, weight=None, reduction=1, ignored=-100, *_) -> Iterator[Bounds]:
    if not labels.is_floating_point():  # else they are probabilities
        classes = scores.shape[0 if scores.dim() == 1 else 1]
        yield Bounds(labels, classes, 0, LABEL, ignored)


def _one_hot(labels, num_classes=-1) -> Iterator[Bounds]:
    if num_classes > 0:
        yield Bounds(labels, num_classes, 0, LABEL)


RULES = {
    _rows: (aten.embedding, aten._embedding_bag, aten._embedding_bag_forward_only),
    _along: (aten.index_select, aten.gather, aten.scatter, aten.scatter_, aten.scatter_add)
    + (aten.scatter_add_, aten.scatter_reduce, aten.scatter_reduce_, aten.index_add)
    + (aten.index_add_, aten.index_copy, aten.index_copy_),
    _filled: (aten.index_fill, aten.index_fill_),
    _flat: (aten.take, aten.put, aten.put_),
    _listed: (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_),
    # The composite ones come whole in inference mode.
    _labels: (aten.nll_loss_forward, aten.nll_loss2d_forward, aten.nll_loss, aten.nll_loss2d)
    + (aten.nll_loss_nd, aten.cross_entropy_loss),
    # Of a fake tensor it compares, where a card scatters: it is seen as a function only.
    _one_hot: (torch.nn.functional.one_hot,),
}
RULES = {operation: rule for rule, operations in RULES.items() for operation in operations}


def check(where, func, args: tuple, kwargs: dict, card: bool) -> None:
    """Stop the script, or on the host raise an IndexError, if an index is out of range; of an
    operation's packet, or of a function."""
    rule = RULES.get(func)
    if rule is None or in_backward():
        return
    for bounds in rule(*args, **kwargs):
        wrong = _outside(bounds)
        if wrong is not None:
            _say(where, bounds, wrong, card)


def _outside(bounds: Bounds) -> int | None:
    """An index that is not there."""
    values = bounds.indices
    values = getattr(values, "_known", None) if isinstance(values, FakeTensor) else values
    if values is None or values.is_meta or not values.numel():
        return None
    with no_dispatch():
        if bounds.ignored is not None:
            values = values[values != bounds.ignored]
        if not values.numel():
            return None
        least, most = (int(value) for value in torch.aminmax(values))
    if most >= bounds.size:
        return most
    return least if least < bounds.least else None


def _say(where, bounds: Bounds, wrong: int, card: bool) -> None:
    guessed = where.unsure or where.trace.guessed
    if not card:
        if not guessed:
            raise IndexError(ON_HOST[bounds.words].format(wrong, bounds.size))
        return
    place = stood(traceback.extract_stack())
    said = bounds.words.format(wrong, bounds.size), f" in {place}" if place else ""
    if not guessed:
        where.stop(ASSERTS.format(*said))
    where.note(PERHAPS.format(*said))


def values_before(func, written, fakes: list) -> torch.Tensor | None:
    """Values that an operation which writes may make untrue here."""
    if func.namespace in TOLD:
        return getattr(written, "_known", None)
    known = (tensor._known for tensor in fakes if hasattr(tensor, "_known"))
    return next((values for values in known if values is not None), None)


def blurred(func, written, before: torch.Tensor) -> bool:
    """Whether values that are known may be wrong now: what was written to lost those that it had
    `before`, and other tensors still show them, as views do. Of a library's own operation it is
    not known what it writes."""
    if func.namespace not in TOLD:
        return True
    if written._known is not None:
        return False
    return torch._C._storage_Use_Count(before.untyped_storage()._cdata) > _alone()


def _alone() -> int:
    """What torch counts for a storage that one tensor has, asked as above."""
    one = torch.empty(0)
    return torch._C._storage_Use_Count(one.untyped_storage()._cdata)
