"""BERT-large on an RTX 3090, stage by stage: a notebook of mscherrmann.github.io (February 2024).

Two steps of AdamW (lists, the default) on 4 texts of 512 tokens, in 32 bits, with transformers
before 4.41, whose BERT has no fused attention. The cache is emptied after each stage.
"""

from collections.abc import Callable, Iterator

import torch
from transformers import BertConfig, BertForSequenceClassification

from evidence.cards import card, readings_after_emptying
from fake_cuda import simulate

LARGE = dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16)
LARGE |= dict(intermediate_size=4096, attn_implementation="eager")


def two_steps():
    model = BertForSequenceClassification(BertConfig(**LARGE))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    torch.cuda.empty_cache()
    for _ in range(2):
        batch = {"input_ids": torch.zeros(4, 512).long(), "labels": torch.zeros(4).long()}
        loss = model(**batch).loss
        torch.cuda.empty_cache()
        loss.backward()
        torch.cuda.empty_cache()
        optimizer.step()
        torch.cuda.empty_cache()
        optimizer.zero_grad()
        torch.cuda.empty_cache()
    return model, optimizer, batch, loss


def stages() -> dict[str, int]:
    found = simulate(two_steps, card=card("RTX 3090"))
    # The model, four stages of the first step, then the second forward pass.
    forward = readings_after_emptying(found)[5]
    return {
        "allocated": found.peak_allocated,
        "allocated after the forward pass": forward.allocated,
        "reserved after the forward pass": forward.reserved,
    }


def runs() -> Iterator[tuple[str, Callable]]:
    yield "second step", stages


PEAKS = {"bert-large-3090": runs}
