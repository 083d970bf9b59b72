"""Compile a small decoder beside other techniques: graphs, and memory predicted and measured.

    python -m evidence.compiled_steps       appends to data/measurements/compiled_steps.csv

The tiny language model with one layer is predicted and then trained, eager and compiled, with the
same settings. Graphs and their breaks are those that TorchDynamo counts while it trains. It needs
a C++ compiler and some minutes on two CPU cores. A way that stands in the table is not run again.
Lesson 10 shows the rows.
"""

import datetime
from collections.abc import Callable

import pandas as pd
import torch
from peft import LoraConfig, get_peft_model
from torch._dynamo.utils import counters
from tqdm import tqdm

from evidence.tables import MEASURED
from evidence.techniques import NF4
from helpers import language_modelling, predict, train
from helpers.hardware import versions

ROWS = MEASURED / "compiled_steps.csv"
SETTINGS = {"per_device_train_batch_size": 4, "tf32": False}
EVERY = {"activation_checkpointing": True}


def lora(model):
    return get_peft_model(model, LoraConfig(target_modules="all-linear"))


def checkpointed(model):
    """Before the adapters: PEFT then hooks the embedding, whose output is to ask for gradients."""
    model.activation_checkpointing_enable()
    return model


WAYS: dict[str, tuple[list[Callable], dict]] = {
    "plain": ([], {}),
    "checkpointing": ([], EVERY),
    "LoRA": ([lora], {}),
    "LoRA on 4 bits": ([NF4, lora], {}),
    "LoRA, then checkpointing": ([lora], EVERY),
    "checkpointing, then LoRA": ([checkpointed, lora], {}),
}


def measure(way: str) -> dict:
    """One way as a row: bytes at the peak, eager and compiled, and the graphs of the latter."""
    changes, settings = WAYS[way]
    workload = language_modelling("tiny")
    workload.config.num_hidden_layers = 1
    for change in changes:
        workload = workload.with_model(change)
    facts = {"way": way}
    for name, compiled in {"eager": {}, "compiled": {"torch_compile": True}}.items():
        asked = SETTINGS | settings | compiled
        facts[f"{name}_predicted"] = predict(workload, gpu="cpu", **asked).peak_allocated
        torch._dynamo.reset()
        counters.clear()
        run = train(workload, max_steps=4, **asked)
        facts[f"{name}_measured"] = run.peak_allocated
    reasons = [str(reason).splitlines()[0].strip() for reason in counters["graph_break"]]
    facts |= {"graphs": counters["stats"]["unique_graphs"], "why": "; ".join(sorted(reasons))}
    facts |= {"device": run.device} | {name: versions()[name] for name in ("torch", "transformers")}
    return facts | {"date": datetime.date.today().isoformat()}


if __name__ == "__main__":
    made = set(pd.read_csv(ROWS)["way"]) if ROWS.exists() else set()
    for way in tqdm([way for way in WAYS if way not in made], unit="way"):
        row = pd.DataFrame([measure(way)])
        row.to_csv(ROWS, mode="a", header=not ROWS.exists(), index=False)
