"""Triton's kernels on fake tensors: a launch is left out, and noted with the bytes it moves.

A kernel writes into tensors that its wrapper in Python made beforehand, so a wrapper that runs
without its launches allocates what it allocates on a card. What the wrapper reads of the card after
a launch is not there: `Trace.number` refuses it, by the kernel's name.
"""

import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..card import Card
from ..here import Here
from ..launches import pointers, programs
from ..refusals import TRITON_ON_CPU, NotSimulated
from ..trace import Trace
from ..values import known

# What triton.testing.do_bench writes between two measurements (get_empty_cache_for_benchmark in
# third_party/nvidia/backend/driver.py), while an autotuner tries its configurations.
TUNING_SCRATCH = 256 * 2**20

# KiB of shared memory that a block of threads may take, at most: 99 on all others (CUDA C++
# Programming Guide, under compute capabilities).
SHARED = {(7, 0): 96, (7, 5): 64, (8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}

# What wrappers read of a kernel, as it is where each expert has an equal share of the tokens.
SHARES = {  # the tiles of all experts: compute_routing_metadata in liger_kernel/ops/fused_moe.py
    "_moe_router_prefix_sum_kernel": lambda given: (
        given["E"] * math.ceil(math.ceil(given["TK"] / given["E"]) / given["BLOCK_M_TOKEN"])
    )
}


class _OnCard(str):
    """The device that a wrapper is told: of type "cuda", but taken as "cpu" where tensors are made.

    A hack: torch takes the name of a device wherever it takes a device. It breaks where a wrapper
    asks for `isinstance(device, torch.device)`.
    """

    type, index = "cuda", 0

    def __eq__(self, other) -> bool:
        return str.__eq__(self, other) is True or str(other) in ("cuda", "cuda:0")

    def __ne__(self, other) -> bool:
        return not self == other

    __hash__ = str.__hash__


ON_CARD = _OnCard("cpu")


def installed() -> bool:
    """Whether Triton is there; it then is imported, since a run may do so at any moment."""
    if "triton" not in sys.modules and importlib.util.find_spec("triton") is None:
        return False
    import triton.runtime.jit  # noqa: F401

    return True


def _by_wrapper(frame) -> bool:
    """Whether a question comes from a module with Triton's kernels, or from Liger's own.

    Not from torch's compiler, which has a card of its own (`compiled_card`).
    """
    names = frame.f_globals
    module = names.get("__name__", "")
    return "triton" in names and not module.startswith("torch.") or module[:13] == "liger_kernel."


def _asks(here: Here, answer: Callable, usual: Callable) -> property:
    """A property of fake tensors that wrappers of kernels are given another answer of."""

    def get(tensor):
        wrapper = _by_wrapper(sys._getframe(1)) and here()
        return answer(tensor) if wrapper and tensor.fake_device.type == "cpu" else usual(tensor)

    return property(get)


class _Driver:
    """What Triton says of the card (triton/backends/nvidia/driver.py), by which wrappers choose."""

    def __init__(self, card: Card):
        self.utils = SimpleNamespace(get_device_properties=lambda _: facts)
        self.card = card
        facts = dict(max_shared_mem=1024 * SHARED.get(card.capability, 99), max_num_regs=65536)
        facts |= dict(multiprocessor_count=card.sms, warpSize=32)

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        major, minor = self.card.capability
        return GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_device(self) -> int:
        return 0


def _driver(trace: Trace, usual: Callable) -> property:
    """`triton.runtime.driver.active`, but for torch's compiler."""
    card = _Driver(trace.card)

    def get(config):
        asks = sys._getframe(1).f_globals.get("__name__", "")
        return card if trace.here() and not asks.startswith("torch.") else usual(config)

    return property(get)


def _launch(trace: Trace) -> Callable:
    """In the place of `JITFunction.run`."""

    def run(kernel, *args, grid=None, warmup=False, **options):
        if not trace.cuda:
            raise NotSimulated.uses(TRITON_ON_CPU)
        if not (warmup or trace.on_host):
            given = dict(zip(kernel.arg_names, args, strict=False)) | options
            name, share = kernel.fn.__name__, SHARES.get(kernel.fn.__name__)
            value = share and share(given)
            trace.launched(name, pointers(kernel, given), programs(grid, given), value)

    return run


def _tune(trace: Trace) -> Callable:
    """In the place of `Autotuner.run`: the first configuration, and once the scratch of trying."""
    tried: set[int] = set()

    def run(tuner, *args, **options):
        if len(tuner.configs) > 1 and id(tuner) not in tried:
            tried.add(id(tuner))
            number = trace.add(TUNING_SCRATCH, "temporaries")
            trace.events.append(~number)
        tuner.best_config = tuner.configs[0]  # which some wrappers ask for afterwards
        return tuner.fn.run(*args, **tuner.best_config.all_kwargs() | options)

    return run


def _guess(heuristics, *args, **options):
    """In the place of `Heuristics.run`: what they choose is how a kernel is compiled."""
    return heuristics.fn.run(*args, **options)


def _equal(trace: Trace) -> Callable:
    """In the place of `torch.equal`: a wrapper asks whether a gradient is 1, to spare a kernel."""
    usual = torch.equal

    def equal(one, other) -> bool:
        if not _by_wrapper(sys._getframe(2)) or all(known(t) is not None for t in (one, other)):
            return usual(one, other)
        trace.work.wait(trace)
        return False

    return equal


def _properties(trace: Trace) -> SimpleNamespace:
    card = trace.card
    major, minor = card.capability
    facts = dict(name=card.name, major=major, minor=minor, warp_size=32, gcnArchName="")
    return SimpleNamespace(**facts, multi_processor_count=card.sms, total_memory=card.memory)


@contextmanager
def launches(trace: Trace) -> Iterator[None]:
    """Kernels are left out; nothing where Triton is not installed."""
    if not installed():
        yield
        return
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.jit import JITFunction

    here = trace.here
    with here.replaced(
        (JITFunction, "run", _launch(trace)),
        (Autotuner, "run", _tune(trace)),
        (Heuristics, "run", _guess),
    ):
        yield


@contextmanager
def wrappers(trace: Trace) -> Iterator[None]:
    """Wrappers of kernels find their tensors on the card, and the card's facts."""
    if not installed():
        yield
        return
    from triton.runtime.driver import DriverConfig

    here, cuda = trace.here, torch.cuda
    driver = _driver(trace, DriverConfig.active.fget)
    device = _asks(here, lambda _: ON_CARD, FakeTensor.device.fget)
    on_cuda = _asks(here, lambda _: True, torch.Tensor.is_cuda.__get__)
    guard, available = cuda.device, cuda.is_available

    def is_available() -> bool:
        return _by_wrapper(sys._getframe(2)) or available()

    with ExitStack() as stack:
        stack.enter_context(patch.object(FakeTensor, "device", device))
        stack.enter_context(patch.object(FakeTensor, "is_cuda", on_cuda))
        stack.enter_context(patch.object(DriverConfig, "active", driver))
        stack.enter_context(
            here.replaced(
                (cuda, "get_device_properties", lambda *_: _properties(trace)),
                (cuda, "get_device_capability", lambda *_: trace.card.capability),
                (cuda, "current_device", lambda: 0),
                (cuda, "is_available", is_available),
                (torch, "equal", _equal(trace)),
                (guard, "__init__", lambda *_: None),
                (guard, "__enter__", lambda *_: None),
                (guard, "__exit__", lambda *_: False),
            )
        )
        yield
