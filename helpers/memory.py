"""Peak memory of a block of code, and starting clean for the next one."""

import atexit
import gc
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache

import pynvml
import torch
from torch._C._profiler import _EventType, _ProfilerEvent
from torch._subclasses.fake_tensor import FakeTensor

from fake_cuda import forget_libraries

from .hardware import device, gib

__all__ = ["Usage", "free", "gib", "live_bytes", "measure"]


@dataclass
class Usage:
    """Bytes of a measured block; None where this device has no such number.

    `peak_allocated` counts tensors, `peak_reserved` what the caching allocator holds for them, and
    `used` what the driver reports for the whole card at the end of the block, CUDA context and
    other programs included, and what bitsandbytes paged: it gives that back when the process ends.
    `start` was allocated when the block began and is part of the peak.
    """

    device: str
    start: int = 0
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    used: int | None = None


def live_bytes() -> int:
    """Bytes of all real CPU tensors alive now; tensors that share a storage count once."""
    storages = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some lazy module attributes warn when gc looks at them
        for o in gc.get_objects():
            if issubclass(type(o), torch.Tensor) and not isinstance(o, FakeTensor):
                with suppress(NotImplementedError, RuntimeError):  # torch.vmap's, a compiler's own
                    if o.device.type == "cpu" and o.layout is torch.strided:
                        storages[o.untyped_storage().data_ptr()] = o.untyped_storage().nbytes()
    return sum(storages.values())


@contextmanager
def measure() -> Iterator[Usage]:
    """Measure the peak memory of a block: `with measure() as usage: ...`.

    On an accelerator this is its caching allocator's own high-water mark. On a CPU it is the sum
    of the events of torch's allocator, logged by `torch.profiler`, plus the tensors alive at the
    start: exact, but it keeps some thousand events a step, so measure a few steps, not an epoch.
    It sees the thread that measures alone: what another one makes, such as weights that
    transformers casts while it loads (unless HF_DEACTIVATE_ASYNC_LOAD=1), is not counted, and what
    another one frees counts until its address is given again.
    What was alive before and is freed inside still counts, since the log begins with the block.
    """
    kind = device().type
    usage = Usage(kind)
    gc.collect()
    if kind == "cpu":
        if torch.autograd._profiler_enabled():
            raise ValueError(
                "something is being measured or profiled already, and a CPU can do that once at a "
                "time: `train` measures itself, see `run.peak_allocated`"
            )
        usage.start = live_bytes()
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would announce each start and stop
        cpu = torch.profiler.ProfilerActivity.CPU
        with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
            yield usage
        events = profile.profiler.kineto_results.experimental_event_tree()
        usage.peak_allocated = usage.start + _peak_of(events)
        return
    usage.start = accelerator_bytes()
    _accelerator("reset_peak_memory_stats")
    yield usage
    torch.accelerator.synchronize()
    usage.peak_allocated = _accelerator("max_memory_allocated")
    usage.peak_reserved = _accelerator("max_memory_reserved")
    if kind == "cuda":
        with suppress(pynvml.NVMLError, RuntimeError):  # in some containers, on a slice
            usage.used = torch.cuda.device_memory_used()  # through NVML, as nvidia-smi


def _peak_of(events: list[_ProfilerEvent]) -> int:
    """The most bytes that stood at once of what these events, and those inside them, allocated."""
    blocks = []
    while events:
        event = events.pop()
        events += event.children
        if event.tag == _EventType.Allocation:
            blocks.append((event.start_time_ns, event.extra_fields))
    sizes = {}
    now = peak = 0
    for _, block in sorted(blocks, key=lambda stamped: stamped[0]):
        # A block that another thread frees shows when its address is given again; one from before
        # is logged too where torch once knew a block at its address, and does not count.
        now -= sizes.pop(block.ptr, 0)
        if block.alloc_size > 0:
            sizes[block.ptr] = block.alloc_size
            now += block.alloc_size
            peak = max(peak, now)
    return peak


@cache
def spare_what_is_loaded() -> None:
    """Keep garbage collection from sweeping what the libraries made, once for the whole process.

    They made some hundred thousand objects that stay for good. Sweeping them again and again takes
    longer than the steps of a short run. But what a reader made before must still be seen and
    swept: where tensors are alive already, nothing is spared. `train` and `predict` call it.
    """
    if live_bytes() < 2**20 and not torch.cuda.is_initialized():
        gc.collect()
        gc.freeze()
        atexit.register(gc.unfreeze)  # or Triton takes what stays frozen for a leak, and says so


def accelerator_bytes() -> int:
    """Bytes allocated on the accelerator now; 0 where its allocator keeps no statistics."""
    return _accelerator("memory_allocated") or 0


def _accelerator(name: str) -> int | None:
    """One of `torch.accelerator`'s counters; None where its allocator keeps no statistics."""
    try:
        return getattr(torch.accelerator, name)()
    except (NotImplementedError, RuntimeError):
        return None


def free() -> None:
    """Drop what a run leaves behind: unreachable objects, cached blocks, Accelerate's shared state.

    Accelerate keeps device and precision for the whole process, so the next run would inherit
    them. What you still hold in a variable (a model, a traceback) stays: delete it first. cuBLAS's
    workspaces go too, so that every run takes its own.
    """
    gc.collect()
    if device().type == "cuda" and hasattr(torch._C, "_cuda_clearCublasWorkspaces"):
        torch._C._cuda_clearCublasWorkspaces()
    if device().type != "cpu":
        torch.accelerator.empty_cache()
    forget_libraries()
