"""A pass through image models on an RTX 2080 Ti: ryujaehun/pytorch-gpu-benchmark, January 2020.

Twelve pictures, forward and backward, all in 32 or all in 16 bits. Its time begins before it copies
the pictures from the host's memory (7 MB in 32 bits), which is not simulated.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from evidence.cards import card
from evidence.image_models import densenet, mobilenet_v2, resnet, squeezenet, vgg
from fake_cuda import Simulation, simulate

MODELS = {  # torchvision's name
    **{f"densenet{n}": partial(densenet, n) for n in (121, 161, 201)},
    **{f"resnet{n}": partial(resnet, n) for n in (18, 34, 50, 101, 152)},
    "resnext50_32x4d": partial(resnet, 50, groups=32, width=4),
    "resnext101_32x8d": partial(resnet, 101, groups=32, width=8),
    **{f"wide_resnet{n}_2": partial(resnet, n, width=128) for n in (50, 101)},
    **{f"vgg{n}": partial(vgg, n) for n in (11, 13, 16, 19)},
    **{f"vgg{n}_bn": partial(vgg, n, norm=True) for n in (11, 13, 16, 19)},
    "squeezenet1_0": partial(squeezenet, old=True),
    "squeezenet1_1": partial(squeezenet, old=False),
    "mobilenet_v2": mobilenet_v2,
}
HALVES = "densenet121 densenet161 resnet18 resnext50_32x4d squeezenet1_1 vgg16_bn vgg19_bn"
HALVES += " wide_resnet101_2 wide_resnet50_2"
WHOLES = "densenet201 mobilenet_v2 resnet101 resnet152 resnet34 resnet50 resnext101_32x8d"
WHOLES += (
    " squeezenet1_0 vgg11 vgg11_bn vgg13 vgg16 vgg19 vgg19_bn wide_resnet101_2 wide_resnet50_2"
)


def passes(name: str, dtype: torch.dtype) -> Simulation:
    """Two passes with backward."""

    def run():
        model = MODELS[name]().to(dtype).train()
        pictures, classes = torch.zeros(12, 3, 224, 224, dtype=dtype), torch.zeros(12).long()
        for _ in range(2):
            model.zero_grad()
            out = model(pictures)
            F.cross_entropy(getattr(out, "logits", out), classes).backward()
        return model

    return simulate(run, card=card("RTX 2080 Ti"))


def runs() -> Iterator[tuple[str, Callable]]:
    for kind, dtype, names in (("fp16", torch.half, HALVES), ("fp32", torch.float32, WHOLES)):
        for name in names.split():
            yield f"{name} {kind}", partial(passes, name, dtype)


STEPS = {"torchvision-2080ti": runs}
