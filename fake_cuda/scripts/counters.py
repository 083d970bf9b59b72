"""What torch.cuda tells of its memory and its card beyond a number: tables, snapshots, limits."""

import uuid
from collections import OrderedDict
from collections.abc import Iterator
from types import SimpleNamespace

import torch

from ..allocator import MiB
from ..trace import Trace

# By compute capability: bytes of the second cache (data sheets), and of shared memory for one block
# with an opt-in, in KiB (CUDA's programming guide, "Technical Specifications").
CACHES = {(7, 0): 6, (7, 5): 4, (8, 0): 40, (8, 6): 6, (8, 9): 72, (9, 0): 50, (10, 0): 126}
SHARED = {(7, 0): 96, (7, 5): 64, (8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227}
BYTES = ("allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes")
OTHERS = ("inactive_split_bytes", "allocation", "active", "segment", "inactive_split")
NUMBERS = ("num_alloc_retries", "num_device_alloc", "num_device_free", "num_sync_all_streams")


def counters(trace: Trace, asked: dict, memory) -> Iterator[tuple]:
    """(name, value or function) of torch.cuda and torch.cuda.memory."""
    yield "get_device_properties", lambda *_, **__: _properties(trace, asked)
    yield "memory_stats", lambda *_, **__: _statistics(memory.now())
    yield "memory_stats_as_nested_dict", lambda *_, **__: _nested(memory.now())
    yield "memory_summary", torch.cuda.memory_summary  # which puts those into a table
    yield "memory_snapshot", lambda *_, **__: []
    yield "_snapshot", lambda *_, **__: dict(segments=[], device_traces=[])
    yield "list_gpu_processes", "GPU:0\nno processes are running"
    yield from ((name, 0) for name in ("utilization", "temperature", "power_draw", "clock_rate"))
    yield "memory_usage", lambda *_, **__: 100 * memory.now().reserved // asked["memory"]
    yield "is_current_stream_capturing", False
    yield "current_blas_handle", 0
    yield "can_device_access_peer", False
    yield "get_allocator_backend", "native"
    yield "graph_pool_handle", (0, 1)
    yield "set_per_process_memory_fraction", lambda part, *_: _limit(memory, asked, part)
    total = asked["memory"]
    yield "get_per_process_memory_fraction", lambda *_: min(1.0, (memory.limit or total) / total)


def _limit(memory, asked: dict, part: float) -> None:
    if memory.limit is not None:  # else the run is to tell how much it would have needed
        memory.limit = min(asked["memory"] - asked["context"], int(part * asked["memory"]))


def _properties(trace: Trace, asked: dict) -> SimpleNamespace:
    """As torch._C._CudaDeviceProperties (registerCudaDeviceProperties in csrc/cuda/Module.cpp)."""
    major, minor = trace.card.capability
    name, shared = asked["card"], SHARED.get((major, minor), 99) * 1024
    threads = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}.get((major, minor), 2048)
    facts = dict(name=name, major=major, minor=minor, is_integrated=0, is_multi_gpu_board=0)
    facts |= dict(total_memory=asked["memory"], multi_processor_count=trace.card.sms, warp_size=32)
    facts |= dict(max_threads_per_multi_processor=threads, max_threads_per_block=1024)
    facts |= dict(regs_per_multiprocessor=65536, shared_memory_per_block=48 * 1024)
    facts |= dict(shared_memory_per_block_optin=shared)
    facts |= dict(shared_memory_per_multiprocessor=shared + 1024)
    facts |= dict(L2_cache_size=CACHES.get((major, minor), 6) * MiB, gcnArchName=name)
    facts |= dict(uuid=uuid.UUID(int=0), pci_bus_id=0, pci_device_id=0, pci_domain_id=0)
    return SimpleNamespace(**facts)


def _statistics(memory) -> OrderedDict:
    """torch.cuda.memory_stats: what the allocator's model knows; other numbers are 0."""
    found, sums = {}, dict.fromkeys((True, False), 0)
    for size, small, is_free in memory.blocks.values():
        sums[small] += 0 if is_free else size
    for name in (*BYTES, *OTHERS):
        for pool in ("all", "large_pool", "small_pool"):
            for what in ("current", "peak", "allocated", "freed"):
                found[f"{name}.{pool}.{what}"] = 0
    for name in BYTES:
        now, most = memory.allocated, memory.most
        if name == "reserved_bytes":
            now, most = memory.reserved, memory.peak
        else:
            found[f"{name}.small_pool.current"] = sums[True]
            found[f"{name}.large_pool.current"] = sums[False]
        found |= {f"{name}.all.current": now, f"{name}.all.peak": most}
        found |= {f"{name}.all.allocated": most, f"{name}.all.freed": most - now}
    for name in ("allocation", "active"):
        found[f"{name}.all.current"] = found[f"{name}.all.peak"] = len(memory.where)
    for name in ("oversize_allocations", "oversize_segments"):
        found |= {f"{name}.{what}": 0 for what in ("current", "peak", "allocated", "freed")}
    found |= dict.fromkeys(NUMBERS, 0) | dict(max_split_size=-1, num_ooms=memory.ran_out)
    return OrderedDict(sorted(found.items()))


def _nested(memory) -> dict:
    nested: dict = {}
    for name, value in _statistics(memory).items():
        *above, last = name.split(".")
        place = nested
        for part in above:
            place = place.setdefault(part, {})
        place[last] = value
    return nested
