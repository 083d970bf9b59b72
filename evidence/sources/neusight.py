"""Language models in 32 bits on four cards: the labels of NeuSight (scripts/asplos/label).

Forward passes without gradients, or forward and backward in training mode, each timed by itself;
the loss between them is not in its times, but in these. transformers 4.38.1, attention by matrices.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
import transformers
from transformers import AutoConfig

from evidence.cards import card
from evidence.techniques import padded
from fake_cuda import Simulation, simulate
from helpers.hardware import data_file

EAGER = {"attn_implementation": "eager"}


def bert(trains: bool):
    shape = AutoConfig.from_pretrained(data_file("configs", "bert-large-uncased.json"), **EAGER)
    kind = "BertForPreTraining" if trains else "BertForSequenceClassification"
    return getattr(transformers, kind)(shape)


def gpt(width: int, layers: int, heads: int, length: int, trains: bool):
    shape = transformers.GPT2Config(
        n_embd=width, n_layer=layers, n_head=heads, n_positions=length, use_cache=False, **EAGER
    )
    return transformers.GPT2LMHeadModel(shape)


def opt(trains: bool):
    """OPT-1.3B."""
    shape = transformers.OPTConfig(
        hidden_size=2048,
        ffn_dim=8192,
        num_hidden_layers=24,
        num_attention_heads=32,
        word_embed_proj_dim=2048,
        use_cache=False,
        **EAGER,
    )
    return transformers.OPTForCausalLM(shape)


MODELS = {  # how to build one, and its tokens
    "BERT-large": (bert, 512),
    "GPT-2 large": (partial(gpt, 1280, 36, 20, 1024), 1024),
    "GPT-3 XL": (partial(gpt, 3072, 24, 24, 2048), 2048),
    "GPT-3 2.7B": (partial(gpt, 2560, 32, 32, 2048), 2048),
    "OPT-1.3B": (opt, 2048),
}


def passes(gpu: str, name: str, batch: int, back: bool) -> Simulation:
    """Two passes with backward, or one without."""

    def run():
        build, length = MODELS[name]
        model = build(trains=back).train(back)
        ids = torch.zeros(batch, length, dtype=torch.long)
        given = {"attention_mask": padded(ids)} if name == "BERT-large" else {}
        for _ in range(1 + back):  # without backward all passes would count as one
            with torch.set_grad_enabled(back):
                out = model(input_ids=ids, **given)
            if back:
                logits = out.prediction_logits if name == "BERT-large" else out.logits
                F.cross_entropy(logits.view(-1, logits.shape[-1]), ids.view(-1)).backward()
        return model

    return simulate(run, card=card(gpu))


def runs(gpu: str, forward: tuple = (), back: tuple = ()) -> Iterator[tuple[str, Callable]]:
    """The runs of a card: each a model and a batch."""
    for name, batch in forward:
        yield f"{name}, batch {batch}, forward", partial(passes, gpu, name, batch, False)
    for name, batch in back:
        job = partial(passes, gpu, name, batch, True)
        yield f"{name}, batch {batch}, forward and backward", job


SMALL = (("BERT-large", 8), ("GPT-2 large", 4), ("GPT-2 large", 8), ("OPT-1.3B", 2))
STEPS = {
    "neusight-t4": partial(runs, "T4", (*SMALL, ("BERT-large", 16))),
    "neusight-p100": partial(runs, "P100", SMALL),
    "neusight-l4": partial(
        runs,
        "L4",
        (*SMALL, ("BERT-large", 16), ("GPT-3 2.7B", 2)),
        (("BERT-large", 2), ("BERT-large", 8), ("GPT-2 large", 1)),
    ),
    "neusight-h100": partial(
        runs,
        "H100",
        back=(
            *(("BERT-large", 8), ("GPT-2 large", 1), ("GPT-2 large", 4), ("GPT-3 XL", 1)),
            *(("GPT-3 2.7B", 1), ("OPT-1.3B", 1), ("OPT-1.3B", 2)),
        ),
    ),
}
