"""BERT and ResNet-50 on seven cards: lambdal/deeplearning-benchmark, with NVIDIA's example scripts.

NVIDIA's DeepLearningExamples of that time (LambdaLabsML's fork): run_squad.py with half weights and
masters by apex and its FusedAdam, or float32 and an Adam tensor by tensor; and the ConvNets, whose
loss is scaled also where it has no autocast, by a scaler that then does nothing.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import AutoConfig

from evidence.cards import card
from evidence.models import resnet
from evidence.techniques import image_steps, padded, sgd
from fake_cuda import Simulation, simulate
from helpers.hardware import data_file

LENGTH = 384  # of a question with its text, padded


class Masters:
    """apex's O2: the optimizer has weights of its own in 32 bits, and those in 16 are copies."""

    def __init__(self, weights: list[nn.Parameter]):
        self.weights = weights
        self.masters = [nn.Parameter(p.detach().float()) for p in weights]

    def take_gradients(self) -> None:
        gradients = [p.grad for p in self.weights]
        for master in self.masters:
            master.grad = torch.empty_like(master)
        torch._foreach_copy_([p.grad for p in self.masters], gradients)

    @torch.no_grad()
    def give_weights(self) -> None:
        torch._foreach_copy_(self.weights, self.masters)


def answer_loss(model, words, places):
    """Cross-entropy of both ends of an answer; words (batch, length), places (batch,)."""
    out = model(
        input_ids=words, token_type_ids=torch.zeros_like(words), attention_mask=padded(words)
    )
    ends = (out.start_logits.float(), out.end_logits.float())  # (batch, length) each
    return sum(F.cross_entropy(x, places) for x in ends) / 2


def squad(name: str, config: str, batch: int, fp16: bool) -> Simulation:
    """Two steps of run_squad.py."""

    def run():
        path = data_file("configs", f"{config}-uncased.json")
        shape = AutoConfig.from_pretrained(path, vocab_size=30528, attn_implementation="eager")
        model = transformers.BertForQuestionAnswering(shape).train()
        model = model.half() if fp16 else model
        half = Masters(list(model.parameters())) if fp16 else None
        trained = half.masters if half else list(model.parameters())
        # NVIDIA's own Adam for 32 bits goes tensor by tensor in every version of torch.
        way = {"fused": True} if fp16 else {"foreach": False}
        optimizer = torch.optim.AdamW(trained, **way)
        words = torch.zeros(batch, LENGTH, dtype=torch.long)
        places = torch.zeros(batch, dtype=torch.long)
        for _ in range(2):
            loss = answer_loss(model, words, places)
            loss.backward()
            if half:
                half.take_gradients()
                loss.item()  # whether all gradients are finite
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            if half:
                half.give_weights()
                model.zero_grad(set_to_none=True)
                optimizer.zero_grad(set_to_none=True)  # FusedAdam's default
            else:
                optimizer.zero_grad()
            loss.item()
        return model, half, optimizer

    return simulate(run, card=card(name, tf32=name != "V100"))


def resnet50(name: str, batch: int, amp: bool) -> Simulation:
    """Two steps of the ConvNets' main.py."""

    def run():
        model = resnet().train()
        optimizer = sgd(model)
        image_steps(model, batch, optimizer, autocast=amp, scale=amp)
        return model, optimizer

    return simulate(run, card=card(name, tf32=name != "V100"))


BATCHES = {  # card: of BERT-base and -large with fp16 and without, of ResNet-50 the same
    "V100": (48, 24, 16, 8, 256, 128),
    "RTX 3090": (96, 48, 28, 16, 448, 224),
    "A10": (80, 48, 28, 12, 448, 224),
    "A100-80GB": (320, 172, 112, 64, 1280, 640),
    "RTX 4090": (96, 48, 28, 16, 448, 224),
    "H100-PCIe": (320, 172, 112, 64, 1280, 640),
    "H100": (320, 172, 112, 64, 1280, 640),
}


def laboratory(name: str) -> Iterator[tuple[str, Callable]]:
    batches = iter(BATCHES[name])
    fp32 = "float32" if name == "V100" else "tf32"
    for config in ("bert-base", "bert-large"):
        for kind in ("fp16", fp32):
            yield f"{config} {kind}", partial(squad, name, config, next(batches), kind == "fp16")
    for kind in ("amp", fp32):
        yield f"resnet50 {kind}", partial(resnet50, name, next(batches), kind == "amp")


STEPS = {
    "lambda-v100": partial(laboratory, "V100"),
    "lambda-3090": partial(laboratory, "RTX 3090"),
    "lambda-a10": partial(laboratory, "A10"),
    "lambda-a100": partial(laboratory, "A100-80GB"),
    "lambda-4090": partial(laboratory, "RTX 4090"),
    "lambda-h100-pcie": partial(laboratory, "H100-PCIe"),
    "lambda-h100": partial(laboratory, "H100"),
}
