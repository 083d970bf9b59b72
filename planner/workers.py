"""Copies of this process that predict side by side, one question at a time each.

A copy (`fork`) has all that is loaded, where a new process would load it again for seconds. It is
safe where no other thread holds a lock at that moment, so the command makes copies and a notebook
does not; on macOS libraries of the system do not bear it (Python's documentation of
multiprocessing, "Contexts and start methods"). What they answer does not depend on who answers.
"""

import gc
import multiprocessing
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

import torch

MOST = 2  # copies: each takes half a GiB and more of the machine's memory. Our choice.


class Ended(Exception):
    """The copies were ended before they had answered."""


def usual_number() -> int:
    """How many processes predict: one where this one must not be copied, or has one core."""
    if sys.platform != "linux" or threading.active_count() > 1:
        return 1
    return min(MOST, len(os.sched_getaffinity(0)))


class Workers:
    """So many copies of this process, each of which calls `answer` with what it is asked.

    Where one is ended from outside, as the system does where memory runs out, this process answers
    in its place. An error of `answer` is raised where it was asked.
    """

    def __init__(self, count: int, answer: Callable):
        self.answer, self.closed = answer, False
        self.processes: list[multiprocessing.Process] = []
        # Those that wait for a question; None is this process, in the place of one that has ended.
        self.idle: queue.SimpleQueue[Connection | None] = queue.SimpleQueue()
        context, ours = multiprocessing.get_context("fork"), []
        for _ in range(count):
            own, other = context.Pipe()
            ours.append(own)
            # All of ours are closed in the copy: so it sees it when this process has ended.
            process = context.Process(target=_serve, args=(other, [*ours], answer), daemon=True)
            with _no_interrupt():
                process.start()
            other.close()
            self.processes.append(process)
            self.idle.put(own)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_) -> None:
        self.end()
        for process in self.processes:
            process.join()

    def end(self) -> None:
        """End the copies: who waits for one of them gets `Ended`."""
        self.closed = True
        for process in self.processes:
            process.terminate()

    def ask(self, *question):
        """The answer to a question, when one of them has it."""
        copy = self.idle.get()
        told = copy and _told(copy, question)
        if told:
            self.idle.put(copy)
            good, found = told
            if good:
                return found
            raise found
        try:
            if self.closed:
                raise Ended
            return self.answer(*question)
        finally:
            self.idle.put(None)

    def each(self, function: Callable, values: list) -> list:
        """What a function that asks returns for each value, in their order; all at once."""
        with ThreadPoolExecutor(max(1, len(values))) as threads:
            try:
                return list(threads.map(function, values))
            except KeyboardInterrupt:  # else the threads would be waited for, and they for answers
                self.end()
                raise


def _told(copy: Connection, question: tuple) -> tuple[bool, object] | None:
    """Whether a copy could answer, and its answer or its error; None where it has ended."""
    try:
        copy.send(question)
        return copy.recv()
    except (EOFError, OSError):
        return None


@contextmanager
def _no_interrupt() -> Iterator[None]:
    """Ctrl-C waits: in a copy that has just begun, hooks of libraries would print what it stops."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(connection: Connection, others: list[Connection], answer: Callable) -> None:
    """The life of a copy."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the other process, and it this one
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for other in others:
        other.close()
    torch.set_num_threads(1)  # OpenMP's threads are not copied, and would be waited for
    gc.freeze()  # what is loaded stays: no collection looks at it, and its pages stay shared
    with suppress(EOFError, OSError):
        while True:
            question = connection.recv()
            try:
                told = True, answer(*question)
            except Exception as error:
                told = False, error
            connection.send(told)
            del told, question
            # What stays, such as a library that was loaded for it, is not swept with the next
            # prediction's garbage, over and over.
            gc.collect()
            gc.freeze()
