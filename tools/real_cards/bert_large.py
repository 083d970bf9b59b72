"""BERT-large on an RTX 3090, stage by stage: a notebook of mscherrmann.github.io (February 2024).

Two steps of AdamW (lists, the default) on 4 texts of 512 tokens, in 32 bits, with transformers
before 4.41, whose BERT has no fused attention. The cache is emptied after each stage.
"""

from collections.abc import Callable, Iterator

import torch
from transformers import BertConfig, BertForSequenceClassification

from fake_cuda import Allocator, simulate

LARGE = dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16)
LARGE |= dict(intermediate_size=4096, attn_implementation="eager")
RTX_3090 = (8, 6), 82  # compute capability, multiprocessors (data/gpus.csv)


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
    found, allocator, after = simulate(two_steps, *RTX_3090), Allocator(), []
    for i, size in found.log:
        allocator.step(i, size)
        if not size:
            blocks = sum(n for n, _, is_free in allocator.blocks.values() if not is_free)
            after.append((blocks, allocator.reserved))
    forward = after[5]  # the model, four stages of the first step, then the second forward pass
    return {
        "allocated": found.peak_allocated,
        "allocated after the forward pass": forward[0],
        "reserved after the forward pass": forward[1],
    }


def runs() -> Iterator[tuple[str, Callable]]:
    yield "second step", stages


SETS = {"bert-large-3090": runs}
