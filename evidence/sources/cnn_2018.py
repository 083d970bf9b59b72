"""A pass through three image models by u39kun/deep-learning-benchmark, with torch 1.0.

Sixteen pictures, all in 32 or all in 16 bits; the loss is the sum of the logits, and the pictures
get a gradient, too. By its author, and by NikolasEnt on machines of his own.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from evidence.cards import card
from evidence.image_models import densenet, resnet, vgg
from fake_cuda import Simulation, simulate

MODELS = {
    "vgg16": partial(vgg, 16),
    "resnet152": partial(resnet, 152),
    "densenet161": partial(densenet, 161),
}


def passes(gpu: str, name: str, dtype: torch.dtype) -> Simulation:
    """Two passes with backward."""

    def run():
        model = MODELS[name]().to(dtype).train()
        pictures = torch.zeros(16, 3, 224, 224, dtype=dtype, requires_grad=True)
        for _ in range(2):
            model.zero_grad()
            model(pictures).sum().backward()
        return model, pictures

    return simulate(run, card=card(gpu))


def runs(gpu: str) -> Iterator[tuple[str, Callable]]:
    for kind, dtype in (("fp16", torch.half), ("fp32", torch.float32)):
        for name in MODELS:
            yield f"{name} {kind}", partial(passes, gpu, name, dtype)


STEPS = {
    "cnn-u39kun-2080ti": partial(runs, "RTX 2080 Ti"),
    "cnn-nikolasent-2080ti": partial(runs, "RTX 2080 Ti"),
    "cnn-nikolasent-v100": partial(runs, "V100"),
}
