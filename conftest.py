"""Set the course's environment before anything imports torch; nbval's kernels inherit it."""

import gc
import os
import sys
from collections.abc import Iterator

import pytest

from tools.shared.environment import set_variables

set_variables()
# Tests count a workspace of cuBLAS that is kept, as it was before torch 2.15.
os.environ.setdefault("TORCH_CUBLAS_WORKSPACE_CACHE", "1")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped where there is none")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Libraries are loaded while nothing is collected: what they make stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # only now: collecting notebooks should not wait for it

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="this machine has no CUDA device"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    notebook = item.path if item.path.suffix == ".ipynb" else None
    if notebook or "warm_kernels" in sys.modules:  # before nbval starts its kernel, and after
        import warm_kernels

        warm_kernels.start_for(notebook)


@pytest.fixture(scope="module", autouse=True)
def short_collections() -> None:
    """What stands before a file's tests stays out of garbage collection: imports and everything
    collected are many times as much as a test makes, and each run of the course sweeps it often."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or Triton takes what stays frozen for a leak, and says so
