"""What the planner keeps of a prediction."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Facts:
    """A prediction in numbers: bytes, and seconds of a step, 0 where no time is predicted.

    Args:
        peak_allocated: bytes of all tensors at the peak.
        peak_reserved: bytes that the allocator took from the driver.
        by_category: bytes at the peak, by what they are for.
        phases: bytes at each phase's own peak, by its name.
        step_seconds: of one optimizer step, with all its micro-batches.
        low: the shortest that it may take.
        high: the longest.
        limited_by: what the step waits for most.
        note: what was predicted otherwise than it was asked.
        forward: seconds of a step in which the card works in forward passes.
        end: seconds of a step's end, the optimizer's and what follows.

    Where an answer is recorded, nobody knows the last two: they are 0.
    """

    peak_allocated: int
    peak_reserved: int
    by_category: dict[str, int]
    phases: dict[str, int]
    step_seconds: float = 0.0
    low: float = 0.0
    high: float = 0.0
    limited_by: str = ""
    note: str = ""
    forward: float = 0.0
    end: float = 0.0
