"""One layer of BERT-large on a V100 of 16 GB: micro_bench.ipynb of mli/transformers-benchmarks.

All in 16 bits, with dropout, no mask, no optimizer; gradients add up. The source prints TFLOP/s,
from which the seconds follow by its own formula.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from transformers import AutoConfig
from transformers.models.bert.modeling_bert import BertLayer

from evidence.cards import card
from fake_cuda import Simulation, simulate
from helpers.hardware import data_file


def passes(batch: int, length: int) -> Simulation:
    """Three passes with backward, of which the last ones add to gradients that are there."""

    def run():
        path = data_file("configs", "bert-large-uncased.json")
        layer = BertLayer(AutoConfig.from_pretrained(path, attn_implementation="eager")).half()
        x = torch.zeros(batch, length, 1024, dtype=torch.half)
        for _ in range(3):
            out = layer.train()(x)
            (out[0] if isinstance(out, tuple) else out).sum().backward()
        return layer

    return simulate(run, card=card("V100"))


def runs() -> Iterator[tuple[str, Callable]]:
    for length in (128, 512):
        for batch in (4, 8, 16, 32, 64, 128):
            yield f"{length} tokens, batch {batch}", partial(passes, batch, length)


STEPS = {"bert-layer-v100": runs}
