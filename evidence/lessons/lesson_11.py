"""Lesson 11: attention and the loss against length, and the kernel that two cards pick."""

import itertools
from collections.abc import Iterator
from unittest.mock import patch

import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers.integrations import sdpa_attention

from fake_cuda import rules_of
from helpers import language_modelling, predict

LENGTHS = 512, 1024, 2048, 4096, 8192, 16384
ONE = {"per_device_train_batch_size": 1}


def eager(model):
    model.set_attn_implementation("eager")
    return model


def piece_loss(hidden, weight, labels):
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")


def in_pieces(model):
    def forward(input_ids, labels, num_items_in_batch=None, **_):
        hidden = model.model(input_ids=input_ids).last_hidden_state[:, :-1].flatten(0, 1)
        labels = labels[:, 1:].flatten()
        total = sum(
            checkpoint(piece_loss, h, model.lm_head.weight, y, use_reentrant=False)
            for h, y in zip(hidden.split(512), labels.split(512), strict=True)
        )
        return {"loss": total / num_items_in_batch}

    model.forward = forward
    return model


VARIANTS = {"eager": (eager,), "sdpa": (), "sdpa, loss in pieces": (in_pieces,)}


def attention() -> Iterator[tuple]:
    """Llama-3.2-1B in bf16 on an A100; the run is the number of tokens."""
    for length, variant in itertools.product(LENGTHS, VARIANTS):

        def run(length=length, variant=variant):
            workload = language_modelling("llama-3.2-1b", length=length)
            for change in VARIANTS[variant]:
                workload = workload.with_model(change)
            return predict(workload, gpu="A100-80GB", bf16=True, **ONE)

        yield length, variant, run


def attention_cards() -> Iterator[tuple]:
    """With and without grouped heads, on a card without and with flash attention; by torch before
    2.14, whose memory-efficient kernel does not read groups."""
    models, cards = ("tinyllama-1.1b", "smollm2-1.7b"), ("T4", "A100-80GB")
    for model, card, variant in itertools.product(models, cards, ("eager", "sdpa", "repeated")):

        def run(model=model, card=card, variant=variant):
            workload = language_modelling(model, length=2048)
            if variant == "eager":
                workload = workload.with_model(eager)
            if variant == "repeated":  # the heads of keys and values, before the kernel is picked
                with patch.object(sdpa_attention, "use_gqa_in_sdpa", lambda *_: False):
                    return predict(workload, gpu=card, fp16=True, **ONE)
            with rules_of(torch="2.13.0"):  # whatever torch is installed
                return predict(workload, gpu=card, fp16=True, **ONE)

        yield f"{model}, {card}", variant, run


SETS = (attention, attention_cards)
