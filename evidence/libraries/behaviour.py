"""One thing that a library once did with memory otherwise than today."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

from packaging.version import Version


@dataclass(frozen=True)
class Behaviour:
    """It stands in that version's source, named beside it, and has no number to tune."""

    name: str
    until: str  # the first version known to be without it
    on: Callable[[], AbstractContextManager]  # switches it on for a block

    def was_in(self, version: str) -> bool:
        return Version(version) < Version(self.until)


@contextmanager
def behaving(behaviours: Iterable[Behaviour]) -> Iterator[None]:
    """Switch behaviours on for a block."""
    with ExitStack() as stack:
        for behaviour in behaviours:
            stack.enter_context(behaviour.on())
        yield
