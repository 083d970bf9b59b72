"""Reads "cuda" where a script says it, and carries its tensors to the card and back."""

import torch
from torch.autograd.graph import _engine_run_backward as ENGINE
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from ..shards import wraps
from ..streams import DEFAULT
from ..trace import FakeTensor
from ..values import MOST, known
from . import bounds, mixed
from .host import CPU, CUDA, NOT_NUMPY, Where
from .plain import plain_function
from .words import SEVERAL_CARDS, Stop

SHOWN = 2**24  # values that come back from the card, all 1, where there are no more than these
# Methods of tensors, by name: they change the place, or show values.
MOVING, OF_NUMPY = ("to", "cuda", "cpu"), ("numpy", "__array__")
SHOWING = (*OF_NUMPY, "tolist", "__format__")


def is_card(value) -> bool:
    """Whether a script that says this means the card; `Stop` if it means a second one."""
    if not isinstance(value, str | torch.device) or str(value).split(":")[0] != "cuda":
        return False
    if str(value).split(":")[1:] not in ([], ["0"]):
        raise Stop(SEVERAL_CARDS.format(value))
    return True


def as_device(value):
    """What says a device: a number may, too, which without a card is none."""
    return torch.device("cuda", value) if type(value) is int else value


def _ones(tensor, where: Where):
    """The values of a tensor; ones stand in for those that nobody computed, as for `.item()`."""
    with _disable_current_modes():
        if known(tensor) is not None:
            return known(tensor).clone()
        where.unsure = True
        return torch.full(tensor.shape, int(tensor.dtype != torch.bool), dtype=tensor.dtype)


def keep_known(tensor, copy) -> None:
    """Lengths, masks and labels stay known in a copy on the card: models choose by them."""
    if not tensor.is_floating_point() and tensor.numel() <= MOST:
        with _disable_current_modes():
            copy._known = known(tensor)


