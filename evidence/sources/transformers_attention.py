"""BERT and OPT under transformers' attention kernels, timed in its pull requests 28802 and 33298.

The script is optimum's benchmark_bettertransformer_training_minimal.py: float16 weights, the sum of
the logits and its backward, no update.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import transformers
from transformers import AutoConfig

from evidence.cards import card
from evidence.techniques import padded
from fake_cuda import Simulation, simulate
from helpers.hardware import data_file


def passes(name: str, build: Callable, batch: int, length: int, mask: bool) -> Simulation:
    """Two passes with backward of the model that `build` makes."""

    def run():
        model = build().half().train()
        ids = torch.zeros(batch, length, dtype=torch.long)
        given = {"attention_mask": padded(ids)} if mask else {}
        for _ in range(2):
            model.zero_grad()
            model(input_ids=ids, **given).logits.sum().backward()
        return model

    return simulate(run, card=card(name))


def bert(kernel: str):
    path = data_file("configs", "bert-base-uncased.json")
    shape = AutoConfig.from_pretrained(path, attn_implementation=kernel)
    return transformers.BertLMHeadModel(shape)


def opt():
    """OPT-350m."""
    shape = transformers.OPTConfig(
        hidden_size=1024,
        ffn_dim=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        do_layer_norm_before=False,
        word_embed_proj_dim=512,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return transformers.OPTForCausalLM(shape)


def bert_a100() -> Iterator[tuple[str, Callable]]:
    for batch in (4, 8, 16):
        for length in (256, 512):
            for kernel in ("eager", "sdpa"):
                build, masked = partial(bert, kernel), kernel == "eager"
                job = partial(passes, "A100-80GB", build, batch, length, masked)
                yield f"{kernel}, {batch} x {length}", job


def opt_l40s() -> Iterator[tuple[str, Callable]]:
    cases = [(1, 128), (1, 512), (1, 1024), (1, 2048), (2, 2048), (4, 128), (4, 512), (4, 1024)]
    for batch, length in [*cases, (8, 128), (8, 512), (8, 1024)]:
        yield f"{batch} x {length}", partial(passes, "L40S", opt, batch, length, False)


STEPS = {"bert-a100": bert_a100, "opt-l40s": opt_l40s}
