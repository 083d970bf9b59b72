"""More runs behind `data/measurements/speeds.csv`: those whose times were committed before any of
them was predicted. `SETS` as in `speeds.py`; what each set is stands in data/README.md.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig

from fake_cuda import simulate
from helpers.hardware import data_file
from real_cards import course
from speeds import card

OTHER = {  # the assignment's sizes that differ from those of its later edition in speeds.py
    "small": (768, 12, 12, 3072),
    "medium": (1024, 24, 16, 4096),
    "large": (1280, 36, 20, 5120),
    "xl": (1600, 48, 25, 6400),
    "2.7B": (2560, 32, 32, 10240),
}


# --------------------------------------------------------------- an assignment's decoder (CS336, 2)
def student(size: str, length: int, bf16: bool = False) -> course.Student:
    width, layers, heads, inner = OTHER[size]
    how = dict(rotate="looked up", adamw="decay last", bf16=bf16)
    return course.Student(width, layers, heads, inner, length=length, **how)


def decoder_pass(size: str, length: int, back: bool):
    """The mean of the logits, with backward or without; nobody empties the gradients."""

    def run():
        model = course.Decoder(student(size, length))
        for _ in range(1 + back):  # without backward all passes would count as one
            value = model(torch.zeros(4, length, dtype=torch.long)).mean()
            if back:
                value.backward()
            value.item()
        return model

    return simulate(run, card=card("A100-40GB"))


def decoder_step(size: str, length: int, bf16: bool):
    def run():
        known = student(size, length, bf16)
        model = course.Decoder(known)
        words = torch.zeros(4, length, dtype=torch.long)
        optimizer = course.AdamW(model.parameters(), known)
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
            for _ in range(2):
                model.zero_grad()
                loss = course.loss_of(model(words), words, known.loss)
                loss.backward()
                optimizer.step()
                loss.item()
        return model, optimizer

    return simulate(run, card=card("A100-40GB"))


def decoder_a100() -> Iterator[tuple[str, Callable]]:
    for text in ("forward", "forward and backward"):
        for size in OTHER:
            for length in (128, 512):
                job = partial(decoder_pass, size, length, text != "forward")
                yield f"{size}, {length} tokens, {text}", job


def decoder_a100_steps() -> Iterator[tuple[str, Callable]]:
    for kind in ("fp32", "bf16"):
        for size in OTHER:
            for length in (128, 512):
                yield (
                    f"{size} {kind}, {length} tokens",
                    partial(decoder_step, size, length, kind == "bf16"),
                )


# ------------------------------------------------------------ attention kernels in transformers
def padded(ids: torch.Tensor) -> torch.Tensor:
    """A mask that stays: today's transformers drops one of ones alone, that of then added it."""
    mask = torch.ones_like(ids)
    mask[:, -1] = 0
    return mask


def kernels(name: str, kind: str, shape, batch: int, length: int, mask: bool):
    """optimum's script: half weights, the sum of the logits, no update."""

    def run():
        model = getattr(transformers, kind)(shape()).half().train()
        ids = torch.zeros(batch, length, dtype=torch.long)
        given = {"attention_mask": padded(ids)} if mask else {}
        for _ in range(2):
            model.zero_grad()
            model(input_ids=ids, **given).logits.sum().backward()
        return model

    return simulate(run, card=card(name))


def bert_a100() -> Iterator[tuple[str, Callable]]:
    for batch, length in ((4, 256), (4, 512), (8, 256), (8, 512), (16, 256), (16, 512)):
        for kernel in ("eager", "sdpa"):
            path = data_file("configs", "bert-base-uncased.json")
            shape = partial(AutoConfig.from_pretrained, path, attn_implementation=kernel)
            yield (
                f"{kernel}, {batch} x {length}",
                partial(
                    kernels, "A100-80GB", "BertLMHeadModel", shape, batch, length, kernel == "eager"
                ),
            )


def opt_l40s() -> Iterator[tuple[str, Callable]]:
    sizes = dict(hidden_size=1024, ffn_dim=4096, num_hidden_layers=24, num_attention_heads=16)
    options = dict(do_layer_norm_before=False, word_embed_proj_dim=512, use_cache=False)
    options["attn_implementation"] = "sdpa"
    shape = partial(transformers.OPTConfig, **sizes, **options)
    cases = [(1, 128), (1, 512), (1, 1024), (1, 2048), (2, 2048), (4, 128), (4, 512), (4, 1024)]
    for batch, length in [*cases, (8, 128), (8, 512), (8, 1024)]:
        job = partial(kernels, "L40S", "OPTForCausalLM", shape, batch, length, False)
        yield f"{batch} x {length}", job


