"""ResNet-50 on a V100 in both layouts: sandeepkumar-skb/pytorch_experiments (torchvision_exp).

It names no version of torch; of its time (1.x) is an SGD tensor by tensor.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from evidence.cards import card
from evidence.models import resnet
from evidence.techniques import image_steps, sgd
from fake_cuda import Simulation, simulate


def train(amp: bool, last: bool) -> Simulation:
    """Two steps; nothing waits for them within the loop."""

    def run():
        model = resnet().train()
        if last:
            model = model.to(memory_format=torch.channels_last)
        optimizer = sgd(model, foreach=False)
        image_steps(model, 128, optimizer, autocast=amp, last=last, waits=False)
        return model, optimizer

    return simulate(run, card=card("V100"))


def runs() -> Iterator[tuple[str, Callable]]:
    for kind in ("fp32", "amp"):
        for layout in ("last", "first"):
            yield f"{kind}, channels {layout}", partial(train, kind == "amp", layout == "last")


STEPS = {"resnet-v100": runs}
