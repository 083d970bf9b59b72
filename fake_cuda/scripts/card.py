"""The card of a script: its memory is what the trace has seen so far, its time the trace's."""

from collections.abc import Iterator

import torch

from ..streams import Reusable
from ..trace import EMPTY_CACHE, HOST, Trace
from ..versions import CUDNN
from .answers import Memory, answers, patches

NCCL = (2, 29, 7)  # of the wheels whose CUDA is `answers.VERSION` (RELEASE.md of torch)


class MemoryOfTrace(Memory):
    """Torch's counters, fed with what happened so far.

    Where it runs out (torch.OutOfMemoryError), what the run needed before is no part of what is
    predicted, if the script goes on: `forget` is called.
    """

    def __init__(self, trace: Trace, total: int, taken: int, limited: bool, forget=lambda: None):
        super().__init__(total, taken, limited)
        self.trace, self.forget, self.seen, self.pending = trace, forget, 0, False
        self.streams = trace.streams

    def now(self) -> "MemoryOfTrace":
        while self.seen < len(self.trace.events):
            at, event = self.seen, self.trace.events[self.seen]
            self.seen += 1
            if event == EMPTY_CACHE:
                self.empty_cache()
            elif isinstance(event, Reusable):
                if event.storage in self.waiting:
                    self.release(event.storage)
            elif isinstance(event, int) and ~event in self.where:
                (self.wait if ~event in self.streams.late else self.release)(~event)
            elif isinstance(event, int) and event >= 0 and self.trace.kind[event] != HOST:
                if self.pending:
                    self.trace.since, self.pending = at, False
                self.malloc(event, self.trace.size[event], self.streams.made_on[event])
        return self

    def gave_up(self, i: int) -> None:
        self.pending = True
        self.forget()
        # Nor is there what the same operation makes after it, such as a product's workspace.
        later = (event for event in self.trace.events[self.seen :] if isinstance(event, int))
        for number in (i, *(event for event in later if event >= 0)):
            self.trace.kind[number] = HOST
        self.trace.empty_cache()


def card_of_script(trace: Trace, memory: Memory) -> Iterator[tuple]:
    """(owner, name, what stands there) of all of torch that tells of the card."""
    told = answers(trace.card, memory)
    told |= dict(synchronize=torch.cuda.synchronize, empty_cache=trace.empty_cache)
    yield from patches(told)
    yield torch.cuda.nccl, "version", lambda: NCCL
    yield torch.backends.cudnn, "version", lambda: CUDNN
    yield torch.backends.cudnn, "is_available", lambda: True
    yield torch.backends.cuda, "is_built", lambda: True
