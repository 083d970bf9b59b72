"""Simulate the memory and time of a training run on a CUDA GPU: without one, before it runs.

The real training code runs on *fake* tensors, which have a shape and a type but no data. A dispatch
mode logs when each storage is born and when it dies; replayed through a model of CUDA's caching
allocator, the log gives the peak and what it is made of. Fake tensors claim to live on the CPU, so
the choices that CUDA makes differently are put in by hand (`choices`), each with its source.

    import fake_cuda
    print(fake_cuda.estimate(model, batch, torch.optim.AdamW, gpu="T4"))  # README.md has an example

`estimate` makes the plain loop of what it is given; any other run is simulated as it is:

    from fake_cuda import simulate
    found = simulate(run, (8, 0))  # `run` builds its model on the CPU and takes two optimizer steps
    found.peak_allocated, found.peak_reserved, found.by_category
    simulate(run, Card(...)).time  # of a step, on a card whose rates are known

The allocator's model repeats 25 logs of CUDA's own to the byte, recorded with torch 2.6 and 2.11 on
a Blackwell, a Hopper and two unnamed cards; `read_log` reads such a log. Peaks of whole runs are
held against what others measured on eleven kinds of card, from a V100 to a B200 (evidence/sources).
Times of steps are held against what others timed (evidence/sources): good for comparing two runs on
a card, within a stated range for one.

Importing this package loads no library and changes nothing but what some of them would say when
they load; a name is fetched when it is first asked for.
"""

import importlib.util
import logging

from .loading import load

for library in ("bitsandbytes", "torchao", "torch.utils._pytree", "liger_kernel"):
    # On import they report kernels and type registrations that no simulation needs.
    logging.getLogger(library).setLevel(logging.ERROR)
# DeepSpeed sets its own level, and prints that it found no GPU once Accelerate has imported it.
logging.getLogger("DeepSpeed").addFilter(lambda record: "accelerator to CPU" not in str(record.msg))

HOMES = {  # the public names of each module
    "allocator": "Allocator MiB",
    "card": "Card",
    "estimates": "StepEstimate estimate",
    "logs": "read_log",
    "refusals": "NotSimulated",
    "simulation": "Simulation simulate",
    "state": "forget_libraries",
    "trace": "CATEGORIES",
    "versions": "Versions rules_of",
}
__all__ = sorted(name for names in HOMES.values() for name in names.split())


def __getattr__(name: str):
    """A public name, or a module of this package."""
    home = next((module for module, names in HOMES.items() if name in names.split()), None)
    if home is not None:
        value = getattr(load(f"{__name__}.{home}"), name)
    elif importlib.util.find_spec(f"{__name__}.{name}"):
        value = load(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value