class Moves(TorchFunctionMode):
    """Reads "cuda" wherever a script says it, and says so where a tensor is asked."""

    def __init__(self, where: Where):
        super().__init__()
        self.where = where
        self.default: torch.device | None = None  # as torch.set_default_device says

    def __exit__(self, *error) -> None:
        """A script that ended while torch had left its modes may have left none to leave."""
        if torch._C._len_torch_function_stack():
            super().__exit__(*error)

    def upload(self, tensor):
        trace = self.where.trace
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta or self.where.on_card(tensor):
            return tensor
        if isinstance(tensor, torch.nn.Parameter):  # an optimizer may have it already: it stays
            del trace.ids[tensor.untyped_storage()._cdata]
            trace.see(tensor, "parameters")
            return tensor
        if isinstance(tensor, FakeTensor) and tensor.requires_grad and torch.is_grad_enabled():
            with self.where.to(True):
                return tensor.clone()
        out = self.where.like(tensor, True).requires_grad_(tensor.requires_grad)
        trace.work.copy(out, trace)
        keep_known(tensor, out)
        return out

    def download(self, tensor):
        if not self.where.on_card(tensor):
            return tensor
        self.where.trace.work.copy(tensor, self.where.trace)
        graph = tensor.requires_grad and torch.is_grad_enabled()
        if not graph and tensor.numel() <= SHOWN:
            return _ones(tensor, self.where)
        with self.where.to(False):
            return tensor.clone() if graph else torch.empty_like(tensor)

    def move(self, func, tensor, args, kwargs):
        """`tensor.to(...)`, `.cuda()` or `.cpu()`."""
        device, waits, change = torch.device(func.__name__.replace("to", "cpu")), True, {}
        if func.__name__ == "cuda":
            is_card(as_device(args[0] if args else kwargs.get("device")))
        elif func.__name__ == "to":
            if args and isinstance(args[0], torch.Tensor):
                args = (CUDA if self.where.on_card(args[0]) else CPU, args[0].dtype, *args[1:])
            asked = {k: as_device(v) for k, v in kwargs.items() if k != "copy"}
            device, dtype, soon, form = torch._C._nn._parse_to(*map(as_device, args), **asked)
            if device is None or device.type == "meta":
                return func(tensor, *args, **kwargs)
            waits, change = not soon, dict(dtype=dtype, memory_format=form)
            change = {k: v for k, v in change.items() if v is not None}
        carry = self.upload if is_card(device) else self.download

        def moved(tensor):
            found = carry(tensor)
            if waits and found is not tensor:  # copy_kernel_cuda (ATen/native/cuda/Copy.cu)
                self.where.trace.streams.host_waits()
            return found

        if not change:
            return moved(tensor)
        if is_card(device) and waits:  # then the host converts
            return moved(func(tensor, **change))
        return func(moved(tensor), **change)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        where, kwargs = self.where, kwargs or {}
        where.go_on()
        unsaid = where.asked is None and not (where.around or self.default)
        if unsaid and plain_function(func, args, kwargs):
            with no_dispatch():
                return func(*args, **kwargs)
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        if name == "_parse_to" or func is torch.device:  # where to go, in words
            return func(*map(as_device, args[:1]), *args[1:], **kwargs)
        if name in ("__get__", "__set__"):
            return self.attribute(func, args, kwargs)
        if name in MOVING and isinstance(first, torch.Tensor):
            return self.move(func, first, args[1:], kwargs)
        if name in SHOWING and isinstance(first, FakeTensor):
            return self.show(func, first, args[1:], kwargs)
        return self.place(func, args, dict(kwargs))

    def attribute(self, func, args, kwargs):
        """An attribute of a tensor is read, or with a second argument written."""
        where, tensor, name = self.where, args[0], func.__self__.__name__
        if name in ("is_cuda", "is_cpu") and where.on_card(tensor):
            return name == "is_cuda"
        if name == "device" and wraps(type(tensor)) and where.on_card(tensor):
            return CUDA
        if name == "grad" and len(args) == 1 and (gradient := func(tensor)) is not None:
            where.trace.see(gradient, "gradients")
        if name == "data" and isinstance(tensor, FakeTensor) and len(args) == 2:
            if not isinstance(args[1], FakeTensor):
                args = (tensor, where.like(args[1], where.on_card(tensor)))
            tensor._known = getattr(args[1], "_known", None)
        return func(*args, **kwargs)

    def show(self, func, tensor, args, kwargs):
        """The values of a fake tensor are asked for, by numpy, in a list or as text."""
        if func.__name__ in OF_NUMPY and self.where.on_card(tensor):
            raise TypeError(NOT_NUMPY)
        self.where.trace.work.wait(self.where.trace)
        return func(_ones(tensor, self.where), *args, **kwargs)

    def place(self, func, args, kwargs):
        """Any other function: what it makes lies where its arguments say."""
        where, asked = self.where, self.where.asked
        if kwargs.get("pin_memory") is True:  # of a factory; the host has no other memory here
            kwargs["pin_memory"] = False
        if self.default and kwargs.get("device") is None and func in _device_constructors():
            kwargs["device"] = self.default
        if "device" in kwargs:
            kwargs["device"] = as_device(kwargs["device"])
        card = any(map(is_card, (*args, *kwargs.values())))
        if card:
            args = tuple(CPU if is_card(a) else a for a in args)
            kwargs = {k: CPU if is_card(v) else v for k, v in kwargs.items()}
        away = not card and str(kwargs.get("device")) == "cpu" and where.on_card(args)
        if card or away:
            asked = card
        if "generator" in kwargs:
            there = where.on_card(args, kwargs) if asked is None else asked
            mixed.refuse_generator(kwargs, there)
        if func is torch.nn.functional.one_hot and where.on_card(args):
            bounds.check(where, func, args, kwargs, True)
        with where.to(asked, () if away else (args, kwargs)):
            out = func(*args, **kwargs)
        if where.trace.streams.now != DEFAULT:
            where.trace.streams.remember(out)
        return tree_map(self.upload, out) if card else out


IN_TORCH = [f.__code__ for f in (Moves.__torch_function__, Where.__torch_dispatch__, ENGINE)]


def in_torch(frame) -> bool:
    """Whether torch's C++ stands between the script and this frame: `Where.go_on` stops it."""
    while frame is not None and frame.f_code not in IN_TORCH:
        frame = frame.f_back
    return frame is not None
