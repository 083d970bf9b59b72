"""A card's streams: on which a block is made, which others use it, and what the host has seen done.

A stream is a queue of work. torch's allocator keeps a free block for the stream on which it was
made (`BlockComparatorSize` in c10/cuda/CUDACachingAllocator.cpp compares streams first). Where
`Tensor.record_stream` has named other streams, a block that is freed waits until they have come to
that place in their work, and the allocator asks for that at its next request (`insert_events`,
`process_events` there).

When the card comes to a place is a matter of time. What is known is what the host waited for, and
what streams wait for among each other: a block counts as free from then on, and not before. That is
so where the host runs ahead of the card, as it should; where the card is the quicker one, blocks
are free sooner and less is reserved. torch's page on `record_stream` calls both a race, and FSDP
lets the host wait for a layer's end before it gathers the next but one (`limit_all_gathers`, for
"GPU memory usage from only two consecutive FSDP instances").
"""

from typing import NamedTuple

IN_A_POOL = 32  # streams of a priority, which are given out in turn (c10/cuda/CUDAStream.cpp)
DEFAULT = 0  # the number of the stream on which all work is done that names no other


class Reusable(NamedTuple):
    """Among a trace's events: a storage is dead, and no stream can still be at work on it."""

    storage: int


class Streams:
    """The streams of a card, for a trace whose events are these.

    A place in the work of all streams is a clock: a stream's number -> marks that it has passed.
    What a backward pass makes counts for the stream on which it is asked for; torch's engine takes
    that of each operation's forward pass, which is another one only where a script mixes them.
    """

    def __init__(self, events: list):
        self.events = events
        self.now = DEFAULT  # the stream on which work is done
        self.made_on: list[int] = []  # of each storage
        self.used_on: dict[int, set[int]] = {}  # a storage -> other streams that use it
        self.late: set[int] = set()  # storages that were freed while other streams used them
        self.waiting: dict[int, dict[int, int]] = {}  # those of them that are not reusable yet
        self.count: dict[int, int] = {}  # a priority -> how many streams of it were made
        self.marks: dict[int, int] = {}  # a stream -> how many marks it has
        self.follows: dict[int, dict[int, int]] = {}  # a stream -> what its next work comes after
        self.seen: dict[int, int] = {}  # what the host has seen done

    def new(self, priority: int = 0) -> int:
        """The number of one more stream."""
        before = self.count.get(priority, 0)
        self.count[priority] = before + 1
        return 1 + before % IN_A_POOL + (IN_A_POOL if priority < 0 else 0)

    # ------------------------------------------------------------------------------------ the order
    def mark(self, stream: int) -> dict[int, int]:
        """An event is recorded on a stream: where it stands, and what it has waited for."""
        self.marks[stream] = self.marks.get(stream, 0) + 1
        return self.follows.get(stream, {}) | {stream: self.marks[stream]}

    def follow(self, stream: int, clock: dict[int, int]) -> None:
        """What is put on a stream from now on waits for that place."""
        self.follows[stream] = _later(self.follows.get(stream, {}), clock)

    def host_waits(self, clock: dict[int, int] | None = None) -> None:
        """The host waits for a place; without one, for all that is on the present stream."""
        self.seen = _later(self.seen, self.mark(self.now) if clock is None else clock)
        for storage, clock in list(self.waiting.items()):
            if all(self.seen.get(stream, 0) >= mark for stream, mark in clock.items()):
                del self.waiting[storage]
                self.events.append(Reusable(storage))

    def host_waits_for_all(self) -> None:
        """The host waits for the card."""
        for stream in [DEFAULT, *self.marks]:
            self.host_waits(self.mark(stream))

    # --------------------------------------------------------------------------------- the storages
    def born(self) -> None:
        """One more storage is made, on the present stream."""
        self.made_on.append(self.now)

    def use(self, storage: int, stream: int) -> None:
        """`record_stream`: it means nothing for the stream on which the storage was made."""
        if stream != self.made_on[storage]:
            self.used_on.setdefault(storage, set()).add(stream)

    def free(self, storage: int) -> None:
        """A storage dies: its events, and where it waits what for."""
        self.events.append(~storage)
        if streams := self.used_on.pop(storage, None):
            self.late.add(storage)
            self.waiting[storage] = {stream: self.mark(stream)[stream] for stream in streams}


def _later(one: dict[int, int], other: dict[int, int]) -> dict[int, int]:
    """The first clock at which both have passed."""
    return {k: max(one.get(k, 0), other.get(k, 0)) for k in one.keys() | other.keys()}
