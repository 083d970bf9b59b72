"""The versions of libraries by whose rules a run is simulated, whatever is installed.

    simulate(run, card, versions=Versions(torch="2.4.0"))
    with rules_of(torch="2.4.0"):  # for what calls `simulate` without a word of versions
        predict(...)

What depends on a version asks here, by a property named after what that version does.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

# What wheels of torch bring, since which of its versions (its release notes): the usual wheel's
# cuDNN. A build for the CPU has none, and is taken for such a wheel.
CUDNN = 91501  # of the wheels of torch 2.11 to 2.14
WHEELS = {(2, 15): 92600, (2, 11): CUDNN}
OLDER_WHEELS = 90100


def _numbers(version: str) -> tuple[int, int]:
    """(2, 4) of "2.4.0.dev1+cpu"."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if not found:
        raise ValueError(f"torch={version!r} is no version of torch, such as 2.4.0")
    return int(found[1]), int(found[2])


@dataclass(frozen=True)
class Versions:
    """Versions of libraries, and what they decide.

    Args:
        torch: as in `torch.__version__`; the installed one if not told.
        cudnn: as `torch.backends.cudnn.version()` has it; if not told the installed one for the
            installed torch, else that of the wheels of `torch`.

    Raises:
        ValueError: `torch` is no version.
    """

    torch: str = torch.__version__
    cudnn: int | None = None

    def __post_init__(self):
        number = _numbers(self.torch)
        if self.cudnn is None:
            installed = torch.backends.cudnn.version() if self.torch == torch.__version__ else None
            wheel = next((n for since, n in WHEELS.items() if number >= since), OLDER_WHEELS)
            object.__setattr__(self, "cudnn", installed or wheel)

    def since(self, major: int, minor: int) -> bool:
        return _numbers(self.torch) >= (major, minor)

    @property
    def workspace_is_counted(self) -> bool:
        """torch allocates cuBLAS's workspace itself since 1.11 (its release notes)."""
        return self.since(1, 11)

    @property
    def workspace_is_kept(self) -> bool:
        """Since 2.15 each product has its workspace anew, if TORCH_CUBLAS_WORKSPACE_CACHE is not 1
        (its documentation of environment variables; CublasHandlePool.cpp); before, one was kept."""
        return not self.since(2, 15) or os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"

    @property
    def large_workspace_on_blackwell(self) -> bool:
        """Pull request 175344, which came after the cut of 2.11."""
        return self.since(2, 12)

    @property
    def efficient_reads_groups(self) -> bool:
        """Memory-efficient attention reads grouped heads (fewer keys than queries) as they are."""
        return self.since(2, 14)

    @property
    def cudnn_first(self) -> bool:
        """cuDNN's attention is tried first on Hopper and B200: with cuDNN after 9.15.0, as every
        wheel for CUDA 13 brings it (check_prefer_cudnn_attention in sdp_utils.cpp)."""
        return self.cudnn > 91500

    @property
    def wide_cudnn(self) -> bool:
        """cuDNN's attention takes heads of more than 128, with cuDNN after 9.22.0
        (check_cudnn_tensor_shapes, check_cudnn_d256_bprop_head_dim in sdp_utils.cpp)."""
        return self.since(2, 15) and self.cudnn > 92200


_CHOSEN: ContextVar[Versions | None] = ContextVar("versions", default=None)


def chosen() -> Versions:
    """The versions of the `rules_of` around this call; else the installed ones."""
    return _CHOSEN.get() or Versions()


@contextmanager
def rules_of(**versions) -> Iterator[Versions]:
    """Simulate what runs inside, in this thread, by the rules of these versions.

    Args:
        versions: those of `Versions`; what is not told is as around this block.
    """
    told = Versions(**versions)
    token = _CHOSEN.set(told)
    try:
        yield told
    finally:
        _CHOSEN.reset(token)
