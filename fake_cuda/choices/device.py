"""What torch.cuda does for a run that asks it: caches, waits, copies to the host."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..trace import HOST, Trace

try:
    from transformers import trainer
except ModuleNotFoundError:  # a loop of one's own does without it
    trainer = None


@contextmanager
def caches(trace: Trace) -> Iterator[None]:
    """The allocator's cache is emptied, the host waits for the card."""
    with trace.here.replaced(
        *([(trainer, "clear_device_cache", trace.empty_cache)] if trainer else []),
        (torch.cuda, "empty_cache", trace.empty_cache),
        (torch.accelerator, "empty_cache", trace.empty_cache),
        (torch.cuda, "synchronize", lambda *_, **__: trace.work.wait(trace)),
        (torch.cuda, "reset_peak_memory_stats", lambda *_: None),
    ):
        yield


@contextmanager
def host_copies(trace: Trace) -> Iterator[None]:
    """`save_on_cpu` copies what is kept for backward, instead of keeping it where it is."""
    graph = torch.autograd.graph

    def to_host(tensor):
        copy = torch.empty_like(tensor)
        trace.see(copy, HOST)
        trace.work.copy(tensor, trace)
        trace.work.wait(trace)  # a copy to the CPU returns when it is done
        return copy

    def from_host(tensor):  # what comes back is a new tensor on the GPU
        trace.work.copy(tensor, trace)
        return torch.empty_like(tensor)

    def save_on_cpu(self, *_, **__):  # it is a kind of `saved_tensors_hooks`, with other hooks
        graph.saved_tensors_hooks.__init__(self, to_host, from_host)

    with trace.here.replaced((graph.save_on_cpu, "__init__", save_on_cpu)):
        yield
