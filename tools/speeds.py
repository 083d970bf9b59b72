"""The runs behind `data/measurements/speeds.csv`: what others timed on real cards, as simulations.

Each module in `SETS` yields (run, function that simulates it on a card); the function returns a
`fake_cuda.Simulation` or a `helpers.Prediction` with the time of a step.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import behaviours_2022
from fake_cuda import cost, simulate
from helpers.hardware import data_file, gpu
from real_cards import course, fms, peft_comparison, torchtune_packed


def card(name: str, tf32: bool = False) -> cost.Card:
    """A card of `data/gpus.csv` as the simulation takes it."""
    found = gpu(name)
    return cost.Card.of(found.name, found.capability, found.facts, tf32)


def steps(
    model, loss: Callable, optimizer=None, times=1, scaler=None, clip=False, n=2, waits=False
) -> tuple:
    """Steps of a plain loop, each of `times` passes. What comes back lives until the end.

    With `waits` the host waits for each stage, as one does to time them apart.
    """
    for _ in range(n):
        for _ in range(times):
            value = loss()
            if waits:
                value.item()
            (scaler.scale(value) if scaler else value).backward()
        if waits:
            value.item()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        elif optimizer:
            optimizer.step()
        if waits:
            value.item()
        model.zero_grad(set_to_none=True)
    return model, optimizer


# --------------------------------------------------------------- an assignment's decoder (CS336, 2)
SIZES = {  # width, layers, heads, inner
    "small": (768, 12, 12, 3072),
    "medium": (1024, 24, 16, 4096),
    "large": (1280, 36, 20, 5120),
    "xl": (2560, 32, 32, 10240),
    "2.7B": (2560, 32, 32, 10240),
    "10B": (4608, 50, 36, 12288),
}


def decoder(name: str, size: str, stage: str, length: int, bf16: bool, by_hand: bool = True):
    """A forward pass, one with its backward, or a step: by the students' own AdamW, or torch's."""
    width, layers, heads, inner = SIZES[size]
    shape = dict(length=length, bf16=bf16, steps=2 if stage == "train" else 1)
    student = course.Student(width, layers, heads, inner, stage=stage, **shape)
    if by_hand:
        return simulate(partial(course.run, student), card=card(name))

    def run():
        model = course.Decoder(student)
        words = torch.zeros(4, length, dtype=torch.long)

        def loss():
            with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
                return F.cross_entropy(model(words).flatten(0, 1), words.flatten())

        return steps(model, loss, torch.optim.AdamW(model.parameters()), waits=True)

    return simulate(run, card=card(name))


STAGES = {"forward": "forward", "forward and backward": "backward", "step": "train"}


def decoder_b200() -> Iterator[tuple[str, Callable]]:
    for size in ("small", "medium", "large", "xl", "10B"):
        for kind in ("fp32", "bf16"):
            for text, stage in STAGES.items():
                job = partial(decoder, "B200", size, stage, 512, kind == "bf16")
                yield f"{size} {kind}, {text}", job


def decoder_h20() -> Iterator[tuple[str, Callable]]:
    for length in (128, 512, 1024):
        for size in ("small", "large", "2.7B"):
            for kind in ("fp32", "bf16"):
                job = partial(decoder, "H20", size, "backward", length, kind == "bf16")
                yield f"{size} {kind}, {length} tokens", job


def decoder_4090() -> Iterator[tuple[str, Callable]]:
    for size in ("small", "medium"):
        for length in (256, 512, 1024):
            for kind in ("fp32", "bf16"):
                job = partial(decoder, "RTX 4090", size, "train", length, kind == "bf16", False)
                yield f"{size} {kind}, {length} tokens", job


# -------------------------------------------------------------------- runs that stand elsewhere too
def fine_tuning() -> Iterator[tuple[str, Callable]]:
    for model, (workload, methods) in fms.MODELS.items():
        for method, batches in methods.items():
            for batch in batches:
                yield f"{model} {method}, batch {batch}", partial(fms.run, workload, method, batch)


def images() -> Iterator[tuple[str, Callable]]:
    for run in peft_comparison.IMAGES:
        yield run, partial(simulate, peft_comparison.train_images(run), card=card("L40S"))


def guide_2022() -> Iterator[tuple[str, Callable]]:
    for run in behaviours_2022.CLASSIC:
        yield run, partial(behaviours_2022.classic, run)


def torchtune() -> Iterator[tuple[str, Callable]]:
    run = torchtune_packed.run
    yield "+ packed data", partial(simulate, run, card=card("A100-80GB"))


# ------------------------------------------------------------------------------- language models
def t5(name: str, batch: int, source: int, target: int):
    """transformers' example of translation in 2022: label smoothing, AdamW tensor by tensor."""

    def run():
        config = transformers.T5Config(
            vocab_size=32128,
            d_model=768,
            d_ff=3072,
            num_layers=12,
            num_heads=12,
            use_cache=False,
            decoder_start_token_id=0,
            attn_implementation="eager",
        )
        model = transformers.T5ForConditionalGeneration(config).train()
        words, labels = (torch.zeros(batch, n, dtype=torch.long) for n in (source, target))

        def loss():  # LabelSmoother in transformers/trainer_pt_utils.py
            mask = torch.ones_like(words)
            mask[:, -1] = 0  # all but the longest text are padded
            logits = model(input_ids=words, attention_mask=mask, decoder_input_ids=labels).logits
            log = -F.log_softmax(logits, dim=-1)
            padded = labels.unsqueeze(-1).eq(-100)
            chosen = log.gather(-1, labels.unsqueeze(-1)).masked_fill_(padded, 0.0)
            smooth = log.sum(-1, keepdim=True, dtype=torch.float32).masked_fill_(padded, 0.0)
            count = padded.numel() - padded.long().sum()
            return 0.9 * chosen.sum() / count + 0.1 * smooth.sum() / (count * 32128)

        optimizer = torch.optim.AdamW(model.parameters(), foreach=False, weight_decay=0.0)
        return steps(model, loss, optimizer, clip=True)

    return simulate(run, card=card(name, tf32=True))


