"""Files of safetensors: real values are written, and for a fake tensor a hole of its size.

Such a file is as long as on a card, can be read again, and takes no room.
"""

import io
import json
import math
import os
from collections.abc import Iterator

import safetensors.torch
import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ..trace import FakeTensor
from ..values import known
from .host import Where
from .moves import Moves, as_device, is_card

LARGEST = 2**44  # bytes: further apart than this are the addresses of two storages
CODES = {dtype: code for code, dtype in safetensors.torch._TYPES.items()}


def sparse_files(where: Where, moves: Moves) -> Iterator[tuple]:
    """(owner, name, value) of what writes and reads safetensors."""
    yield from _addresses(where)
    yield from _safetensors(moves)


def _addresses(where: Where) -> Iterator[tuple]:
    """Fake tensors lie somewhere: libraries tell by it which of them share their weights."""
    real = torch.UntypedStorage.data_ptr

    def address(storage) -> int:
        fake = storage.device.type == "meta" and storage._cdata in where.trace.ids
        return storage._cdata * LARGEST if fake else real(storage)

    def begins(tensor) -> int:
        if not tensor.numel():
            return 0
        return address(tensor.untyped_storage()) + tensor.storage_offset() * tensor.element_size()

    yield torch.UntypedStorage, "data_ptr", address
    yield FakeTensor, "data_ptr", begins


def _safetensors(moves: Moves) -> Iterator[tuple]:
    """`save_file` and `save`, whose tensors are read where they lie; libraries have both by other
    names, so what they call is replaced."""
    library = safetensors.torch
    flatten, write, dump = library._flatten_as_ptr, library.serialize_file, library.serialize

    def flat(tensors, kept):
        if not any(isinstance(t, FakeTensor) for t in tree_leaves(tensors)):
            with _disable_current_modes():
                return flatten(tensors, kept)
        library._evaluate_tensors_for_save(tensors)
        for name, tensor in tensors.items():
            if not tensor.is_contiguous():
                raise ValueError(f"You are trying to save a non contiguous tensor: `{name}`")
        return Sparse(tensors)

    def to_file(tensors, filename, metadata=None):
        if not isinstance(tensors, Sparse):
            return write(tensors, filename, metadata=metadata)
        with open(filename, "wb") as file:
            return tensors.write(file, metadata)

    def to_bytes(tensors, metadata=None):
        if not isinstance(tensors, Sparse):
            return dump(tensors, metadata=metadata)
        tensors.write(file := io.BytesIO(), metadata)
        return file.getvalue()

    def opened(filename, framework, device="cpu", **options):
        if not is_card(as_device(device)):
            return library_open(filename, framework, device=device, **options)
        return Opened(library_open(filename, framework, **options), moves)

    library_open = safetensors.safe_open
    yield safetensors, "safe_open", opened
    yield library, "safe_open", opened
    yield library, "_flatten_as_ptr", flat
    yield library, "serialize_file", to_file
    yield library, "serialize", to_bytes


class Opened:
    """A file of safetensors that was opened for the card."""

    def __init__(self, file, moves: Moves):
        self.file, self.moves = file, moves

    def __enter__(self):
        self.file.__enter__()
        return self

    def __exit__(self, *error):
        return self.file.__exit__(*error)

    def __getattr__(self, name: str):
        return getattr(self.file, name)

    def get_tensor(self, name: str):
        return self.moves.upload(self.file.get_tensor(name))

    def get_tensors(self):
        return tree_map(self.moves.upload, self.file.get_tensors())

    def get_slice(self, name: str):
        return Part(self.file.get_slice(name), self.moves)


class Part:
    """A tensor in such a file, of which a part is read."""

    def __init__(self, part, moves: Moves):
        self.part, self.moves = part, moves

    def __getattr__(self, name: str):
        return getattr(self.part, name)

    def __getitem__(self, place):
        return self.moves.upload(self.part[place])


class Sparse(dict):
    """Tensors by name, some without values: a file of safetensors with holes in their places."""

    def write(self, file, metadata: dict | None) -> None:
        header, end = {"__metadata__": metadata} if metadata else {}, 0
        for name, tensor in self.items():
            begin, end = end, end + math.prod(tensor.shape) * tensor.element_size()
            about = dict(dtype=CODES[tensor.dtype], shape=list(tensor.shape))
            header[name] = about | dict(data_offsets=[begin, end])
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file.write(len(text).to_bytes(8, "little") + text)
        start = file.tell()
        for name, tensor in self.items():
            values = known(tensor)
            if values is not None and values.numel():
                with _disable_current_modes():
                    flat = values.detach().contiguous().view(-1).view(torch.uint8).numpy()
                file.seek(start + header[name]["data_offsets"][0])
                file.write(flat.tobytes())
        if isinstance(file, io.BytesIO):
            file.seek(0, os.SEEK_END)
            file.write(bytes(start + end - file.tell()))
        else:
            file.truncate(start + end)
