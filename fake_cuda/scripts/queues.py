"""Streams and events of a card that is not there: they keep their order, their work is done."""

import time
from contextlib import AbstractContextManager, nullcontext

import torch

from ..streams import DEFAULT, Streams

CUDA = torch.device("cuda", 0)


def done(*_, **__) -> None:
    """What a queue is asked to do or to wait for, it has done."""


def queues(streams: Streams) -> dict:
    """By the name in torch.cuda: its classes, and the functions that choose a stream."""

    class Event(_Event):
        of = streams

    class Stream(_Stream):
        of, event = streams, Event

    def stream(chosen) -> AbstractContextManager:
        return nullcontext() if chosen is None else chosen

    def set_stream(chosen) -> None:
        if chosen is not None:
            streams.choose(chosen.stream_id)

    found = dict(Stream=Stream, Event=Event, stream=stream, set_stream=set_stream)
    found |= dict(current_stream=lambda *_, **__: Stream(stream_id=streams.now))
    return found | dict(default_stream=lambda *_, **__: Stream(stream_id=DEFAULT))


class _Event:
    """A mark in a stream; its time is this machine's."""

    device, cuda_event, at = CUDA, 0, 0.0
    of: Streams

    def __init__(self, *_, **__):
        self.place = 0  # nothing is waited for until it is recorded

    def record(self, stream=None) -> None:
        self.at, self.place = time.perf_counter(), self.of.mark()

    wait = done  # a stream does

    def synchronize(self) -> None:
        self.of.host_waits(self.place)

    def query(self) -> bool:
        """Whether the card has come past it: it has, and now the host knows."""
        self.synchronize()
        return True

    def elapsed_time(self, other) -> float:
        return 1000 * (other.at - self.at)


class _Stream:
    """A queue of work. As torch's own, `with` makes it the one on which work is done."""

    device, device_index = CUDA, 0
    of: Streams
    event: type[_Event]

    def __init__(self, device=None, priority: int = 0, stream_id: int | None = None, **_):
        self.priority = priority
        self.stream_id = self.of.new(priority) if stream_id is None else stream_id

    cuda_stream = property(lambda self: self.stream_id)

    def __eq__(self, other) -> bool:
        return isinstance(other, _Stream) and self.stream_id == other.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def __enter__(self):
        self.of.enter(self.stream_id)
        return self

    def __exit__(self, *_) -> None:
        self.of.leave()

    wait_event = wait_stream = done

    def record_event(self, event=None):
        event = event or self.event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def query(self) -> bool:
        """Whether all its work is done: it is, and now the host knows."""
        self.synchronize()
        return True

    def is_capturing(self) -> bool:
        return False
