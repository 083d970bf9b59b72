"""What the caller and the process of a script say to each other. Nothing is loaded for it here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..passages import Seen
    from ..replay import Simulation


@dataclass
class Attempt:
    """One run of a script in its process. `asked` are the attributes of `Script`, `card` the
    keywords of `simulate`; `limited` says whether memory may run out, `compiles`
    whether torch.compile compiles."""

    asked: dict
    card: dict
    limited: bool = True
    compiles: bool = True
    environment: dict = field(default_factory=dict)


@dataclass
class Outcome:
    """What came of an attempt: a simulation, or a failure in words; or what to try again."""

    found: Simulation | Seen | None = None
    failure: str = ""
    notes: list[str] = field(default_factory=list)
    updates: int = 0
    way: str = ""
    sent: float = 0.0  # bytes that a rank's link carries in a step
    again: dict | None = None
