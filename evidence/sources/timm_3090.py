"""Image models on an RTX 3090 in both layouts: timm's own table of training speeds, benchmark.py.

Autocast to float16 without a loss scale, SGD with Nesterov momentum. Models are transformers' where
it has the same shapes; timm's ViT of 2022 has attention by matrices and is written anew.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import transformers
from torch import nn

from evidence.cards import card
from evidence.models import VisionTransformer, resnet
from evidence.techniques import image_steps, sgd
from fake_cuda import Simulation, simulate


class Layer(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1, self.norm2, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.into(self.norm1(x)).reshape(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (batch, heads, length, size) each
        scores = q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5
        mixed = (scores.softmax(-1) @ v).transpose(1, 2)  # (batch, length, heads, size)
        x = x + self.out(mixed.reshape(batch, length, width))
        return x + self.feed(self.norm2(x))


def vit(width: int, heads: int):
    layers = (Layer(width, heads) for _ in range(12))
    return VisionTransformer(width, layers, classes=1000, eps=1e-6)


def convnext(depth: int, width: int):
    shape = transformers.ConvNextConfig(
        num_labels=1000, depths=[3, 3, depth, 3], hidden_sizes=[width * 2**k for k in range(4)]
    )
    return transformers.ConvNextForImageClassification(shape)


def mobilenet():
    shape = transformers.MobileNetV2Config(
        num_labels=1000, tf_padding=False, classifier_dropout_prob=0.0
    )
    return transformers.MobileNetV2ForImageClassification(shape)


MODELS = {  # timm's name: how to build it, pictures in a batch
    "resnet18": (partial(resnet, (2, 2, 2, 2), True), 512),
    "resnet50": (resnet, 512),
    "resnet101": (partial(resnet, (3, 4, 23, 3)), 256),
    "vit_tiny_patch16_224": (partial(vit, 192, 3), 512),
    "vit_small_patch16_224": (partial(vit, 384, 6), 384),
    "vit_base_patch16_224": (partial(vit, 768, 12), 192),
    "convnext_tiny": (partial(convnext, 9, 96), 256),
    "convnext_base": (partial(convnext, 27, 128), 128),
    "mobilenetv2_100": (mobilenet, 512),
}


def train(name: str, last: bool) -> Simulation:
    """Two steps."""
    build, batch = MODELS[name]

    def run():
        model = build().train()
        if last:
            model = model.to(memory_format=torch.channels_last)
        optimizer = sgd(model, nesterov=True)
        image_steps(model, batch, optimizer, autocast=True, last=last)
        return model, optimizer

    return simulate(run, card=card("RTX 3090", tf32=True))


def runs() -> Iterator[tuple[str, Callable]]:
    for layout in ("last", "first"):
        for name in MODELS:
            yield f"{name}, channels {layout}", partial(train, name, layout == "last")


STEPS = {"timm-3090": runs}
