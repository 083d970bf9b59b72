"""What the planner keeps of a prediction."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from helpers.prediction import Prediction


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

    @classmethod
    def of(cls, prediction: Prediction, micro_batches: int = 1) -> "Facts":
        """From a prediction whose single micro-batch stands for so many of a step."""
        bytes_ = prediction.timeline.copy()  # [events, categories]
        names = list(prediction.by_category)
        before = bytes_.sum(axis=1).max()
        if micro_batches > 1:  # the later ones find the gradients of the first
            gradients = prediction.peak_by_category["gradients"]
            bytes_[:, names.index("gradients")] = gradients
        total = bytes_.sum(axis=1)
        more = int(total.max() - before)
        sizes = {
            "peak_allocated": prediction.peak_allocated + more,
            "peak_reserved": prediction.peak_reserved + more,
            "by_category": dict(zip(names, bytes_[total.argmax()].tolist(), strict=True)),
            "phases": _peaks(total, prediction.phases),
            "note": prediction.note,
        }
        return cls(**sizes, **_times(prediction, micro_batches))


def _peaks(total: np.ndarray, phases: list[tuple[int, str]]) -> dict[str, int]:
    """The largest of the bytes after each event, by the phase that the event belongs to."""
    starts = [0, *(event for event, _ in phases[1:]), len(total)]
    labels = np.repeat([name for _, name in phases], np.diff(starts))
    return pd.Series(total).groupby(labels).max().to_dict()


def _times(prediction: Prediction, micro_batches: int) -> dict:
    """The fields of time: all of a step but its end is repeated for each micro-batch."""
    time = prediction.time
    if not (time and time.step_seconds):
        return {}
    once = sum(time.phases.get(name, 0) for name in ("optimizer step", "between steps"))  # a share
    scale = micro_batches - (micro_batches - 1) * once
    return {
        "step_seconds": scale * time.step_seconds,
        "low": scale * time.low,
        "high": scale * time.high,
        "limited_by": time.limited_by,
    }
