"""What a script puts on the card is fake, what it keeps on the host stays as it is."""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.autograd.graph import _engine_run_backward as ENGINE
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ..operations import in_backward
from ..trace import HOST, FakeTensor, Trace
from ..values import MOST, known
from . import guesses
from .words import SEVERAL_CARDS, Stop, TimeOver

CUDA, CPU, DEVICE = torch.device("cuda", 0), torch.device("cpu"), FakeTensor.device.fget
UPDATES = 2  # with the second, gradients and states stand as in all that follow
SMALL = 2**12  # values: uninitialised tensors up to this size are real, they may be drawn into
SHOWN = 2**24  # values that come back from the card, all 1, where there are no more than these
# torch/csrc/utils/tensor_numpy.cpp
NOT_NUMPY = (
    "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
    "memory first."
)


def _is_card(value) -> bool:
    if not isinstance(value, str | torch.device) or str(value).split(":")[0] != "cuda":
        return False
    if str(value).split(":")[1:] not in ([], ["0"]):
        raise Stop(SEVERAL_CARDS.format(value))
    return True


def _makes(func) -> bool:
    """Whether a function makes tensors where torch.set_default_device says."""
    return func in _device_constructors() or getattr(func, "__name__", "") == "tensor"


def _number(value):
    """A device may be a number, which without a card is none."""
    return torch.device("cuda", value) if type(value) is int else value


class Where(TorchDispatchMode):
    """Keeps apart what is on the host, real or not, and what is on the card, which is fake."""

    def __init__(self, trace: Trace, taken: Counter, memory):
        super().__init__()
        self.trace, self.taken, self.by_hand = trace, taken, 0  # steps of optimizers; without one
        self.memory = memory  # of the card, which may run out
        self.asked: bool | None = None  # whether what is made now goes to the card, where one said
        self.around: tuple = ()  # arguments of the function that makes it: their place counts too
        self.buckets = False  # whether DistributedDataParallel makes those of its gradients now
        self.falling = None  # values for an optimizer that evaluates until they stand
        self.ends: set[int] = set()  # tokens that end a text, of which none was generated
        self.busy = False  # with an operation: torch itself may ask for devices, not the script
        self.over = False  # whether the script's seconds are over

    def go_on(self) -> None:
        """Where time may be over: C++ that asks for a device (prim.device) aborts at exceptions."""
        if self.over:
            raise TimeOver

    def on_card(self, *values) -> bool:
        """Whether one of these tensors is on the card."""
        for tensor in tree_leaves(values):
            if isinstance(tensor, FakeTensor) and tensor.fake_device.type != "meta":
                if tensor.layout != torch.strided:
                    return True
                number = self.trace.ids.get(tensor.untyped_storage()._cdata)
                if number is None or self.trace.kind[number] != HOST:
                    return True
        return False

    @contextmanager
    def to(self, card: bool | None, around: tuple = ()) -> Iterator[None]:
        before = self.asked, self.around
        self.asked, self.around = card, around
        try:
            yield
        finally:
            self.asked, self.around = before

    def like(self, tensor, card: bool):
        """A fake tensor of the same shape, on the card or on the host."""
        with self.to(card), torch.no_grad():
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "aten":
            self.go_on()
        kwargs, card, trace = kwargs or {}, self.asked, self.trace
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        fakes = [t for t in tensors if isinstance(t, FakeTensor)]
        if card is None:
            card = self.on_card(fakes if tensors else self.around)
            card |= self.buckets and not tensors and _is_float(**kwargs)
        if not (fakes or card or self.asked is False or _is_weight(func, args, **kwargs)):
            with no_dispatch():  # real tensors alone; much quicker than to take the modes off
                return func(*args, **kwargs)
        if self.falling and (number := self.falling.number(func, args)) is not None:
            return number
        written = args[0] if args and func._schema.is_mutable else None
        if fakes and isinstance(written, torch.Tensor) and not isinstance(written, FakeTensor):
            return written  # values of the card are not known
        if trace.phases[-1] == "backward" and not (self.taken or in_backward()):
            leaves = [t for t in tree_leaves(written) if isinstance(t, FakeTensor)]
            ids = [trace.ids.get(t.untyped_storage()._cdata) for t in leaves]
            if any(i is not None and trace.kind[i] == "parameters" for i in ids):
                if self.by_hand == UPDATES:
                    raise Stop
                self.by_hand += 1  # a step without an optimizer
                trace.phase("between steps")
        before, trace.on_host, self.busy = trace.on_host, not card, True
        try:
            out = func(*args, **kwargs)
        finally:
            trace.on_host, self.busy = before, False
        guesses.answer(func, args, out)
        guesses.no_end(func, args, kwargs, out, self.ends)
        if self.falling:
            self.falling.answer(func, args, out)
        if self.memory.limit is not None and card:
            self.memory.now()
        return out

    def device(self, tensor) -> torch.device:
        """What a fake tensor says to a script, and what to torch."""
        asked_by_script = torch._C._len_torch_function_stack() and not self.busy
        return CUDA if asked_by_script and self.on_card(tensor) else DEVICE(tensor)


