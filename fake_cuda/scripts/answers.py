"""What `torch.cuda` and `torch.accelerator` answer about a card that is not there.

Written once for both such cards: that of scripts (`card`), whose tensors are fake, and that of the
lessons' tests (tools/shared/pretended), whose tensors are real and lie on the CPU. Both bring a
`Memory`, the allocator's model with torch's counters; what they answer otherwise they put in.
"""

import inspect
import uuid
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import accelerate.utils.imports
import torch
import transformers.utils.generic
import transformers.utils.import_utils

from ..allocator import Allocator, MiB
from ..card import Card
from ..choices.triton import SHARED
from ..scratch import THREADS
from ..streams import Streams
from .queues import queues

# CUDA of the wheels of today's torch, and what they are built for (torch's release notes).
VERSION = "13.0"
ARCHITECTURES = [f"sm_{n}" for n in (75, 80, 86, 90, 100, 120)] + ["compute_120"]
# MiB of the second cache, by compute capability (data sheets).
CACHES = {(7, 0): 6, (7, 5): 4, (8, 0): 40, (8, 6): 6, (8, 9): 72, (9, 0): 50, (10, 0): 126}
# Names in torch.cuda.memory_stats.
COUNTED = ("allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes", "allocation")
COUNTED += ("inactive_split_bytes", "active", "segment", "inactive_split")
POOLS = ("all", "large_pool", "small_pool")
# Libraries that remember what they found out about the machine.
REMEMBER = (accelerate.utils.imports, transformers.utils.import_utils, transformers.utils.generic)
PLACES = (torch.cuda, torch.cuda.memory, torch.cuda.nvtx, torch.cuda.random, torch.cuda.graphs)
PLACES += (torch.accelerator, torch.accelerator.memory)
# Functions there that ask the others: they stay. And one that does something else.
KEPT = {"memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"}
KEPT |= {"memory_cached", "max_memory_cached", "memory_summary"}
KEPT |= {"get_device_name", "get_device_capability", "range"}
STATE = torch.zeros(16, dtype=torch.uint8)  # of the card's generator: its seed and its offset


class Memory(Allocator):
    """The allocator's model with torch's counters: on a full card it empties its cache, as torch
    does, and then runs out.

    Args:
        total: bytes of the card.
        taken: bytes of it that are not the allocator's: CUDA's context, other programs.
        limited: whether it may run out; else it tells how much would have been needed.
    """

    def __init__(self, total: int, taken: int, limited: bool = True):
        super().__init__()
        self.total, self.taken = total, taken
        self.limit = total - taken if limited else None  # bytes reserved at most
        self.most = self.retries = self.ran_out = 0  # allocated bytes; how often it was full
        self.streams = Streams([])

    def now(self) -> "Memory":
        """Its present state, which one that is behind catches up with first."""
        return self

    def gave_up(self, i: int) -> None:
        """It runs out: there is no room for this tensor."""

    def malloc(self, i: int, size: int, stream: int = 0) -> None:
        peak = self.peak
        super().malloc(i, size, stream)
        if self.limit is not None and self.reserved > self.limit:
            self.empty_cache()
            self.retries += 1
            if self.reserved > self.limit:
                self.release(i)  # it was never there
                self.empty_cache()
                self.ran_out, self.peak = self.ran_out + 1, peak
                self.gave_up(i)
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate {size / MiB:.2f} MiB. GPU 0 has a "
                    f"total capacity of {self.total / 2**30:.2f} GiB (a card that is not there)."
                )
            self.peak = max(peak, self.reserved)
        self.most = max(self.most, self.allocated)

    def free_and_total(self, *_, **__) -> tuple[int, int]:
        """As torch.cuda.mem_get_info."""
        return self.total - self.taken - self.now().reserved, self.total

    def reset_peaks(self, *_, **__) -> None:
        self.now()
        self.most, self.peak = self.allocated, self.reserved

    def take_part(self, fraction: float, *_, **__) -> None:
        """As torch.cuda.set_per_process_memory_fraction."""
        if not isinstance(fraction, float):
            raise TypeError("Invalid type for fraction argument, must be `float`")
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        if self.limit is not None:
            self.limit = min(self.total - self.taken, int(fraction * self.total))

    def part(self, *_, **__) -> float:
        return min(1.0, (self.limit or self.total) / self.total)

    def split(self) -> int:
        """Free bytes of segments of which another part is in use."""
        free = ((at, size) for at, (size, _, is_free) in self.blocks.items() if is_free)
        return sum(size for at, size in free if at in self.ends or at + size in self.blocks)


class Anything(nullcontext):
    """A choice of a device, or CUDA's own library: whatever is asked of it is done already."""

    def __init__(self, *_, **__):
        super().__init__(self)

    def __getattr__(self, name: str):
        return lambda *_, **__: 1.0


