"""Which tensor is on the pretended card: the modes through which torch's functions go."""

from collections.abc import Iterator
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fake_cuda.scripts.host import CPU, CUDA, NOT_NUMPY

from .attention import attention
from .card import Card

in_backward = torch._C._current_graph_task_id  # -1 outside of a backward pass
aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
# Operations that may read tensors of both places.
ACROSS = {aten.copy_.default, aten._to_copy.default, aten.index.Tensor, aten.index_put_.default}
ACROSS |= {aten.set_.source_Storage, aten._index_put_impl_.default, aten.index_put.default}
ACROSS |= {aten._unsafe_index.Tensor}  # of an upsampling that a mode takes apart
# What is asked of a tensor on the card, and its answer.
QUESTIONS = {torch.Tensor.device.__get__: CUDA, torch.Tensor.get_device: 0}
QUESTIONS |= {torch.Tensor.is_cuda.__get__: True, torch.Tensor.is_cpu.__get__: False}


def tensors_in(values) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


def means_card(place) -> bool | None:
    """Whether a device or its name means the card, or the CPU; None for anything else."""
    if not isinstance(place, torch.device | str):
        return None
    return {"cuda": True, "cpu": False}.get(str(place).partition(":")[0])


def on_the_cpu(value):
    return CPU if means_card(value) else value


class Follow(TorchDispatchMode):
    """Results of tensors on the card are on the card."""

    def __init__(self, card: Card):
        super().__init__()
        self.card = card

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if Pretend.on and not self.card.inside_a_kernel:
            with torch._C.DisableTorchFunction():
                self.seen(func, tensors_in((args, kwargs or {})), out)
        return out

    def seen(self, func, given: Iterator[torch.Tensor], out) -> None:
        """An operation has run."""
        card, backward = self.card, in_backward() != -1
        held = [(tensor, card.holds(tensor)) for tensor in given]
        here = any(on_card for _, on_card in held)
        if here and func in PRODUCTS:
            card.multiplies(backward)
        if here and func not in ACROSS:
            self.join(func, [(t, on_card) for t, on_card in held if not on_card and t.dim()])
        for tensor in tensors_in((out,)):
            # What compiled code makes in a backward pass joins the first tensor of the card.
            if here or (card.holds(tensor) is None and not backward):
                card.place(tensor, here)
        if here and func is aten.bernoulli_.float:  # CUDA's dropout keeps a mask of bools
            card.shrink(out, out.numel())

    def join(self, func, off: list[tuple[torch.Tensor, bool | None]]) -> None:
        """Tensors that are not on the card meet one that is: those that nobody placed go there."""
        if in_backward() == -1 and any(on_card is False for _, on_card in off):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two "
                f"devices, cuda:0 and cpu! (when checking arguments of {func})"
            )
        for tensor, on_card in off:
            if on_card is None:
                self.card.place(tensor, True)


class Pretend(TorchFunctionMode):
    """Where Python says cuda, C++ hears cpu; where it asks for a tensor's device, it hears cuda."""

    on = True  # off inside of a prediction, whose tensors are fake and nowhere

    def __init__(self, card: Card):
        super().__init__()
        self.card = card

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not Pretend.on or func in (torch.device, torch._C._nn._parse_to):
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention and args and self.card.holds(args[0]):
            return attention(self.card, *args, **kwargs)
        if func in QUESTIONS:
            held = not isinstance(args[0], FakeTensor) and self.card.holds(args[0])
            return QUESTIONS[func] if held else func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        here = first is not None and self.card.holds(first)
        if here and name in ("numpy", "__array__"):
            raise TypeError(NOT_NUMPY)
        if here and name in ("histc", "one_hot"):
            return self.counted(func, first, *args[1:], **kwargs)
        wanted = self.asked(name, first, args, kwargs)
        # A copy that goes to the CPU was never on the card.
        with self.card.kernel() if here and wanted is False else nullcontext():
            return self.sent(name, func, args, kwargs, first, wanted)

    def counted(self, func, values, *args, **kwargs):
        """Whole numbers counted: a CPU has no such histogram, and makes one_hot's zeros unseen."""
        with self.card.kernel():
            given = values.float() if func is torch.histc else values
            out = func(given, *args, **kwargs).to(values.dtype)
        self.card.place(out, True)
        return out

    def sent(self, name: str, func, args, kwargs, first, wanted: bool | None):
        """The result of a call, put where it is wanted."""
        if name in ("cuda", "cpu") and first is not None:
            out = first
        else:
            args = tuple(on_the_cpu(value) for value in args)
            kwargs = {key: on_the_cpu(value) for key, value in kwargs.items()}
            kwargs.pop("pin_memory", None)
            out = func(*args, **kwargs)
        if wanted is None:
            return out
        moves = first is not None and name in ("to", "cuda", "cpu", "type")
        for tensor in tensors_in((out,)):
            if moves and bool(self.card.holds(first)) == wanted:
                continue  # it stands where it should, or was copied there
            if moves and self.card.holds(tensor) is self.card.holds(first) and same(tensor, first):
                tensor = out = tensor.clone(memory_format=torch.preserve_format)
            self.card.place(tensor, wanted)
        return out

    def asked(self, name: str, first, args, kwargs) -> bool | None:
        """Where the call puts its result: on the card, off it, or it does not say."""
        if name in ("cuda", "cpu") and first is not None:
            return name == "cuda"
        if name == "to" and len(args) > 1 and isinstance(args[1], torch.Tensor):
            return bool(self.card.holds(args[1]))
        for value in (*args[:3], kwargs.get("device")):
            if (on_card := means_card(value)) is not None:
                return on_card
        if name in ("tensor", "from_numpy", "as_tensor"):
            source = args[0] if args else kwargs.get("data")
            return bool(isinstance(source, torch.Tensor) and self.card.holds(source))
        return None


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata
