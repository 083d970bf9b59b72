"""Whether a run asks for the same sums each time, for which some kernels take more memory."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_told: ContextVar[bool | None] = ContextVar("told", default=None)
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # which a deterministic run on a card has to set
FULL = {WORKSPACE: ":16:8", "FLASH_ATTENTION_DETERMINISTIC": "1"}  # of enable_full_determinism


def in_order() -> bool:
    """Whether kernels that could add up in any order may not: what a library was told, or else
    `torch.use_deterministic_algorithms(True)`, unless that only warns."""
    told = _told.get()
    if told is not None:
        return told
    enabled = torch.are_deterministic_algorithms_enabled()
    return enabled and not torch.is_deterministic_algorithms_warn_only_enabled()


@contextmanager
def told(order: bool | None) -> Iterator[None]:
    """For a while kernels are in order, or not, or (None) as torch's switch says."""
    before = _told.set(order)
    try:
        yield
    finally:
        _told.reset(before)


@contextmanager
def full_determinism(on: bool) -> Iterator[None]:
    """As under `TrainingArguments(full_determinism=True)`, without its switches of the process.

    Its variables of the environment are set: `simulate` puts them back.
    """
    os.environ.update(FULL if on else {})
    with told(True if on else None):
        yield


def workspace_told() -> int | None:
    """Bytes of cuBLAS's workspace by the environment, ":SIZE:COUNT" in KiB once or more
    (parseChosenWorkspaceSize in aten/src/ATen/cuda/CublasHandlePool.cpp); None where not told."""
    parts = re.findall(r":(\d+):(\d+)", os.environ.get(WORKSPACE, ""))
    return sum(int(size) * int(count) * 1024 for size, count in parts) if parts else None