def answers(card: Card, memory: Memory) -> dict:
    """By the name of a function of `PLACES`: its answer, or what is called in its place."""
    ampere = card.capability >= (8, 0)
    told = dict(is_available=True, device_count=1, is_initialized=True, initial_seed=0)
    told |= dict(current_device=0, current_device_index=0, current_device_idx=0)
    told |= dict(_get_device_index=0)  # which functions of theirs call that are left as they are
    told |= dict(get_device_properties=properties(card, memory), get_arch_list=ARCHITECTURES)
    told |= dict(current_accelerator=lambda *_, **__: torch.device("cuda"))
    told |= dict(is_bf16_supported=lambda including_emulation=True: including_emulation or ampere)
    told |= dict(is_tf32_supported=ampere, get_sync_debug_mode=0, current_blas_handle=0)
    told |= queues(memory.streams) | dict(cudart=Anything)
    told |= dict(is_current_stream_capturing=False, graph_pool_handle=(0, 1))
    told |= dict(get_rng_state=lambda *_, **__: STATE.clone(), can_device_access_peer=False)
    told |= dict(get_rng_state_all=lambda: [STATE.clone()])
    told |= dict.fromkeys(("utilization", "temperature", "power_draw", "clock_rate"), 0)

    told |= dict(memory_stats=torch.cuda.memory_stats)  # torch.accelerator's own asks C++
    told |= dict(memory_stats_as_nested_dict=lambda *_, **__: statistics(memory.now()))
    told |= dict(mem_get_info=memory.free_and_total, get_memory_info=memory.free_and_total)
    told |= dict(memory_usage=lambda *_, **__: 100 * memory.now().reserved // memory.total)
    told |= dict(device_memory_used=lambda *_, **__: memory.taken + memory.now().reserved)
    told |= dict(memory_snapshot=lambda *_, **__: [])
    told |= dict(_snapshot=lambda *_, **__: dict(segments=[], device_traces=[]))
    told |= dict(list_gpu_processes="GPU:0\nno processes are running")
    told |= dict(get_allocator_backend="native", reset_peak_memory_stats=memory.reset_peaks)
    told |= dict(empty_cache=memory.empty_cache)
    told |= dict(set_per_process_memory_fraction=memory.take_part)
    told |= dict(get_per_process_memory_fraction=memory.part)
    return told


def patches(told: dict) -> Iterator[tuple]:
    """(owner, name, what stands there) of torch: functions that are not in `told` do nothing."""
    for owner in PLACES:
        for name, function in list(vars(owner).items()):
            # Or what the simulation put there, or this: scripts are tried on a pretended card too.
            own = inspect.isfunction(function) and name not in KEPT
            if own and function.__module__.startswith(("torch.", "fake_cuda.")):
                yield owner, name, _says(told.get(name))
    kinds = dict(Stream=told["Stream"], Event=told["Event"])
    kinds |= dict(device=Anything, device_of=Anything)
    yield from ((torch.cuda, name, kind) for name, kind in kinds.items())
    yield torch.version, "cuda", VERSION


def forget_machine() -> None:
    """What libraries have found out about the machine, and would not ask again."""
    for found in [found for module in REMEMBER for found in vars(module).values()]:
        if hasattr(found, "cache_clear"):
            found.cache_clear()


def _says(value) -> Callable:
    """A function of its own for each name: torch's compiler keeps a table by function."""
    if callable(value):
        return lambda *given, **options: value(*given, **options)
    return lambda *_, **__: value


def properties(card: Card, memory: Memory) -> SimpleNamespace:
    """As torch._C._CudaDeviceProperties (registerCudaDeviceProperties in csrc/cuda/Module.cpp)."""
    (major, minor), shared = card.capability, SHARED.get(card.capability, 99) * 1024
    facts = dict(name=card.name, major=major, minor=minor, is_integrated=0, is_multi_gpu_board=0)
    facts |= dict(total_memory=memory.total, multi_processor_count=card.sms, warp_size=32)
    facts |= dict(max_threads_per_multi_processor=THREADS.get(card.capability, 2048))
    facts |= dict(max_threads_per_block=1024, regs_per_multiprocessor=65536)
    facts |= dict(shared_memory_per_block=48 * 1024, shared_memory_per_block_optin=shared)
    facts |= dict(shared_memory_per_multiprocessor=shared + 1024)
    facts |= dict(L2_cache_size=CACHES.get(card.capability, 6) * MiB, gcnArchName=card.name)
    facts |= dict(uuid=uuid.UUID(int=0), pci_bus_id=0, pci_device_id=0, pci_domain_id=0)
    return SimpleNamespace(**facts)


def statistics(memory: Memory) -> dict:
    """As memory_stats_as_nested_dict: what the allocator's model knows; other numbers are 0."""
    zeros = ("current", "peak", "allocated", "freed")
    found = {name: {pool: dict.fromkeys(zeros, 0) for pool in POOLS} for name in COUNTED}
    used = [(size, pool.small) for size, pool, is_free in memory.blocks.values() if not is_free]
    for name in ("allocated_bytes", "active_bytes", "requested_bytes"):
        _count(found[name]["all"], memory.allocated, memory.most)
        for pool, is_small in (("small_pool", True), ("large_pool", False)):
            found[name][pool]["current"] = sum(size for size, small in used if small == is_small)
    _count(found["reserved_bytes"]["all"], memory.reserved, memory.peak)
    found["inactive_split_bytes"]["all"]["current"] = memory.split()
    for name in ("allocation", "active"):
        found[name]["all"] |= dict(current=len(memory.where), peak=len(memory.where))
    for name in ("oversize_allocations", "oversize_segments"):
        found[name] = dict.fromkeys(zeros, 0)
    found |= dict.fromkeys(("num_device_alloc", "num_device_free", "num_sync_all_streams"), 0)
    found |= dict(num_ooms=memory.ran_out, num_alloc_retries=memory.retries, max_split_size=-1)
    return found


def _count(counter: dict, now: int, most: int) -> None:
    counter |= dict(current=now, peak=most, allocated=most, freed=most - now)