# ---------------------------------------------------------- BERT and ResNet on a laboratory
def squad(name: str, model: str, batch: int, fp16: bool):
    """NVIDIA's example: half weights with masters by apex, or Adam tensor by tensor."""

    def run():
        path = data_file("configs", f"{model}-uncased.json")
        shape = AutoConfig.from_pretrained(path, vocab_size=30528, attn_implementation="eager")
        model_ = transformers.BertForQuestionAnswering(shape).train()
        model_ = model_.half() if fp16 else model_
        weights = list(model_.parameters())
        masters = [nn.Parameter(p.detach().float()) for p in weights] if fp16 else weights
        way = {"fused": True} if fp16 else {"foreach": False}
        optimizer = torch.optim.AdamW(masters, **way)
        words = torch.zeros(batch, 384, dtype=torch.long)
        places = torch.zeros(batch, dtype=torch.long)
        for _ in range(2):
            out = model_(
                input_ids=words,
                token_type_ids=torch.zeros_like(words),
                attention_mask=padded(words),
            )
            ends = (out.start_logits.float(), out.end_logits.float())
            loss = sum(F.cross_entropy(x, places) for x in ends) / 2
            loss.backward()
            if fp16:
                gradients = [p.grad for p in weights]
                for master in masters:
                    master.grad = torch.empty_like(master)
                torch._foreach_copy_([p.grad for p in masters], gradients)
                loss.item()  # whether all gradients are finite
            nn.utils.clip_grad_norm_(masters, 1.0)
            optimizer.step()
            if fp16:
                with torch.no_grad():
                    torch._foreach_copy_(weights, masters)
            model_.zero_grad(set_to_none=True)
            optimizer.zero_grad(set_to_none=True)
            loss.item()
        return model_, masters, optimizer

    return simulate(run, card=card(name, tf32=name != "V100"))


def resnet(depths=(3, 4, 6, 3), basic=False):
    widths = [64, 128, 256, 512] if basic else [256, 512, 1024, 2048]
    kind = "basic" if basic else "bottleneck"
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(
            num_labels=1000, depths=list(depths), hidden_sizes=widths, layer_type=kind
        )
    )


def images(
    name, build, batch, amp=False, last=False, scale=False, foreach=False, waits=True, **sgd
):
    """Steps of SGD on pictures of 224 pixels; `last`: channels last; `waits`: once a step."""

    def run():
        model = build().train()
        pictures, classes = torch.zeros(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.long)
        if last:
            model = model.to(memory_format=torch.channels_last)
            pictures = pictures.contiguous(memory_format=torch.channels_last)

        def loss():
            with torch.autocast("cuda", torch.float16, enabled=amp):
                out = model(pictures)
                return F.cross_entropy(getattr(out, "logits", out), classes)

        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, foreach=foreach, **sgd
        )
        scaler = torch.amp.GradScaler("cpu", enabled=scale)
        for _ in range(2):
            value = loss()
            scaler.scale(value).backward()
            scaler.step(optimizer)
            scaler.update()
            if waits:
                value.item()
            model.zero_grad(set_to_none=True)
        return model, optimizer

    return simulate(run, card=card(name, tf32=name != "V100"))


LAMBDA = {  # card: batches of BERT-base and -large with fp16 and without, of ResNet-50 the same
    "V100": (48, 24, 16, 8, 256, 128),
    "RTX 3090": (96, 48, 28, 16, 448, 224),
    "A10": (80, 48, 28, 12, 448, 224),
    "A100-80GB": (320, 172, 112, 64, 1280, 640),
    "RTX 4090": (96, 48, 28, 16, 448, 224),
    "H100-PCIe": (320, 172, 112, 64, 1280, 640),
    "H100": (320, 172, 112, 64, 1280, 640),
}


