"""What a script puts on the card is fake, what it keeps on the host stays as it is."""

import math
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from ..operations import in_backward
from ..shards import parts, wraps
from ..trace import HOST, FakeTensor, Trace
from . import bounds, guesses, mixed
from .plain import WITHOUT_VALUES, plain_operation, tensors
from .words import Stop, TimeOver

CUDA, CPU, DEVICE = torch.device("cuda", 0), torch.device("cpu"), FakeTensor.device.fget
LIFT = torch.ops.aten.lift_fresh.default  # of torch.from_numpy, once for each sample of a script
UPDATES = 2  # with the second, gradients and states stand as in all that follow
SMALL = 2**12  # values: uninitialised tensors up to this size are real, they may be drawn into
# torch/csrc/utils/tensor_numpy.cpp
NOT_NUMPY = (
    "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
    "memory first."
)


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
        self.ended: BaseException | None = None  # what has stopped the script, which may catch it
        self.unsure = False  # whether values that are known here may be others on a card
        self.note = lambda text: None  # says something with the answer

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here. Torch would put a guard against it around each operation,
        which takes longer than a small operation (torch/utils/_python_dispatch.py)."""
        return False

    def go_on(self) -> None:
        """Where time may be over: C++ that asks for a device (prim.device) aborts at exceptions.
        What a script does on its way out, it may do."""
        if (self.over or self.ended) and not isinstance(sys.exc_info()[1], Stop | TimeOver):
            self.end(TimeOver())

    def end(self, error: BaseException) -> None:
        """The script is over, whether or not it catches this: the first that is raised remains."""
        self.ended = self.ended or error
        raise error if error is self.ended else type(self.ended)(*self.ended.args)

    def stop(self, *text: str) -> None:
        """It has taken its updates; or, with a text, may not go on."""
        self.end(Stop(*text))

    def on_card(self, *values) -> bool:
        """Whether one of these tensors is on the card."""
        for tensor in (one for leaf in tensors(values) for one in parts(leaf)):
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
        if any(map(wraps, types)):
            return NotImplemented
        if func.namespace == "aten":
            self.go_on()
        kwargs, card, trace = kwargs or {}, self.asked, self.trace
        unsaid = card is None and not (self.around or self.buckets)
        if unsaid and plain_operation(func, args, kwargs):
            if func is LIFT:  # of a tensor without wrappers it is that tensor
                return args[0]
            with no_dispatch():
                return func(*args, **kwargs)
        given = tensors((args, kwargs))
        fakes = [t for t in given if isinstance(t, FakeTensor)]
        if card is None:
            card = self.on_card(fakes if given else self.around)
            card |= self.buckets and not given and _is_float(**kwargs)
        mixed.refuse(self, func, args, kwargs, card)
        if not (fakes or card or self.asked is False or _is_weight(func, args, **kwargs)):
            with no_dispatch():  # real tensors alone; much quicker than to take the modes off
                return func(*args, **kwargs)
        bounds.check(self, func.overloadpacket, args, {}, card)
        if self.falling and (number := self.falling.number(func, args)) is not None:
            return number
        written = args[0] if args and func._schema.is_mutable else None
        if fakes and isinstance(written, torch.Tensor) and not isinstance(written, FakeTensor):
            self.unsure = True
            return written  # values of the card are not known
        if trace.phases[-1] == "backward" and not (self.taken or in_backward()):
            self.step_by_hand(written)
        values = None if written is None else bounds.values_before(func, written, fakes)
        before, trace.on_host, self.busy = trace.on_host, not card, True
        try:
            out = func(*args, **kwargs)
        finally:
            trace.on_host, self.busy = before, False
        self.unsure |= values is not None and bounds.blurred(func, written, values)
        guesses.answer(func, args, out)
        guesses.no_end(func, args, kwargs, out, self.ends)
        if self.falling:
            self.falling.answer(func, args, out)
        if self.memory.limit is not None and card:
            self.memory.now()
        return out

    def step_by_hand(self, written) -> None:
        """Something is written after a backward pass: a weight, where no optimizer does it."""
        trace = self.trace
        leaves = [t for t in tensors((written,)) if isinstance(t, FakeTensor)]
        ids = [trace.ids.get(t.untyped_storage()._cdata) for t in leaves]
        if any(i is not None and trace.kind[i] == "parameters" for i in ids):
            if self.by_hand == UPDATES:
                self.stop()
            self.by_hand += 1
            trace.phase("between steps")

    def device(self, tensor) -> torch.device:
        """What a fake tensor says to a script, and what to torch."""
        asked_by_script = torch._C._len_torch_function_stack() and not self.busy
        return CUDA if asked_by_script and self.on_card(tensor) else DEVICE(tensor)


def _is_float(dtype=None, **_) -> bool:
    return (dtype or torch.get_default_dtype()).is_floating_point


def _is_weight(func, args, dtype=None, device=None, **_) -> bool:
    """Whether it makes a large tensor without values, as layers do to fill it: nobody reads it."""
    if func not in WITHOUT_VALUES or str(device) == "meta":
        return False
    return _is_float(dtype) and math.prod(args[0]) > SMALL
