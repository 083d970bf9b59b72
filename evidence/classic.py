"""The nine runs of the classic table of January 2022: BERT-large on a V100.

It was measured with torch 1.10 and transformers 4.15. With what these did otherwise `classic` must
reproduce it, and leaving that out one by one shows what four years of library work changed. Lesson
01 and `evidence/sources/guide_2022.py` share it.
"""

from collections.abc import Callable

import torch
from transformers.optimization import Adafactor

from evidence import libraries
from helpers import Prediction, Workload, predict, text_classification

VERSIONS = {"torch": "1.10", "transformers": "4.15"}
BEHAVIOURS = ("softmax keeps its input", "gradients zeroed, not freed", "eager attention")


def _eager(model):
    model.set_attn_implementation("eager")
    return model


def adam(model, args):
    """AdamW parameter by parameter, as torch 1.10 had it; said, as a real card runs it, too."""
    return torch.optim.AdamW(model.parameters(), foreach=False)


def adam_8bit(model, args):
    """As the guide built it by hand: every tensor in 8 bits, embeddings too."""
    import bitsandbytes

    return bitsandbytes.optim.Adam8bit(model.parameters())


def adafactor(model, args):
    return Adafactor(model.parameters(), lr=1e-3, scale_parameter=False, relative_step=False)


OPTIMIZERS: dict[str, Callable] = {"adam": adam, "8-bit Adam": adam_8bit, "Adafactor": adafactor}
ALL = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
ALL |= {"activation_checkpointing": True, "fp16": True}
# The nine runs of the classic table: (optimizer, keywords of TrainingArguments in today's words).
CLASSIC: dict[str, tuple[str, dict]] = {
    "vanilla": ("adam", {"per_device_train_batch_size": 4}),
    "accumulation": ("adam", {k: ALL[k] for k in list(ALL)[:2]}),
    "accumulation + checkpointing": ("adam", {k: ALL[k] for k in list(ALL)[:3]}),
    "fp16": ("adam", {"per_device_train_batch_size": 4, "fp16": True}),
    "fp16 + accumulation + checkpointing": ("adam", ALL),
    "Adafactor": ("Adafactor", {"per_device_train_batch_size": 4}),
    "Adafactor + fp16 + accumulation + checkpointing": ("Adafactor", ALL),
    "8-bit Adam": ("8-bit Adam", {"per_device_train_batch_size": 4}),
    "8-bit Adam + fp16 + accumulation + checkpointing": ("8-bit Adam", ALL),
}
TODAY = {"adam": "adamw_torch_fused", "8-bit Adam": "adamw_bnb_8bit", "Adafactor": "adafactor"}


def classic(run: str, behaviours: tuple[str, ...] = BEHAVIOURS, gpu: str = "V100") -> Prediction:
    """Predict a run of the classic table with some behaviours of 2022; with none, today's defaults.

    KeyError for a run that is not in `CLASSIC`.
    """
    optimizer, settings = CLASSIC[run]
    workload: Workload = text_classification("large")
    if not behaviours:
        return predict(workload, run, gpu=gpu, optim=TODAY[optimizer], **settings)
    if "eager attention" in behaviours:
        workload = workload.with_model(_eager)
    # Lesson 01 shows the named ones. That checkpoints were reentrant, too, is left to the rows of
    # real cards: it takes 2 MiB of three runs.
    chosen = {*behaviours, "rules of the version"}
    then = [old for old in libraries.of(**VERSIONS) if old.name in chosen]
    with libraries.behaving(then):
        options = {"gpu": gpu, "optimizer": OPTIMIZERS[optimizer]}
        return predict(workload, run, **options, **settings)