def t5_a100() -> Iterator[tuple[str, Callable]]:
    yield "batch 1", partial(t5, "A100-40GB", 1, 40, 55)
    yield "batch 8", partial(t5, "A100-40GB", 8, 60, 85)


def t5_3090() -> Iterator[tuple[str, Callable]]:
    yield "batch 1", partial(t5, "RTX 3090", 1, 40, 55)
    yield "batch 8", partial(t5, "RTX 3090", 8, 60, 85)


def llama(config: str, length: int, stage: str):
    """Hugging Face's code in bf16: a forward pass, one with its backward, or a step."""

    def run():
        shape = AutoConfig.from_pretrained(data_file("configs", f"{config}.json"), use_cache=False)
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
        ids = torch.zeros(1, length, dtype=torch.long)
        if stage == "forward":
            with torch.no_grad():
                return model.eval(), model(input_ids=ids)
        model.train().gradient_checkpointing_enable()
        optimizer = torch.optim.AdamW(model.parameters()) if stage == "step" else None
        loss = lambda: model(input_ids=ids, labels=ids).loss  # noqa: E731
        return steps(model, loss, optimizer, n=2 if optimizer else 1)

    return simulate(run, card=card("B200"))


def book_b200() -> Iterator[tuple[str, Callable]]:
    for config, length in (("llama-3.2-1b", 512), ("llama-3.1-8b", 8192)):
        for stage in STAGES:
            name = config.replace("llama", "Llama").replace("b", "B")
            yield f"{name}, {stage}", partial(llama, config, length, stage)


# ------------------------------------------------------------------------- GPT-2, in two ways
class Norm(nn.Module):
    """LayerNorm in plain operations, as a book teaches it."""

    def __init__(self, width: int):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        mean, spread = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return self.scale * ((x - mean) / torch.sqrt(spread + 1e-5)) + self.shift


class Gelu(nn.Module):
    def forward(self, x):
        inner = 0.7978845608 * (x + 0.044715 * torch.pow(x, 3))
        return 0.5 * x * (1 + torch.tanh(inner))


class Mixer(nn.Module):
    """Causal attention: one projection or three, by matrices or by torch's kernel."""

    def __init__(self, width, heads, one, kernel, dropout, bias):
        super().__init__()
        outs = [3 * width] if one else [width] * 3
        self.into = nn.ModuleList(nn.Linear(width, n, bias=bias) for n in outs)
        self.out, self.drop = nn.Linear(width, width), nn.Dropout(dropout)
        self.heads, self.kernel, self.p = heads, kernel, dropout
        self.register_buffer("future", torch.ones(1024, 1024).triu(1))

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (part for layer in self.into for part in layer(x).split(width, 2))
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        if self.kernel:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p, is_causal=True)
        else:
            scores = q @ k.transpose(2, 3)
            scores = scores.masked_fill(self.future.bool()[:length, :length], -torch.inf)
            y = self.drop(torch.softmax(scores / 8.0, -1)) @ v
        return self.out(y.transpose(1, 2).contiguous().view(batch, length, width))


