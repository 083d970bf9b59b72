"""Lesson 21: steps of ResNet-50 on two cards, with careful and with careless habits."""

import itertools
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch.optim import AdamW
from transformers import ResNetConfig, ResNetForImageClassification

from helpers import predict

HABITS = {
    "careful": {},
    "gradients are zeroed": {"zeroed": True},
    "update by foreach": {"foreach": True},
    "update in a loop": {"foreach": False},
    "one .item()": {"asks": 1},
    ".item() a gradient": {"norms": True},
    "three together": {"zeroed": True, "foreach": False, "norms": True},
}


def training(batch, zeroed=False, foreach=None, asks=0, norms=False):
    def run():
        model = ResNetForImageClassification(ResNetConfig(num_labels=1000)).train()
        way = {"fused": True} if foreach is None else {"foreach": foreach}
        optimizer = AdamW(model.parameters(), **way)
        for _ in range(2):
            images, labels = torch.rand(batch, 3, 224, 224), torch.randint(1000, (batch,))
            loss = F.cross_entropy(model(images).logits, labels)
            loss.backward()
            for _ in range(asks):
                loss.item()
            if norms:
                [p.grad.norm().item() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad(set_to_none=not zeroed)

    return run


def details() -> Iterator[tuple]:
    for card, batch, name in itertools.product(("T4", "H100"), (4, 32, 128), HABITS):

        def run(card=card, batch=batch, name=name):
            return predict(training(batch, **HABITS[name]), gpu=card)

        yield f"batch {batch}", name, run


def graphs() -> Iterator[tuple]:
    """An evaluation of 128 pictures that keeps what a backward pass would need, or does not."""
    for card, keep in itertools.product(("T4", "H100"), (torch.enable_grad, torch.no_grad)):

        def evaluate(keep=keep):
            model = ResNetForImageClassification(ResNetConfig(num_labels=1000)).eval()
            with keep():
                model(torch.rand(128, 3, 224, 224))

        yield "batch 128", keep.__name__, partial(predict, evaluate, gpu=card)


SETS = (details, graphs)
