"""What is replaced for a simulation is replaced in its thread alone.

A model may be in training in another thread while one is simulated in this. Functions of libraries
belong to the whole process, so each replaced one asks for its thread, and is the original's in all
others. What no thread has of its own stays shared: random numbers, and torch's default type.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch


class Here:
    """The thread that this was made in; `everywhere`, all threads (of a script's own process)."""

    def __init__(self, everywhere: bool = False):
        self.thread = None if everywhere else threading.get_ident()
        self.before: list[tuple[object, str, object]] = []  # (owner, name, what was there)

    def __call__(self) -> bool:
        """Whether this is that thread."""
        return self.thread is None or self.thread == threading.get_ident()

    def instead(self, original: Callable, function: Callable) -> Callable:
        """A function that is `function` here, and `original` in all other threads."""
        if self.thread is None:
            return function

        def either(*args, **kwargs):
            return (function if self() else original)(*args, **kwargs)

        return either

    @contextmanager
    def replaced(self, *replacements: tuple[object, str, Callable]) -> Iterator[None]:
        """Put functions in the place of others, for a while: (owner, name, function) of each."""
        if not replacements:
            yield
            return
        (owner, name, function), *others = replacements
        self.before.append((owner, name, getattr(owner, name)))
        try:
            with patch.object(owner, name, self.instead(getattr(owner, name), function)):
                with self.replaced(*others):
                    yield
        finally:
            self.before.pop()

    @contextmanager
    def originals(self) -> Iterator[None]:
        """For a while all is as before: for torch's compiler, which knows functions by identity."""
        with ExitStack() as stack:
            for owner, name, original in reversed(self.before):
                stack.enter_context(patch.object(owner, name, original))
            yield


class OwnHere:
    """A class attribute of which the thread of a simulation has a value of its own."""

    def __init__(self, here: Here, own: object, others: object):
        self.here, self.own, self.others = here, own, others

    def __get__(self, instance, owner=None):
        return self.own if self.here() else self.others


class DictHere:
    """A library's dictionary, of which the thread of a simulation has one of its own."""

    def __init__(self, here: Here, others: dict):
        self.here, self.own, self.others = here, {}, others

    def _dict(self) -> dict:
        return self.own if self.here() else self.others

    def __contains__(self, key) -> bool:
        return key in self._dict()

    def __getitem__(self, key):
        return self._dict()[key]

    def __setitem__(self, key, value):
        self._dict()[key] = value
