"""What CUDA does otherwise than a CPU, and what fake tensors cannot do, put in by hand.

A module for each library; each of their context managers names its sources.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ..trace import Trace
from .attention import fused_attention
from .autocast import FLOAT32, HALF, autocast
from .bitsandbytes import quantized
from .device import caches, host_copies
from .experts import grouped_products
from .flex import flex_attention
from .liger import patches
from .modules import modules
from .optimizers import all_parameters_at_once, every_step, half_precision
from .triton import launches, wrappers

__all__ = ["FLOAT32", "HALF", "cuda_choices", "fake_modules"]
ON_CUDA = (autocast, host_copies, fused_attention, all_parameters_at_once, half_precision, caches)
ON_CUDA += (wrappers, patches)


@contextmanager
def cuda_choices(trace: Trace) -> Iterator[None]:
    """Fake CPU tensors take CUDA's way; those of a simulated CPU their own."""
    with ExitStack() as stack:
        for choice in ON_CUDA if trace.cuda else ():
            stack.enter_context(choice(trace))
        yield


@contextmanager
def fake_modules(trace: Trace) -> Iterator[None]:
    """Libraries take fake tensors where they ask for real ones."""
    with modules(trace), every_step(trace.here), quantized(trace.here, trace.cuda):
        with launches(trace), flex_attention(trace), grouped_products(trace):
            yield
