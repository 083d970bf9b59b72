"""What a healthy run's values answer: all numbers are finite, and a GradScaler's scale stands.

Values of the card are not known, but a script that asks whether its loss is finite asks for an
error, not for a number. Such an answer is kept as the known values of a tensor (`values.py`), so
that whatever follows from it, `all`, `not`, `sum` or an index, follows from it here, too.
"""

import math

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from ..values import MOST, known

aten, UPDATE_SCALE = torch.ops.aten, torch._amp_update_scale_
FINITE = {  # operations that ask for nothing else, as a mode sees them
    aten.isfinite.default: True,
    aten.isnan.default: False,
    aten.isinf.default: False,
    aten.isposinf.default: False,
    aten.isneginf.default: False,
}
WITH_ITSELF = {aten.eq.Tensor: True, aten.ne.Tensor: False}
# Comparisons with a number: what they say of a finite one and infinity, and of one and nan.
WITH_NUMBER = {aten.eq.Scalar: False, aten.ne.Scalar: True}
WITH_INFINITY = {
    aten.lt.Scalar: lambda number: number > 0,
    aten.le.Scalar: lambda number: number > 0,
    aten.gt.Scalar: lambda number: number < 0,
    aten.ge.Scalar: lambda number: number < 0,
}
# Of large answers values are not kept one by one (`MOST`): these make one out of others.
EACH = (aten.mul.Tensor, aten.logical_not.default, aten.bitwise_not.default)
EACH += (aten.logical_and.default, aten.logical_or.default)
EACH += (aten.bitwise_and.Tensor, aten.bitwise_or.Tensor)


def answer(func, args: tuple, out) -> None:
    """Give the result of an operation the values that it has where all numbers are finite."""
    if not isinstance(out, FakeTensor) or out.dtype != torch.bool or known(out) is not None:
        return
    value = _asked(func, args)
    if value is None and out.numel() > MOST:
        value = _combined(func, args)
    if value is not None:
        with _disable_current_modes():  # the values are real; large ones take one byte
            small = out.numel() <= MOST
            one = torch.tensor(value)
            out._known = torch.full(out.shape, value) if small else one.expand(out.shape)


def _asked(func, args: tuple) -> bool | None:
    """The answer, if an operation asks whether numbers are finite."""
    if func in FINITE:
        return FINITE[func]
    if func in WITH_ITSELF and args[0] is args[1]:
        return WITH_ITSELF[func]
    number = args[1] if len(args) > 1 else None
    if not isinstance(number, float) or math.isfinite(number):
        return None
    if func in WITH_NUMBER:
        return WITH_NUMBER[func]
    return WITH_INFINITY[func](number) if func in WITH_INFINITY else None


def _combined(func, args: tuple) -> bool | None:
    """What follows from answers that are the same everywhere."""
    view = func.is_view or func is aten.clone.default
    if not view and func not in EACH:
        return None
    values = [known(t) for t in (args[:1] if view else args)]
    if any(v is None or any(v.stride()) for v in values):
        return None
    with _disable_current_modes():
        ones = [v[(0,) * v.dim()] for v in values]
        return (ones[0] if view else func(*ones)).item()


def no_end(func, args: tuple, kwargs: dict, out, ends: set[int]) -> None:
    """The same for an operation that looks for tokens of `ends`: it finds none."""
    if not ends or func not in (*WITH_NUMBER, aten.isin.Tensor_Tensor):
        return
    if args[0].is_floating_point() or known(args[0]) is not None or known(out) is not None:
        return
    with _disable_current_modes():
        sought = known(args[1]) if isinstance(args[1], torch.Tensor) else torch.tensor([args[1]])
        if sought is not None and ends.issuperset(sought.flatten().tolist()):
            value = WITH_NUMBER.get(func, kwargs.get("invert", False))
            out._known = torch.full(out.shape, value)


def scaled(scale, tracker, found, *rest):
    """`torch._amp_update_scale_` where no gradient is infinite; what is known stays known."""
    values = [known(t) if isinstance(t, FakeTensor) else None for t in (scale, tracker)]
    out = UPDATE_SCALE(scale, tracker, found, *rest)
    if all(v is not None for v in values):
        with _disable_current_modes():
            UPDATE_SCALE(*values, torch.zeros(()), *rest)
        scale._known, tracker._known = values
    return out
