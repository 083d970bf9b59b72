"""Indices and labels that are out of range, where their numbers are known.

A card stops at them with an assertion in a kernel (CUDA_KERNEL_ASSERT), and does nothing more for
the process. Numbers are known if they come from the host, or were made from such (`values`). Where
a value was guessed before, they may follow from the guess: then it is said, and the run goes on.
Kernels of `ctc_loss` and of Liger's losses do not look at labels, and read other memory.
"""

import sys
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
# Of kernels without an assertion (aten/src/ATen/native/cuda/LossCTC.cu, liger_kernel/ops).
BEYOND = "{},{}: this kernel does not look, and a card computes there with other memory"
PERHAPS = "It {}, unless the number follows from a value that was guessed."
# As torch says it of the host (aten/src/ATen/native).
ON_HOST = {
    INDEX: "index {} is out of bounds for dimension with size {}",
    LABEL: "Target {} is out of bounds (of {} classes).",
}
# Namespaces whose operations say what they write; `group` stands in for the second and third.
TOLD = ("aten", "c10d", "_c10d_functional")
MASKS = (torch.bool, torch.uint8)
LIGERS = "liger_cross_entropy_kernel"  # of its losses, the fused one with the output layer too


class Bounds(NamedTuple):
    """What an operation takes as indices: `least` to `size` - 1 are there, and `ignored`."""

    indices: torch.Tensor
    size: int
    least: int = 0
    words: str = INDEX
    ignored: int | None = None
    ends: str = ASSERTS  # what a card does where one is not there


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


def _written(scores, labels, lengths, label_lengths, *_) -> Iterator[Bounds]:
    """Of a row of labels only those within its length are read; one after the other, all are."""
    if labels.dim() == 2:
        if isinstance(label_lengths, torch.Tensor):
            label_lengths = _values(label_lengths)
        if label_lengths is None or _values(labels) is None:
            return
        with no_dispatch():
            ends = torch.as_tensor(label_lengths).reshape(-1, 1)
            labels = _values(labels)[torch.arange(labels.shape[1]) < ends]
    yield Bounds(labels, scores.shape[-1], 0, LABEL, ends=BEYOND)


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
    _written: (aten._ctc_loss, aten.ctc_loss),
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
        _look(where, bounds, card)


def launches(where) -> Iterator[tuple]:
    """(owner, name, value): a kernel of Triton's that is given labels is looked at first."""
    if "triton.runtime.jit" not in sys.modules:  # which a run with Triton has loaded
        return
    kind = sys.modules["triton.runtime.jit"].JITFunction
    leave_out = kind.run

    def run(kernel, *args, **options):
        if kernel.fn.__name__ == LIGERS:
            given = dict(zip(kernel.arg_names, args, strict=False)) | options
            labels, classes, ignored = (given[name] for name in ("Y_ptr", "n_cols", "ignore_index"))
            _look(where, Bounds(labels, classes, 0, LABEL, ignored, BEYOND), True)
        return leave_out(kernel, *args, **options)

    yield kind, "run", run


def _look(where, bounds: Bounds, card: bool) -> None:
    wrong = _outside(bounds)
    if wrong is not None:
        _say(where, bounds, wrong, card)


def _values(tensor: torch.Tensor) -> torch.Tensor | None:
    """The numbers of a tensor, where they are known."""
    return getattr(tensor, "_known", None) if isinstance(tensor, FakeTensor) else tensor


def _outside(bounds: Bounds) -> int | None:
    """An index that is not there."""
    values = _values(bounds.indices)
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
    if not card:  # where the host does not look itself, nothing is computed from a guess
        if guessed == (bounds.ends is BEYOND):
            raise IndexError(ON_HOST[bounds.words].format(wrong, bounds.size))
        return
    place = stood(traceback.extract_stack())
    said = bounds.words.format(wrong, bounds.size), f" in {place}" if place else ""
    if not guessed:
        where.stop(bounds.ends.format(*said))
    where.note(PERHAPS.format(bounds.ends.format(*said)))


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
