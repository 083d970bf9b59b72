"""What optimizers, GradScaler and Accelerate pick on CUDA."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils

from ..here import Here
from ..trace import Trace

try:
    from accelerate.state import AcceleratorState
except ModuleNotFoundError:  # a loop of one's own does without it
    AcceleratorState = None

DEVICES = ["cpu", "cuda"]  # the second where a script asks a tensor for its device


@contextmanager
def all_parameters_at_once(trace: Trace) -> Iterator[None]:
    """Optimizers and the clipping of gradients take lists of tensors by default (foreach), which
    torch asks for the types of the tensors and for their device (_default_to_fused_or_foreach).

    A hack: the lists of types are torch's own, and the whole process's. A fake tensor in them is
    nothing to a run with real ones.
    """
    types = (torch_optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types)
    for kinds in types:
        kinds.append(FakeTensor)
    devices = (torch_optimizer, "_get_foreach_kernels_supported_devices", lambda: DEVICES)
    try:
        with trace.here.replaced(devices):
            yield
    finally:
        for kinds in types:
            kinds.remove(FakeTensor)


@contextmanager
def half_precision(trace: Trace) -> Iterator[None]:
    """Accelerate does not train in fp16 on a CPU: bf16, which has the same bytes, stands for it."""
    if AcceleratorState is None:
        yield
        return
    prepare = AcceleratorState.__init__

    def state(self, mixed_precision=None, *args, **options):
        asked = mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        if asked == "fp16":
            trace.fp16, mixed_precision = True, "bf16"
        prepare(self, mixed_precision, *args, **options)

    with trace.here.replaced((AcceleratorState, "__init__", state)):
        yield


@contextmanager
def every_step(here: Here) -> Iterator[None]:
    """A GradScaler would find infinite gradients, because every value is 1, and skip the step."""

    def step(scaler, optimizer, found, *args, **options):
        return optimizer.step(*args, **options)

    with here.replaced((torch.amp.GradScaler, "_maybe_opt_step", step)):
        yield
