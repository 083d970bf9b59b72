"""The memory of the pretended card: which storages are on it, what its allocator holds for them."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensor

from fake_cuda import card as cards
from fake_cuda.scratch import workspace
from fake_cuda.scripts.answers import Memory
from helpers import gpu

GIB = 2**30
DRIVER_NAMES = {"T4": "Tesla T4", "H100": "NVIDIA H100 80GB HBM3"}


class Card:
    """A card by its name in data/gpus.csv, of which `free` GiB are free."""

    def __init__(self, name: str, free: float):
        known = gpu(name)
        self.name, self.capability = DRIVER_NAMES.get(name, name), known.capability
        self.facts = cards.Card.of(self.name, known.capability, known.facts)
        self.memory = Memory(known.memory, known.memory - int(free * GIB))
        self.places: dict[int, bool] = {}  # a storage's address: on the card, or known to be off it
        self.calls: list[str] = []  # what was asked of the card: "empty_cache", ...
        self.inside_a_kernel = False
        self.compiles = False  # compiled code runs, which no mode sees
        self.workspaces: dict[bool, torch.Tensor] = {}  # of cuBLAS, until cleared

    def holds(self, tensor: torch.Tensor) -> bool | None:
        """Whether a tensor is on the card; None for one that nobody placed."""
        try:
            return self.places.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # sparse tensors and others without a storage
            return None

    def place(self, tensor: torch.Tensor, on_card: bool) -> None:
        if isinstance(tensor, FakeTensor) or tensor.device.type != "cpu":
            return
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return
        key = storage._cdata
        if key not in self.places:
            weakref.finalize(storage, self.died, key).atexit = False
        if not on_card:
            self.release(key)
        elif key not in self.memory.where and storage.nbytes():
            self.memory.malloc(key, storage.nbytes())
        self.places[key] = on_card

    def shrink(self, tensor: torch.Tensor, size: int) -> None:
        """A tensor on the card takes `size` bytes there, not as many as here."""
        key = tensor.untyped_storage()._cdata
        if key in self.memory.where:
            self.memory.release(key)
            self.memory.malloc(key, size)

    def release(self, key: int) -> None:
        if key in self.memory.where:
            self.memory.release(key)

    def died(self, key: int) -> None:
        self.places.pop(key, None)
        self.release(key)

    def multiplies(self, backward: bool) -> None:
        """A product of cuBLAS, which takes a workspace for the forward thread and one for the
        backward one."""
        if backward not in self.workspaces:
            self.workspaces[backward] = torch.empty(workspace(self.capability), dtype=torch.uint8)
            self.place(self.workspaces[backward], True)

    @contextmanager
    def kernel(self) -> Iterator[None]:
        """What happens inside of one kernel: its tensors are not seen."""
        before, self.inside_a_kernel = self.inside_a_kernel, True
        try:
            yield
        finally:
            self.inside_a_kernel = before

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")
        self.memory.empty_cache()
