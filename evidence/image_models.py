"""Convolutional networks that several published sources train, written anew by their shapes.

As torchvision has them, whose ReLUs overwrite their input; EfficientNetV2 as timm has it.
"""

import torch
import torch.nn.functional as F
import transformers
from torch import nn

CLASSES = 1000


def convolution(into: int, out: int, size: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """One without a bias, whose result has the size of its input over `stride`."""
    return nn.Conv2d(into, out, size, stride, size // 2, groups=groups, bias=False)


# ------------------------------------------------------------------------------------------- VGG
VGG_DEPTHS = {11: (1, 1, 2, 2, 2), 13: (2,) * 5, 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


def vgg(layers: int, norm: bool = False, dropout: float = 0.5) -> nn.Module:
    """VGG (arXiv 1409.1556) with 11, 13, 16 or 19 layers."""
    parts, into = [], 3
    for depth, out in zip(VGG_DEPTHS[layers], (64, 128, 256, 512, 512), strict=True):
        for _ in range(depth):
            parts += [nn.Conv2d(into, out, 3, padding=1), *[nn.BatchNorm2d(out)] * norm]
            parts, into = [*parts, nn.ReLU(inplace=True)], out
        parts.append(nn.MaxPool2d(2))
    parts += [nn.Flatten()]
    for width, out in ((512 * 7 * 7, 4096), (4096, 4096)):
        parts += [nn.Linear(width, out), nn.ReLU(inplace=True), nn.Dropout(dropout)]
    return nn.Sequential(*parts, nn.Linear(4096, CLASSES))


# ---------------------------------------------------------------------------------------- ResNet
class Bottleneck(nn.Module):
    def __init__(self, into: int, inner: int, out: int, stride: int, groups: int):
        super().__init__()
        self.one, self.norm1 = convolution(into, inner, 1), nn.BatchNorm2d(inner)
        self.two, self.norm2 = convolution(inner, inner, 3, stride, groups), nn.BatchNorm2d(inner)
        self.three, self.norm3 = convolution(inner, out, 1), nn.BatchNorm2d(out)
        self.beside = None
        if stride > 1 or into != out:
            self.beside = nn.Sequential(convolution(into, out, 1, stride), nn.BatchNorm2d(out))

    def forward(self, x):
        y = F.relu(self.norm1(self.one(x)), inplace=True)
        y = F.relu(self.norm2(self.two(y)), inplace=True)
        y = self.norm3(self.three(y))
        y += x if self.beside is None else self.beside(x)
        return F.relu(y, inplace=True)


class Basic(nn.Module):
    def __init__(self, into: int, inner: int, out: int, stride: int, groups: int):
        super().__init__()
        self.one, self.norm1 = convolution(into, inner, 3, stride), nn.BatchNorm2d(inner)
        self.two, self.norm2 = convolution(inner, out, 3), nn.BatchNorm2d(out)
        self.beside = None
        if stride > 1:
            self.beside = nn.Sequential(convolution(into, out, 1, stride), nn.BatchNorm2d(out))

    def forward(self, x):
        y = F.relu(self.norm1(self.one(x)), inplace=True)
        y = self.norm2(self.two(y))
        y += x if self.beside is None else self.beside(x)
        return F.relu(y, inplace=True)


RESNET_DEPTHS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
RESNET_DEPTHS |= {152: (3, 8, 36, 3)}


def resnet(layers: int, groups: int = 1, width: int = 64) -> nn.Module:
    """ResNet (arXiv 1512.03385), ResNeXt with `groups`, or wide with a `width` of 128."""
    block, more = (Basic, 1) if layers < 50 else (Bottleneck, 4)
    parts = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    parts, into = [*parts, nn.MaxPool2d(3, 2, 1)], 64
    for stage, depth in enumerate(RESNET_DEPTHS[layers]):
        inner, out = 2**stage * width * groups, 2**stage * 64 * more
        for i in range(depth):
            parts.append(block(into, inner, out, 2 if stage and not i else 1, groups))
            into = out
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(into, CLASSES))


# -------------------------------------------------------------------------------------- DenseNet
class Dense(nn.Module):
    """A layer, which takes what all before it made."""

    def __init__(self, into: int, growth: int):
        super().__init__()
        self.norm1, self.one = nn.BatchNorm2d(into), convolution(into, 4 * growth, 1)
        self.norm2, self.two = nn.BatchNorm2d(4 * growth), convolution(4 * growth, growth, 3)

    def forward(self, seen: list):
        x = self.one(F.relu(self.norm1(torch.cat(seen, 1)), inplace=True))
        return self.two(F.relu(self.norm2(x), inplace=True))


class DenseBlock(nn.Module):
    def __init__(self, into: int, growth: int, depth: int):
        super().__init__()
        self.layers = nn.ModuleList(Dense(into + i * growth, growth) for i in range(depth))

    def forward(self, x):
        seen = [x]
        for layer in self.layers:
            seen.append(layer(seen))
        return torch.cat(seen, 1)


DENSENETS = {121: (64, 32, (6, 12, 24, 16)), 161: (96, 48, (6, 12, 36, 24))}
DENSENETS |= {201: (64, 32, (6, 12, 48, 32))}


def densenet(layers: int) -> nn.Module:
    """DenseNet (arXiv 1608.06993)."""
    width, growth, depths = DENSENETS[layers]
    parts = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    parts.append(nn.MaxPool2d(3, 2, 1))
    for i, depth in enumerate(depths):
        parts.append(DenseBlock(width, growth, depth))
        width += growth * depth
        parts += [nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        if i < len(depths) - 1:
            parts += [convolution(width, width // 2, 1), nn.AvgPool2d(2)]
            width //= 2
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))


# ------------------------------------------------------------------------------------ small ones
class Fire(nn.Module):
    def __init__(self, into: int, inner: int, out: int):
        super().__init__()
        self.inner = nn.Conv2d(into, inner, 1)
        self.one, self.three = nn.Conv2d(inner, out, 1), nn.Conv2d(inner, out, 3, padding=1)

    def forward(self, x):
        x = F.relu(self.inner(x), inplace=True)
        return torch.cat([F.relu(part(x), inplace=True) for part in (self.one, self.three)], 1)


def squeezenet(old: bool) -> nn.Module:
    """SqueezeNet (arXiv 1602.07360) 1.0 if `old`, else 1.1."""
    into, size, pools = (96, 7, (3, 7)) if old else (64, 3, (2, 4))
    parts = [nn.Conv2d(3, into, size, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, ceil_mode=True)]
    fires = ((16, 64), (16, 64), (32, 128), (32, 128), (48, 192), (48, 192), (64, 256), (64, 256))
    for i, (inner, out) in enumerate(fires):
        if i in pools:
            parts.append(nn.MaxPool2d(3, 2, ceil_mode=True))
        parts, into = [*parts, Fire(into, inner, out)], 2 * out
    parts += [nn.Dropout(0.5), nn.Conv2d(into, CLASSES, 1), nn.ReLU(inplace=True)]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def mobilenet_v2() -> nn.Module:
    """MobileNet v2 (arXiv 1801.04381), transformers'."""
    shape = transformers.MobileNetV2Config(
        num_labels=CLASSES, tf_padding=False, classifier_dropout_prob=0.2
    )
    return transformers.MobileNetV2ForImageClassification(shape)


# -------------------------------------------------------------------------------- EfficientNetV2
class Same(nn.Conv2d):
    """TensorFlow's padding: of a stride of two on one side alone, by a copy of its own."""

    def __init__(self, into: int, out: int, size: int, stride: int = 1, groups: int = 1):
        padding = 0 if stride > 1 else size // 2
        super().__init__(into, out, size, stride, padding, groups=groups, bias=False)

    def forward(self, x):
        return super().forward(F.pad(x, (0, 1, 0, 1)) if self.stride[0] > 1 else x)


class Squeeze(nn.Module):
    """Each channel is weighed by what all of them are on average."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.down, self.up = nn.Conv2d(width, inner, 1), nn.Conv2d(inner, width, 1)

    def forward(self, x):
        weight = F.silu(self.down(x.mean((2, 3), keepdim=True)), inplace=True)
        return x * torch.sigmoid(self.up(weight))


class Inverted(nn.Module):
    """A block with more channels inside; `fused` has one convolution for the first two."""

    def __init__(self, into: int, out: int, stride: int, more: int, fused: bool):
        super().__init__()
        inner, self.adds = into * more, stride == 1 and into == out
        wide = [Same(into, inner, 3, stride), nn.BatchNorm2d(inner), nn.SiLU(inplace=True)]
        if not fused:
            wide = [convolution(into, inner, 1), nn.BatchNorm2d(inner), nn.SiLU(inplace=True)]
            wide += [Same(inner, inner, 3, stride, inner), nn.BatchNorm2d(inner)]
            wide += [nn.SiLU(inplace=True), Squeeze(inner, into // 4)]
        self.parts = nn.Sequential(*wide, convolution(inner, out, 1), nn.BatchNorm2d(out))

    def forward(self, x):
        y = self.parts(x)
        return y + x if self.adds else y


B0 = (  # fused or not, how often, stride, how many channels more inside, channels
    *((True, 2, 2, 4, 32), (True, 2, 2, 4, 48), (False, 3, 2, 4, 96)),
    *((False, 5, 1, 6, 112), (False, 8, 2, 6, 192)),
)


class Plain(nn.Module):
    """The first stage: one convolution, which adds its input where it can."""

    def __init__(self, into: int, out: int):
        super().__init__()
        self.conv, self.norm = Same(into, out, 3), nn.BatchNorm2d(out)

    def forward(self, x):
        return F.silu(self.norm(self.conv(x)), inplace=True)


def efficientnet_v2_b0() -> nn.Module:
    """EfficientNetV2 (arXiv 2104.00298), tf_efficientnetv2_b0 of timm."""
    parts = [Same(3, 32, 3, 2), nn.BatchNorm2d(32), nn.SiLU(inplace=True), Plain(32, 16)]
    into = 16
    for fused, depth, stride, more, out in B0:
        for i in range(depth):
            parts.append(Inverted(into, out, 1 if i else stride, more, fused))
            into = out
    parts += [convolution(into, 1280, 1), nn.BatchNorm2d(1280), nn.SiLU(inplace=True)]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, CLASSES))
