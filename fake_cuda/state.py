"""What libraries and random numbers keep for the whole process, forgotten or put back."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState


def _bitsandbytes():
    """bitsandbytes' record of the parameters, and with them the models, that it treats apart."""
    library = sys.modules.get("bitsandbytes")
    return library and library.optim.GlobalOptimManager.get_instance()


def forget_libraries() -> None:
    """Clear Accelerate's device and precision, and what bitsandbytes was told of parameters."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if manager := _bitsandbytes():
        manager.initialize()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Run a block with libraries that know nothing yet. Afterwards they, and the random numbers,
    go on where they were: a Trainer of the caller's own may be alive."""
    kinds, manager = (PartialState, AcceleratorState, GradientState), _bitsandbytes()
    states = [kind._shared_state for kind in kinds] + ([vars(manager)] if manager else [])
    kept, python, numpy = [dict(s) for s in states], random.getstate(), np.random.get_state()
    dtype = torch.get_default_dtype()
    forget_libraries()
    try:
        with torch.random.fork_rng(), torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    finally:
        forget_libraries()
        for state, before in zip(states, kept, strict=True):
            state.update(before)
        torch.set_default_dtype(dtype)
        random.setstate(python)
        np.random.set_state(numpy)
