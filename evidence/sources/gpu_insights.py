"""A vision transformer, a U-Net and a denoiser, compiled: xiaoran007/GPU-Insights, April 2026.

Its runs are compiled with CUDA graphs, which nothing here knows: these are compiled without. The
kernels are the same, and with batches as large as these the host is not what a step waits for.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from evidence.cards import card
from evidence.models import VisionTransformer
from fake_cuda import Simulation, simulate


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(768), nn.LayerNorm(768)
        self.attention = nn.MultiheadAttention(768, 12, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(768, 3072), nn.GELU(), nn.Linear(3072, 768))

    def forward(self, x):  # (batch, 197, width), and so is what is returned
        y = self.norm1(x)
        y, _ = self.attention(y, y, y, need_weights=False)
        x = x + y
        return x + self.feed(self.norm2(x))


def vit() -> nn.Module:
    return VisionTransformer(768, (Layer() for _ in range(12)), classes=10)


# ----------------------------------------------------------------------------------------- U-Net
def twice(into: int, out: int) -> nn.Sequential:
    parts = []
    for width in (into, out):
        parts += [nn.Conv2d(width, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)]
        parts.append(nn.ReLU(inplace=True))
    return nn.Sequential(*parts)


class UNet(nn.Module):
    """U-Net (arXiv 1505.04597) with padding, for 21 classes."""

    def __init__(self):
        super().__init__()
        widths = [64, 128, 256, 512, 1024]
        pairs = list(zip(widths, widths[1:], strict=False))
        self.first = twice(3, 64)
        self.down = nn.ModuleList(
            nn.Sequential(nn.MaxPool2d(2), twice(into, out)) for into, out in pairs
        )
        self.wider = nn.ModuleList(
            nn.ConvTranspose2d(into, out, 2, 2) for out, into in reversed(pairs)
        )
        self.up = nn.ModuleList(twice(into, out) for out, into in reversed(pairs))
        self.last = nn.Conv2d(64, 21, 1)

    def forward(self, x):
        seen = [self.first(x)]
        for down in self.down:
            seen.append(down(seen[-1]))
        x = seen.pop()
        for wider, up in zip(self.wider, self.up, strict=True):
            x = up(torch.cat([seen.pop(), wider(x)], 1))
        return self.last(x)


# -------------------------------------------------------------------------------------- denoiser
WIDTHS, TIME = (128, 256, 384, 512), 512


class Attend(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.GroupNorm(8, width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)

    def forward(self, x):
        y = self.norm(x).flatten(2).transpose(1, 2)  # (batch, places, width)
        y, _ = self.attention(y, y, y, need_weights=False)
        return x + y.transpose(1, 2).view(x.shape)


class Residual(nn.Module):
    def __init__(self, into: int, out: int):
        super().__init__()
        self.one = nn.Sequential(
            nn.GroupNorm(8, into), nn.SiLU(), nn.Conv2d(into, out, 3, padding=1, bias=False)
        )
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(TIME, out))
        self.two = nn.Sequential(
            nn.GroupNorm(8, out), nn.SiLU(), nn.Conv2d(out, out, 3, padding=1, bias=False)
        )
        self.beside = nn.Conv2d(into, out, 1) if into != out else nn.Identity()

    def forward(self, x, when):
        y = self.one(x)
        y = y + self.time(when)[..., None, None]
        return self.two(y) + self.beside(x)


def maybe(width: int, side: int) -> nn.Module:
    """Attention where a picture has 16 places a side."""
    return Attend(width) if side == 16 else nn.Identity()


class Denoiser(nn.Module):
    """A U-Net that is told how much noise there is (arXiv 2102.09672), for 64 pixels a side."""

    def __init__(self):
        super().__init__()
        self.when = nn.Sequential(nn.Linear(128, TIME), nn.SiLU(), nn.Linear(TIME, TIME))
        self.first = nn.Conv2d(3, WIDTHS[0], 3, padding=1)
        down, up, before = [], [], WIDTHS[0]
        for i, width in enumerate(WIDTHS):
            parts = [Residual(before, width), Residual(width, width), maybe(width, 64 >> i)]
            less = nn.Conv2d(width, width, 3, 2, 1) if i < 3 else nn.Identity()
            down.append(nn.ModuleList([*parts, less]))
            before = width
        self.middle = nn.ModuleList([Residual(512, 512), Attend(512), Residual(512, 512)])
        for i, width in reversed(list(enumerate(WIDTHS))):
            larger = nn.Sequential(
                nn.Upsample(scale_factor=2), nn.Conv2d(before, before, 3, padding=1)
            )
            parts = [Residual(before + width, width), Residual(width, width)]
            up.append(
                nn.ModuleList([larger if i < 3 else nn.Identity(), *parts, maybe(width, 64 >> i)])
            )
            before = width
        self.down, self.up = nn.ModuleList(down), nn.ModuleList(up)
        self.last = nn.Sequential(nn.GroupNorm(8, 128), nn.SiLU(), nn.Conv2d(128, 3, 3, padding=1))

    def forward(self, x, steps):
        rates = torch.exp(torch.arange(64, dtype=torch.float32) * -(math.log(10_000) / 63))
        angles = steps.float()[:, None] * rates  # (batch, 64)
        when = self.when(torch.cat([angles.sin(), angles.cos()], -1))
        x, seen = self.first(x), []
        for one, two, attend, less in self.down:
            x = attend(two(one(x, when), when))
            seen.append(x)
            x = less(x)
        one, attend, two = self.middle
        x = two(attend(one(x, when)), when)
        for larger, one, two, attend in self.up:
            x = torch.cat([larger(x), seen.pop()], 1)
            x = attend(two(one(x, when), when))
        return self.last(x)


def loss_of_noise(model, pictures, _):
    steps = torch.randint(0, 1000, (len(pictures),))
    noise = torch.randn_like(pictures)
    kept = (1.0 - steps.float() / 1000).view(-1, 1, 1, 1)
    noisy = torch.sqrt(kept) * pictures + torch.sqrt(1.0 - kept) * noise
    return F.mse_loss(model(noisy, steps), noise)


def loss_of_classes(model, pictures, classes):
    return F.cross_entropy(model(pictures), classes)


# -------------------------------------------------------------------------------------- training
MODELS = {  # how to build one, its loss, pixels a side, places of a picture that have a class
    "vit": (vit, loss_of_classes, 224, ()),
    "unet": (UNet, loss_of_classes, 256, (256, 256)),
    "ddpm": (Denoiser, loss_of_noise, 64, ()),
}


def train(gpu: str, name: str, batch: int, half: bool) -> Simulation:
    """Two steps."""

    def run():
        build, loss_of, side, places = MODELS[name]
        model, pictures = build().train(), torch.zeros(batch, 3, side, side)
        if name != "vit":
            model = model.to(memory_format=torch.channels_last)
            pictures = pictures.contiguous(memory_format=torch.channels_last)
        model = torch.compile(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001, fused=True)
        classes = torch.zeros(batch, *places, dtype=torch.long)
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=half):
                loss = loss_of(model, pictures, classes)
            loss.backward()
            optimizer.step()
        return model, optimizer

    return simulate(run, card=card(gpu, tf32=True))


def runs(gpu: str, batches: dict[str, tuple[int, int]]) -> Iterator[tuple[str, Callable]]:
    """The runs of a card: of each model its batch in tf32 and in bfloat16."""
    for name, pair in batches.items():
        for kind, batch in zip(("tf32", "bf16"), pair, strict=True):
            yield f"{name} {kind}", partial(train, gpu, name, batch, kind == "bf16")


STEPS = {
    "gpu-insights-3090": partial(
        runs, "RTX 3090", {"vit": (128, 256), "unet": (32, 64), "ddpm": (64, 128)}
    ),
    "gpu-insights-l40s": partial(
        runs, "L40S", {"vit": (256, 256), "unet": (64, 128), "ddpm": (128, 256)}
    ),
    "gpu-insights-a100": partial(
        runs, "A100-40GB", {"vit": (256, 256), "unet": (64, 64), "ddpm": (128, 256)}
    ),
}
