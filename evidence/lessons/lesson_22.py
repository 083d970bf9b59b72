"""Lesson 22: a denoiser on pixels and on latents, and what encoding pictures costs."""

import itertools
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from helpers import language_modelling, predict


class Denoiser(nn.Module):
    def __init__(self, channels, width, depth):
        super().__init__()
        self.first, self.last = (
            nn.Conv2d(*ends, 3, padding=1) for ends in ((channels, width), (width, channels))
        )
        self.times = nn.ModuleList(nn.Linear(32, width) for _ in range(depth))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
            for _ in range(depth)
        )

    def forward(self, x, t):
        angles = t[:, None] * torch.exp(torch.linspace(0, 5, 16, device=x.device))
        waves, h = torch.cat([angles.sin(), angles.cos()], dim=1), self.first(x)
        for time, block in zip(self.times, self.blocks, strict=True):
            h = h + block(h + time(waves)[:, :, None, None])
        return self.last(h)


def denoising(channels, size, width, depth, batch):
    def run():
        model = Denoiser(channels, width, depth)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(2):
            x, t = torch.randn(batch, channels, size, size), torch.rand(batch)
            noise = torch.randn_like(x)
            a = (torch.cos(t * torch.pi / 2) ** 2 * 0.998 + 0.001)[:, None, None, None]
            guess = model(a.sqrt() * x + (1 - a).sqrt() * noise, t)
            F.mse_loss(guess, noise).backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def latents() -> Iterator[tuple]:
    for size, batch in itertools.product((128, 256, 512), (1, 8)):
        for name, shape in {"pixels": (3, size), "latents": (4, size // 8)}.items():
            run = denoising(*shape, 128, 12, batch)
            yield f"{size} pixels, batch {batch}", name, partial(predict, run, gpu="A100-80GB")


class Residual(nn.Module):
    """A block of Stable Diffusion's autoencoder."""

    def __init__(self, i, o):
        super().__init__()
        parts = []
        for a in (i, o):
            parts += [nn.GroupNorm(32, a), nn.SiLU(), nn.Conv2d(a, o, 3, padding=1)]
        self.body = nn.Sequential(*parts)
        self.skip = nn.Conv2d(i, o, 1) if i != o else nn.Identity()

    def forward(self, x):
        return self.skip(x) + self.body(x)


class Attention(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.norm, self.qkv, self.out = nn.GroupNorm(32, n), nn.Linear(n, 3 * n), nn.Linear(n, n)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x).flatten(2).mT)[:, None].chunk(3, dim=-1)
        mixed = self.out(F.scaled_dot_product_attention(q, k, v)[:, 0])
        return x + mixed.mT.reshape(x.shape)


def large_encoder():
    layers, last = [nn.Conv2d(3, 128, 3, padding=1)], 128
    for level, width in enumerate((128, 256, 512, 512)):
        layers += [Residual(last, width), Residual(width, width)]
        if level < 3:
            layers += [nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(width, width, 3, stride=2)]
        last = width
    layers += [Residual(512, 512), Attention(512), Residual(512, 512)]
    layers += [nn.GroupNorm(32, 512), nn.SiLU(), nn.Conv2d(512, 8, 3, padding=1)]
    return nn.Sequential(*layers)


class Tiny(nn.Module):
    """A block of the tiny autoencoder: three convolutions."""

    def __init__(self, n=64):
        super().__init__()
        convolutions = [nn.Conv2d(n, n, 3, padding=1) for _ in range(3)]
        self.body = nn.Sequential(
            convolutions[0], nn.ReLU(), convolutions[1], nn.ReLU(), convolutions[2]
        )

    def forward(self, x):
        return F.relu(x + self.body(x))


def tiny_encoder():
    layers = [nn.Conv2d(3, 64, 3, padding=1), Tiny()]
    for _ in range(3):
        layers += [nn.Conv2d(64, 64, 3, stride=2, padding=1, bias=False), Tiny(), Tiny(), Tiny()]
    return nn.Sequential(*layers, nn.Conv2d(64, 4, 3, padding=1))


def encoders() -> Iterator[tuple]:
    """Encoding eight pictures of 512 x 512, without a graph."""
    makers = {"Stable Diffusion": large_encoder, "TAESD": tiny_encoder}
    for card, (name, make) in itertools.product(("T4", "A100-80GB"), makers.items()):

        def run(make=make):
            model = make()
            with torch.no_grad():
                model(torch.rand(8, 3, 512, 512))

        yield "eight pictures", name, partial(predict, run, gpu=card)


def tokens() -> Iterator[tuple]:
    """The same text as fewer tokens: GPT-2, batch 8."""
    for length in (1024, 896, 864, 832, 768):
        workload = language_modelling("gpt2", length=length)
        run = partial(predict, workload, gpu="A100-80GB", per_device_train_batch_size=8, bf16=True)
        yield "gpt2, batch 8", f"{length} tokens", run


SETS = (latents, encoders, tokens)