class Gpt2(nn.Module):
    def __init__(self, one=True, kernel=False, dropout=0.0, plain=False, tied=True, bias=True):
        super().__init__()
        width, norm, act = 768, Norm if plain else nn.LayerNorm, Gelu if plain else nn.GELU
        drop = nn.Dropout(dropout) if dropout else nn.Identity()
        self.words, self.places = nn.Embedding(50257, width), nn.Embedding(1024, width)
        self.mixers = nn.ModuleList(
            nn.Sequential(norm(width), Mixer(width, 12, one, kernel, dropout, bias), drop)
            for _ in range(12)
        )
        self.feeds = nn.ModuleList(
            nn.Sequential(norm(width), nn.Linear(width, 3072), act(), nn.Linear(3072, width), drop)
            for _ in range(12)
        )
        self.drop, self.norm = drop, norm(width)
        self.head = nn.Linear(width, 50257, bias=False)
        if tied:
            self.words.weight = self.head.weight

    def forward(self, ids):
        x = self.drop(self.words(ids) + self.places(torch.arange(ids.shape[1])))
        for mixer, feed in zip(self.mixers, self.feeds, strict=True):
            x = x + mixer(x)
            x = x + feed(x)
        return self.head(self.norm(x))


def gpt2(name: str, batch: int, tf32=False, autocast=False, half=False, fused=None, **options):
    def run():
        model = Gpt2(**options)
        model = model.bfloat16() if half else model
        ids = torch.zeros(batch, 1024, dtype=torch.long)

        def loss():
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

        return steps(model, loss, torch.optim.AdamW(model.parameters(), fused=fused))

    return simulate(run, card=card(name, tf32))


def nano_gpt() -> Iterator[tuple[str, Callable]]:
    for run, tf32, autocast in (("fp32", 0, 0), ("tf32", 1, 0), ("bf16", 1, 1)):
        yield run, partial(gpt2, "A100-80GB", 16, bool(tf32), bool(autocast))


def from_scratch() -> Iterator[tuple[str, Callable]]:
    options = {"one": False, "dropout": 0.1, "plain": True, "tied": False, "bias": False}
    added = {
        "fp32": {},
        "+ tf32": {"tf32": True},
        "+ fused AdamW": {"fused": True},
        "+ bfloat16": {"half": True},
        "+ PyTorch LayerNorm and GELU": {"plain": False},
        "+ FlashAttention": {"one": True, "kernel": True},
    }
    for run, change in added.items():
        options = options | change
        yield run, partial(gpt2, "A100-40GB", 8, **options)


# ------------------------------------------------------------------------------- ViT-L/16
class Layer(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix = nn.MultiheadAttention(width, heads, batch_first=True)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.mix(y, y, y, need_weights=False)[0]
        return x + self.feed(self.norm2(x))


class Vit(nn.Module):
    def __init__(self, width: int = 1024):
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, width, 16, 16), nn.LayerNorm(width)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, 197, width))
        self.layers = nn.Sequential(*(Layer(width, 16) for _ in range(24)))
        self.head = nn.Linear(width, 10)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.norm(self.layers(x))[:, 0])


def vit(batch: int, half=False, mixed=False, times=1):
    def run():
        model = Vit().train()
        model = model.bfloat16() if half else model
        images = torch.zeros(batch, 3, 224, 224, dtype=next(model.parameters()).dtype)
        classes = torch.zeros(batch, dtype=torch.long)

        def loss():
            with torch.autocast("cuda", torch.float16, enabled=mixed):
                return F.cross_entropy(model(images), classes)

        scaler = torch.amp.GradScaler("cpu") if mixed else None
        return steps(model, loss, torch.optim.Adam(model.parameters()), min(times, 2), scaler)

    known = card("A100-40GB", tf32=half or mixed)
    return simulate(run, card=known, repeat=times / min(times, 2))


def vit_2023() -> Iterator[tuple[str, Callable]]:
    yield "fp32", partial(vit, 64)
    yield "16-mixed", partial(vit, 64, mixed=True)
    yield "bf16-true", partial(vit, 64, half=True)
    yield "bf16-true, batch size 16", partial(vit, 16, half=True)
    yield "bf16-true, accumulation 4 x 4", partial(vit, 4, half=True, times=4)


SETS = {
    "decoder-b200": decoder_b200,
    "guide-2022": guide_2022,
    "t5-base-a100": t5_a100,
    "t5-base-3090": t5_3090,
    "book-b200": book_b200,
    "decoder-h20": decoder_h20,
    "decoder-4090": decoder_4090,
    "fms": fine_tuning,
    "peft-images": images,
    "build-nanogpt": nano_gpt,
    "llms-from-scratch": from_scratch,
    "vit-l-2023": vit_2023,
    "torchtune-llama3.2-3b": torchtune,
}
