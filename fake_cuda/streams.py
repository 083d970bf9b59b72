"""A card's streams: on which a block is made, which others use it, and when the host knows it done.

A stream is a queue of work. torch's allocator keeps a free block for the stream on which it was
made (`BlockComparatorSize` in c10/cuda/CUDACachingAllocator.cpp compares streams first). Where
`Tensor.record_stream` has named other streams, a block that is freed waits until these have come to
that place in their work, and the allocator asks for that at its next request (`insert_events`,
`process_events` there).

When a card comes to a place is a matter of time, and torch's page on `record_stream` calls this a
race. Here the host runs ahead of the card, as it should, and knows nothing to be done before it
waits for something; then all is done that it had asked for earlier, on whatever stream, and what
the card does while the host gets going again. FSDP waits for the end of a layer before it gathers
the next but one, which "prevents the extra memory usage from recordStream from stacking up" (its
author, in torchtitan's issue 735). Where the card is the quicker one, less is reserved; where what
travels lags far behind, more.
"""

import bisect
from contextlib import suppress
from functools import cached_property
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from .card import Card
from .constants import CONSTANTS
from .kernels import Kernels, Missing
from .operations import Operation

# Seconds from the end of what the host has waited for until it asks for more.
REACTION = CONSTANTS.host.reaction
IN_A_POOL = 32  # streams of a priority, which are given out in turn (c10/cuda/CUDAStream.cpp)
DEFAULT = 0  # the number of the stream on which all work is done that names no other
STREAM = "stream of fake_cuda"  # in the metadata of autograd's nodes


class Reusable(NamedTuple):
    """Among a trace's events: a storage is dead, and no stream can still be at work on it."""

    storage: int


class Streams:
    """The streams of a card, for a trace whose events and operations are these.

    A place is a number: how many marks the host had asked for until then, on all streams.
    """

    def __init__(self, events: list, operations: list[Operation] = (), card: Card | None = None):
        self.events, self.operations, self.card = events, operations, card
        # The stream that was chosen, and the node of autograd that ran then; inner ones follow.
        self.chosen: list[tuple[int, object]] = [(DEFAULT, None)]
        self.made_on: list[int] = []  # of each storage
        self.used_on: set[int] = set()  # storages that another stream than their own uses
        self.late: set[int] = set()  # those of them that have died
        self.waiting: dict[int, int] = {}  # those of them that are not reusable yet: from where on
        self.count: dict[int, int] = {}  # a priority -> how many streams of it were made
        self.issued = [0]  # at each place: how many operations
        self.place = 0

    def new(self, priority: int = 0) -> int:
        """The number of one more stream."""
        before = self.count.get(priority, 0)
        self.count[priority] = before + 1
        return 1 + before % IN_A_POOL + (IN_A_POOL if priority < 0 else 0)

    @property
    def now(self) -> int:
        """The stream on which work is done.

        autograd's engine runs a node on the stream of its forward pass (`evaluate_function` and
        `Node::stream` in torch/csrc/autograd); a hook in it may choose another.
        """
        stream, node = self.chosen[-1]
        if not self.count:
            return DEFAULT
        running = torch._C._current_autograd_node()
        return stream if running in (None, node) else running.metadata.get(STREAM, DEFAULT)

    def enter(self, stream: int) -> None:
        """Work goes to this stream until `leave`."""
        self.chosen.append((stream, torch._C._current_autograd_node()))

    def leave(self) -> None:
        self.chosen.pop()

    def choose(self, stream: int) -> None:
        """Work goes to this stream from now on."""
        self.leave()
        self.enter(stream)

    def remember(self, made) -> None:
        """The backward pass of what was made now is for the present stream; so is the sum of a
        leaf's gradients, whose node torch makes when the leaf is first used."""
        leaves = (leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor))
        for node in filter(None, map(_node, leaves)):
            sums = (
                one
                for one, _ in node.next_functions
                if one and one.name().endswith("AccumulateGrad")
            )
            for one in (node, *sums):
                one.metadata.setdefault(STREAM, self.now)

    # --------------------------------------------------------------------------------- the storages
    def born(self) -> None:
        """One more storage is made, on the present stream."""
        self.made_on.append(self.now)

    def use(self, storage: int, stream: int) -> None:
        """`record_stream`: it means nothing for the stream on which the storage was made."""
        if stream != self.made_on[storage]:
            self.used_on.add(storage)

    def free(self, storage: int) -> None:
        """A storage dies: its events, and from which place on it is reusable."""
        self.events.append(~storage)
        if storage in self.used_on:
            self.late.add(storage)
            self.waiting[storage] = self.mark()

    def mark(self) -> int:
        """An event is recorded: its place."""
        self.place += 1
        self.issued.append(len(self.operations))
        return self.place

    def host_waits(self, place: int | None = None) -> None:
        """The host waits for a place; without one, for all that it has asked for."""
        if not self.waiting:
            return
        seen = self.place if place is None else self._when_it_reacts(place)
        for storage in [one for one, at in self.waiting.items() if at <= seen]:
            del self.waiting[storage]
            self.events.append(Reusable(storage))

    @cached_property
    def kernels(self) -> Kernels | None:
        """How long the card takes; None where its rates are not known."""
        try:
            return self.card and Kernels(self.card)
        except Missing:
            return None

    def _when_it_reacts(self, place: int) -> int:
        """Where the card is when the host, which waited for that place, asks for more. On a card
        whose rates are not known, just there."""
        left, done = REACTION, self.issued[place]
        with suppress(Missing):
            while self.kernels and done < len(self.operations):
                operation = self.operations[done]
                if operation.kind not in ("view", "wait"):
                    left -= self.kernels.seconds(operation)[1]
                if left < 0:
                    break
                done += 1
        return max(place, bisect.bisect_right(self.issued, done) - 1)


def _node(tensor: torch.Tensor):
    """The node of autograd that made it. Of some views that were written to afterwards torch tells
    none, and raises an error where a script that does not ask has none."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None
