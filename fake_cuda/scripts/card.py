"""What torch.cuda and torch.accelerator answer about a card that is not there."""

import inspect
from collections.abc import Iterator
from contextlib import nullcontext

import torch

from ..allocator import Allocator
from ..choices import CUDNN
from ..trace import EMPTY_CACHE, HOST, Trace
from .counters import counters
from .host import CUDA

# CUDA of the wheels of today's torch, and what they are built for (torch's release notes).
VERSION = "13.0"
NCCL = (2, 29, 7)  # of the same wheels (RELEASE.md of torch)
ARCHITECTURES = [f"sm_{n}" for n in (75, 80, 86, 90, 100, 120)] + ["compute_120"]
COUNTERS = dict(memory_allocated="allocated", max_memory_allocated="most")
COUNTERS |= dict(memory_reserved="reserved", max_memory_reserved="peak")


class Anything(nullcontext):
    """A stream, an event, a choice of device: whatever is asked of it is done already."""

    def __init__(self, *_, **__):
        super().__init__(self)

    def is_capturing(self) -> bool:
        return False

    def __getattr__(self, name: str):
        return lambda *_, **__: 1.0


class Memory(Allocator):
    """torch's counters: the allocator's model, fed with what happened so far.

    With a `limit` in bytes it runs out as the card does: `torch.OutOfMemoryError`. What the run
    needed before that is no part of what is predicted, if the script goes on: `forget` is called.
    """

    def __init__(self, trace: Trace, limit: int | None = None, forget=lambda: None):
        super().__init__()
        self.trace, self.limit, self.forget, self.seen, self.most = trace, limit, forget, 0, 0
        self.ran_out, self.pending = 0, False

    def now(self, anew: bool = False) -> "Memory":
        """`anew`: from here on peaks are those to come."""
        while self.seen < len(self.trace.events):
            at, event = self.seen, self.trace.events[self.seen]
            self.seen += 1
            if event == EMPTY_CACHE:
                self.empty_cache()
            elif isinstance(event, int) and ~event in self.where:
                self.release(~event)
            elif isinstance(event, int) and event >= 0 and self.trace.kind[event] != HOST:
                if self.pending:
                    self.trace.since, self.pending = at, False
                self.malloc(event, self.trace.size[event])
                self.most = max(self.most, self.allocated)
        if anew:
            self.most, self.peak = self.allocated, self.reserved
        return self

    def malloc(self, i: int, size: int) -> None:
        peak = self.peak
        super().malloc(i, size)
        if self.limit is not None and self.reserved > self.limit:
            self.empty_cache()  # as torch does before it gives up
            if self.reserved > self.limit:
                self.ran_out, self.pending = self.ran_out + 1, True
                self.forget()
                self.release(i)  # it was never there
                self.trace.kind[i], self.peak = HOST, peak
                self.trace.empty_cache()
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate {size / 2**30:.2f} GiB. GPU 0 has a "
                    f"total capacity of {self.limit / 2**30:.2f} GiB."
                )
            self.peak = max(peak, self.reserved)


def answers(trace: Trace, asked: dict, memory: Memory, note) -> Iterator[tuple]:
    """(owner, name, function) of what torch says of the card; functions not named do nothing.

    `asked` has its name, its memory and what a CUDA context takes of that; `note` is called with a
    sentence where something is run otherwise than asked.
    """
    cuda, capability, name = torch.cuda, trace.card.capability, asked["card"]
    total = asked["memory"]

    def free(*_):
        return total - asked["context"] - memory.now().reserved, total

    told = dict(is_available=True, device_count=1, current_device=0, current_device_index=0)
    told |= dict(_get_device_index=0)  # which functions of theirs call that are left as they are
    told |= dict(is_initialized=True, get_arch_list=ARCHITECTURES)
    told |= dict(get_device_name=name, get_device_capability=capability, initial_seed=0)
    told |= dict(mem_get_info=free, cudart=Anything)
    told |= dict(current_accelerator=lambda *_, **__: CUDA, get_memory_info=free)
    told |= dict(current_stream=Anything, default_stream=Anything, stream=Anything)
    told |= dict(is_bf16_supported=lambda emulated=True: emulated or capability >= (8, 0))
    told |= dict(synchronize=cuda.synchronize)
    told |= dict(get_rng_state=lambda *_, **__: torch.get_rng_state())
    told |= dict(get_rng_state_all=lambda *_, **__: [torch.get_rng_state()])
    told |= dict(reset_peak_memory_stats=lambda *_, **__: memory.now(anew=True) and None)
    told |= dict(counters(trace, asked, memory))
    for key, counter in COUNTERS.items():
        told[key] = lambda *_, counter=counter, **__: getattr(memory.now(), counter)
    owners = (cuda, cuda.memory, cuda.nvtx, cuda.random, cuda.graphs, torch.accelerator)
    for owner in owners:
        for key, function in list(vars(owner).items()):
            own = inspect.isfunction(function) and function.__module__.startswith("torch.")
            if own and key != "range":
                value = told.get(key.replace("cached", "reserved"))
                silent = lambda *_, value=value, **__: value  # noqa: E731
                yield owner, key, value if callable(value) else silent

    yield from ((cuda, key, Anything) for key in ("Stream", "Event", "device", "device_of"))
    yield torch.version, "cuda", VERSION
    yield torch.cuda.nccl, "version", lambda: NCCL
    yield torch.backends.cudnn, "version", lambda: CUDNN
    yield torch.backends.cudnn, "is_available", lambda: True
    yield torch.backends.cuda, "is_built", lambda: True