def _is_float(dtype=None, **_) -> bool:
    return (dtype or torch.get_default_dtype()).is_floating_point


def _is_weight(func, args, dtype=None, device=None, **_) -> bool:
    """Whether it makes a large tensor without values, as layers do to fill it: nobody reads it."""
    if func.overloadpacket.__name__ not in ("empty", "empty_strided") or str(device) == "meta":
        return False
    return _is_float(dtype) and math.prod(args[0]) > SMALL


def _ones(tensor):
    """The values of a tensor; ones stand in for those that nobody computed, as for `.item()`."""
    with _disable_current_modes():
        if known(tensor) is not None:
            return known(tensor).clone()
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
            return _ones(tensor)
        with self.where.to(False):
            return tensor.clone() if graph else torch.empty_like(tensor)

    def move(self, func, tensor, args, kwargs):
        """`tensor.to(...)`, `.cuda()` or `.cpu()`."""
        device, waits, change = torch.device(func.__name__.replace("to", "cpu")), True, {}
        if func.__name__ == "cuda":
            _is_card(_number(args[0] if args else kwargs.get("device")))
        elif func.__name__ == "to":
            if args and isinstance(args[0], torch.Tensor):
                args = (CUDA if self.where.on_card(args[0]) else CPU, args[0].dtype, *args[1:])
            asked = {k: _number(v) for k, v in kwargs.items() if k != "copy"}
            device, dtype, soon, form = torch._C._nn._parse_to(*map(_number, args), **asked)
            if device is None or device.type == "meta":
                return func(tensor, *args, **kwargs)
            waits, change = not soon, dict(dtype=dtype, memory_format=form)
            change = {k: v for k, v in change.items() if v is not None}
        moved = self.upload if _is_card(device) else self.download
        if not change:
            return moved(tensor)
        if _is_card(device) and waits:  # then the host converts
            return moved(func(tensor, **change))
        return func(moved(tensor), **change)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.where.go_on()
        name, kwargs, where = getattr(func, "__name__", ""), dict(kwargs or {}), self.where
        first, fake = args[0] if args else None, bool(args) and isinstance(args[0], FakeTensor)
        if name == "_parse_to" or func is torch.device:  # where to go, in words
            return func(*map(_number, args[:1]), *args[1:], **kwargs)
        if name in ("__get__", "__set__"):
            name = func.__self__.__name__
            if name in ("is_cuda", "is_cpu") and where.on_card(first):
                return name == "is_cuda"
            if name == "grad" and len(args) == 1 and (gradient := func(first)) is not None:
                where.trace.see(gradient, "gradients")
            if name == "data" and fake and len(args) == 2 and not isinstance(args[1], FakeTensor):
                args = (first, where.like(args[1], where.on_card(first)))
            return func(*args, **kwargs)
        if isinstance(first, torch.Tensor) and name in ("to", "cuda", "cpu"):
            return self.move(func, first, args[1:], kwargs)
        if name in ("numpy", "__array__") and where.on_card(first):
            raise TypeError(NOT_NUMPY)
        if fake and name in ("numpy", "tolist", "__array__", "__format__"):
            where.trace.work.wait(where.trace)
            return func(_ones(first), *args[1:], **kwargs)
        if kwargs.get("pin_memory") is True:  # of a factory; the host has no other memory here
            kwargs["pin_memory"] = False
        if self.default and kwargs.get("device") is None and _makes(func):
            kwargs["device"] = self.default
        if "device" in kwargs:
            kwargs["device"] = _number(kwargs["device"])
        card = any(map(_is_card, (*args, *kwargs.values())))
        if card:
            args = tuple(CPU if _is_card(a) else a for a in args)
            kwargs = {k: CPU if _is_card(v) else v for k, v in kwargs.items()}
        away = not card and str(kwargs.get("device")) == "cpu" and where.on_card(args)
        asked = True if card else False if away else where.asked
        with where.to(asked, () if away else (args, kwargs)):
            out = func(*args, **kwargs)
        return tree_map(self.upload, out) if card else out


IN_TORCH = [f.__code__ for f in (Moves.__torch_function__, Where.__torch_dispatch__, ENGINE)]


def in_torch(frame) -> bool:
    """Whether torch's C++ stands between the script and this frame: `Where.go_on` stops it."""
    while frame is not None and frame.f_code not in IN_TORCH:
        frame = frame.f_back
    return frame is not None
