"""What a build of torch for the CPU lacks: the card's generators, old types of tensors."""

from collections.abc import Iterator

import torch

from ..shards import parts
from .host import CPU, CUDA, Where
from .moves import Moves, as_device, is_card

TYPES = dict(Float=torch.float32, Double=torch.float64, Half=torch.float16, Byte=torch.uint8)
TYPES |= dict(BFloat16=torch.bfloat16, Char=torch.int8, Short=torch.int16, Int=torch.int32)
TYPES |= dict(Long=torch.int64, Bool=torch.bool)
NAMES = {dtype: f"{name}Tensor" for name, dtype in TYPES.items()}


def names(where: Where, moves: Moves) -> Iterator[tuple]:
    """(owner, name, value) of generators and types."""
    yield torch, "Generator", Generator
    yield torch.cuda, "default_generators", (Generator("cuda"),)
    yield torch._C, "_get_accelerator", lambda *_: torch.device("cuda")
    yield torch.Tensor, "record_stream", _used_on(where)
    yield torch.Tensor, "is_pinned", lambda tensor, *_: not where.on_card(tensor)
    yield from _default(moves)
    yield from _types(where)


def _used_on(where: Where):
    """Another stream works on what a tensor holds."""

    def record_stream(tensor, stream) -> None:
        for one in parts(tensor):
            storage = where.trace.ids.get(one.untyped_storage()._cdata)
            if storage is not None:
                where.trace.streams.use(storage, stream.stream_id)

    return record_stream


class OfAnyPlace(type(torch._C.Generator)):
    """So that `isinstance` knows torch's own, as torch.default_generator is one."""

    def __instancecheck__(cls, value) -> bool:
        return isinstance(value, torch._C.Generator)


class Generator(torch._C.Generator, metaclass=OfAnyPlace):
    """A generator of random numbers, which here are all drawn on the CPU."""

    def __new__(cls, device="cpu"):
        own = super().__new__(cls, device="cpu")
        own.place = CUDA if is_card(as_device(device)) else CPU
        return own

    @property
    def device(self) -> torch.device:
        return self.place


def _default(moves: Moves) -> Iterator[tuple]:
    """The device for new tensors. torch's own mode would be asked after `Moves`, not before."""
    change, answer = torch.set_default_device, torch.get_default_device

    def set_default(device) -> None:
        device = as_device(device)
        moves.default = CUDA if device is not None and is_card(str(device)) else None
        change(None if moves.default else device)

    yield torch, "set_default_device", set_default
    yield torch, "get_default_device", lambda: moves.default or answer()


def _types(where: Where) -> Iterator[tuple]:
    kind, default = torch.Tensor.type, torch.set_default_tensor_type
    for dtype, name in NAMES.items():
        yield torch.cuda, name, _old(name, dtype, where)

    def asked(tensor, dtype=None, non_blocking=False, **_):
        if dtype is None:
            return f"torch.cuda.{NAMES[tensor.dtype]}" if where.on_card(tensor) else kind(tensor)
        found = _found(dtype)
        if found is None:
            return kind(tensor, dtype, non_blocking)
        return tensor.to(device=found[0], dtype=found[1], non_blocking=non_blocking)

    def set_default(t):
        found = _found(t)
        if found is None:
            return default(t)
        torch.set_default_dtype(found[1])
        torch.set_default_device(None if found[0] == CPU else found[0])

    yield torch.Tensor, "type", asked
    yield torch.Tensor, "type_as", lambda tensor, other: tensor.to(other)
    yield torch, "set_default_tensor_type", set_default


def _found(asked) -> tuple | None:
    """The place and dtype of an old type, or of its name; None of anything else."""
    name = getattr(asked, "__name__", "")
    text = asked if isinstance(asked, str) else f"{getattr(asked, '__module__', '')}.{name}"
    module, _, name = text.rpartition(".")
    dtype = TYPES.get(name.removesuffix("Tensor"))
    if dtype is None or module not in ("torch", "torch.cuda"):
        return None
    return (CUDA if module == "torch.cuda" else CPU), dtype


def _old(name: str, dtype: torch.dtype, where: Where) -> type:
    """A type as torch.cuda.FloatTensor: called, it makes a tensor (legacy_tensor_ctor in
    tensor_new.cpp); a tensor is of it by its place and dtype."""

    class Old(type):
        def __instancecheck__(cls, value) -> bool:
            plain = isinstance(value, torch.Tensor) and value.dtype == dtype
            return plain and where.on_card(value)

        def __call__(cls, *given):
            first = given[0] if given else 0
            if isinstance(first, torch.Tensor):
                return first.to(device=CUDA, dtype=dtype)
            if not isinstance(first, int | torch.Size):
                return torch.tensor(first, dtype=dtype, device="cuda")
            sizes = first if isinstance(first, torch.Size) else given or (0,)
            return torch.empty(sizes, dtype=dtype, device="cuda")

    return Old(name, (), dict(dtype=dtype, is_cuda=True, __module__="torch.cuda"))