def laboratory(name: str) -> Iterator[tuple[str, Callable]]:
    batches = iter(LAMBDA[name])
    fp32 = "float32" if name == "V100" else "tf32"
    for model in ("bert-base", "bert-large"):
        for kind in ("fp16", fp32):
            yield f"{model} {kind}", partial(squad, name, model, next(batches), kind == "fp16")
    newer = {"foreach": None} if name == "H100" else {}  # torch 2 updates all tensors of a list
    for kind in ("amp", fp32):
        amp = kind == "amp"
        yield (
            f"resnet50 {kind}",
            partial(images, name, resnet, next(batches), amp=amp, scale=amp, **newer),
        )


def resnet_v100() -> Iterator[tuple[str, Callable]]:
    for kind in ("fp32", "amp"):
        for layout in ("last", "first"):
            options = {"amp": kind == "amp", "last": layout == "last", "waits": False}
            yield f"{kind}, channels {layout}", partial(images, "V100", resnet, 128, **options)


# ------------------------------------------------------------------------------- timm's benchmark
class Layer(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1, self.norm2, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        many, length, width = x.shape
        qkv = self.into(self.norm1(x)).reshape(many, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        weights = (q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(many, length, width))
        return x + self.feed(self.norm2(x))


class Vit(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, width, 16, 16), nn.LayerNorm(width, eps=1e-6)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, 197, width))
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(12)))
        self.head = nn.Linear(width, 1000)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.norm(self.layers(x))[:, 0])


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


TIMM = {
    "resnet18": (partial(resnet, (2, 2, 2, 2), True), 512),
    "resnet50": (resnet, 512),
    "resnet101": (partial(resnet, (3, 4, 23, 3)), 256),
    "vit_tiny_patch16_224": (partial(Vit, 192, 3), 512),
    "vit_small_patch16_224": (partial(Vit, 384, 6), 384),
    "vit_base_patch16_224": (partial(Vit, 768, 12), 192),
    "convnext_tiny": (partial(convnext, 9, 96), 256),
    "convnext_base": (partial(convnext, 27, 128), 128),
    "mobilenetv2_100": (mobilenet, 512),
}


def timm() -> Iterator[tuple[str, Callable]]:
    for layout in ("last", "first"):
        for model, (build, batch) in TIMM.items():
            options = {"amp": True, "last": layout == "last", "nesterov": True}
            job = partial(images, "RTX 3090", build, batch, **options)
            yield f"{model}, channels {layout}", job


# ------------------------------------------------------------------------------ attention alone
def flash(name: str, batch: int, heads: int, length: int, width: int, causal=False, back=False):
    def run():
        shape = batch, heads, length, width
        q, k, v = (torch.zeros(shape, dtype=torch.half, requires_grad=back) for _ in range(3))
        gradient = torch.zeros(shape, dtype=torch.half)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            for _ in range(1 + back):
                q.grad = k.grad = v.grad = None
                y = Attend(causal)(q, k, v)
                if back:
                    y.backward(gradient)
        return q, k, v, y

    return simulate(run, card=card(name))


class Attend(nn.Module):  # a module's call marks where the pass begins
    def __init__(self, causal: bool):
        super().__init__()
        self.causal = causal

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


def attention_h20() -> Iterator[tuple[str, Callable]]:
    for width in (64, 128):
        for kind in ("whole", "causal"):
            job = partial(flash, "H20", 2, 2048 // width, 2048, width, kind == "causal")
            yield f"{width} a head, {kind}", job


def attention_b200() -> Iterator[tuple[str, Callable]]:
    for length in (512, 1024, 2048, 4096, 8192, 16384):
        for stage in ("forward", "forward and backward"):
            job = partial(flash, "B200", 16384 // length, 32, length, 64, back=stage != "forward")
            yield f"{length} tokens, {stage}", job


SETS = {
    "decoder-a100": decoder_a100,
    "decoder-a100-steps": decoder_a100_steps,
    "bert-a100": bert_a100,
    "opt-l40s": opt_l40s,
    "lambda-v100": partial(laboratory, "V100"),
    "lambda-3090": partial(laboratory, "RTX 3090"),
    "lambda-a10": partial(laboratory, "A10"),
    "lambda-a100": partial(laboratory, "A100-80GB"),
    "lambda-4090": partial(laboratory, "RTX 4090"),
    "lambda-h100-pcie": partial(laboratory, "H100-PCIe"),
    "lambda-h100": partial(laboratory, "H100"),
    "resnet-v100": resnet_v100,
    "timm-3090": timm,
    "attention-h20": attention_h20,
    "attention-b200": attention_b200,
}
