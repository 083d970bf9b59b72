"""Image models on four consumer cards: timm's benchmark.py, run by NikolasEnt in 2022 and 2025.

All in 32 bits, whose products may be tf32, or all in 16; SGD with Nesterov momentum. His table
names the types as the script's --precision does, so 16 bits are the weights', too. Swin is
transformers', with three products where timm has one for queries, keys and values.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
import transformers

from evidence.cards import card
from evidence.image_models import efficientnet_v2_b0, resnet, vgg
from fake_cuda import Simulation, simulate


def swin():
    """Swin-B (arXiv 2103.14030)."""
    shape = transformers.SwinConfig(
        embed_dim=128,
        depths=[2, 2, 18, 2],
        num_heads=[4, 8, 16, 32],
        drop_path_rate=0.0,
        num_labels=1000,
    )
    return transformers.SwinForImageClassification(shape)


VGG, RESNET, EFFICIENT = "vgg16", "resnet50", "tf_efficientnetv2_b0"
SWIN = "swin_base_patch4_window7_224"
MODELS = {
    VGG: partial(vgg, 16, dropout=0.0),
    RESNET: partial(resnet, 50),
    EFFICIENT: efficientnet_v2_b0,
    SWIN: swin,
}


def train(gpu: str, name: str, dtype: torch.dtype, batch: int) -> Simulation:
    """Two steps."""

    def run():
        model = MODELS[name]().to(dtype).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, nesterov=True)
        pictures = torch.zeros(batch, 3, 224, 224, dtype=dtype)
        for _ in range(2):
            optimizer.zero_grad()
            out = model(pictures)
            classes = torch.zeros(batch, dtype=torch.long)
            F.cross_entropy(getattr(out, "logits", out), classes).backward()
            optimizer.step()
        return model, optimizer

    return simulate(run, card=card(gpu, tf32=gpu != "RTX 2080 Ti"))


def runs(
    gpu: str, halves: dict[str, int], wholes: dict[str, int]
) -> Iterator[tuple[str, Callable]]:
    """The runs in 16 and in 32 bits: of each model how many pictures are in a batch."""
    for kind, dtype, batches in (("fp16", torch.half, halves), ("fp32", torch.float32, wholes)):
        for name, batch in batches.items():
            yield f"{name} {kind}", partial(train, gpu, name, dtype, batch)


OLD = {RESNET: 192, SWIN: 64, EFFICIENT: 256, VGG: 192}  # of 11 GB, in 16 bits


def many(*names: str) -> dict[str, int]:
    return dict.fromkeys(names, 256)


STEPS = {
    "timm-2022-2080ti": partial(runs, "RTX 2080 Ti", OLD, {}),
    "timm-2022-3090": partial(
        runs,
        "RTX 3090",
        {**many(RESNET, EFFICIENT, VGG), SWIN: 192},
        {**many(RESNET, VGG), SWIN: 96},
    ),
    "timm-2022-4090": partial(runs, "RTX 4090", many(RESNET), many(EFFICIENT, VGG)),
    "timm-2025-3090": partial(runs, "RTX 3090", many(RESNET), many(RESNET, EFFICIENT, VGG)),
    "timm-2025-4090": partial(runs, "RTX 4090", many(VGG), {}),
    "timm-2025-5090": partial(
        runs, "RTX 5090", many(RESNET, EFFICIENT, VGG), many(RESNET, EFFICIENT, VGG)
    ),
}
