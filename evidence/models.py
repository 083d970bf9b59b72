"""Models that several published sources train, written once."""

from collections.abc import Iterable

import torch
import transformers
from torch import nn


class VisionTransformer(nn.Module):
    """ViT (arXiv 2010.11929): patches, a token for the class, positions, layers, norm, head."""

    def __init__(self, width, layers: Iterable[nn.Module], classes: int, patch=16, eps=1e-5):
        super().__init__()
        side = 224 // patch
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, side * side + 1, width))
        self.layers = nn.ModuleList(layers)
        self.norm, self.head = nn.LayerNorm(width, eps=eps), nn.Linear(width, classes)

    def through(self, layer: nn.Module, x):
        return layer(x)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)  # (batch, patches, width)
        token = self.token.expand(len(x), -1, -1)  # (batch, 1, width)
        x = torch.cat([token, x], 1) + self.positions  # (batch, patches + 1, width)
        for layer in self.layers:
            x = self.through(layer, x)
        return self.head(self.norm(x)[:, 0])  # (batch, classes)


def resnet(depths: Iterable[int] = (3, 4, 6, 3), basic: bool = False) -> nn.Module:
    """ResNet-50 unless told otherwise, for 1,000 classes; `basic`: with blocks of two layers."""
    widths = [64, 128, 256, 512] if basic else [256, 512, 1024, 2048]
    shape = transformers.ResNetConfig(
        num_labels=1000,
        depths=list(depths),
        hidden_sizes=widths,
        layer_type="basic" if basic else "bottleneck",
    )
    return transformers.ResNetForImageClassification(shape)
