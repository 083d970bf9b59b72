"""Count the steps in which adapters of several ranks learn a text, over seeds and orders of data.

    python -m evidence.adapter_steps        appends to data/measurements/adapter_steps.csv

What lesson 12 does once, by its own rules: the tiny model, which has read Python's source, learns
Python's code pages until its loss on held-out ones is below the goal. Here each way is run with
three seeds of the adapters' first weights, each in two orders of the data, and longer before it is
given up. Ten minutes on a busy CPU core. An interrupted run goes on where it stopped.
"""

import datetime
import encodings
from dataclasses import replace
from itertools import product
from pathlib import Path

import datasets
import torch
from peft import LoraConfig, get_peft_model

from evidence.tables import MEASURED, append_missing
from helpers import language_modelling
from helpers.hardware import versions

ROWS = MEASURED / "adapter_steps.csv"
GOAL, MOST, BATCH, SEEDS, ORDERS = 2.4, 60, 8, (0, 1, 2), (0, 1)
QV = ("q_proj", "v_proj")
LINEAR = (*QV, "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ALPHA = 8
# Name: layers with adapters (none: all weights train), rank, stabilised, rate.
WAYS = {
    "full": ((), 0, False, 1.5e-3),
    "rank 2": (LINEAR, 2, False, 1.5e-2),
    "rank 8": (LINEAR, 8, False, 1.5e-2),
    "rank 64": (LINEAR, 64, False, 1.5e-2),
    "rank 64, stabilised": (LINEAR, 64, True, 2e-3),
    "rank 8, q and v": (QV, 8, False, 1.5e-2),
}
JOB = ["way", "seed", "order"]


def changed(model, way: str):
    """The model with the adapters of a way."""
    layers, rank, stabilised, _ = WAYS[way]
    if not layers:
        return model
    options = {"r": rank, "lora_alpha": ALPHA, "use_rslora": stabilised}
    return get_peft_model(model, LoraConfig(target_modules=list(layers), **options))


def texts(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of bytes to train on and for the test, split as in the lesson."""
    files = sorted(Path(encodings.__path__[0]).glob("cp*.py"))
    charts = "\n".join(path.read_text("utf-8") for path in files)
    ids = torch.tensor(list(charts.encode())).unfold(0, length, length).numpy()
    rows = datasets.Dataset.from_dict({"input_ids": ids}).train_test_split(64, seed=0)
    train, test = (rows[split].with_format("torch")[:]["input_ids"] for split in ("train", "test"))
    return train, test[:16]


@torch.no_grad()
def loss(model, ids: torch.Tensor) -> float:
    return model(input_ids=ids, labels=ids).loss.item()


def measure(way: str, seed: int, order: int) -> dict:
    """One run as a row; `steps` is empty where the goal was not reached."""
    tiny = language_modelling("tiny", pretrained=True)
    train, test = texts(tiny.length)
    model = replace(tiny, seed=seed).with_model(lambda model: changed(model, way)).model()
    weights, rate = [p for p in model.parameters() if p.requires_grad], WAYS[way][-1]
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0.0)
    pick, steps, found = torch.Generator().manual_seed(order), 0, float("inf")
    while steps < MOST and found >= GOAL:
        steps += 1
        ids = train[torch.randint(len(train), (BATCH,), generator=pick)]
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found = loss(model, test)
    facts = dict(zip(JOB, (way, seed, order), strict=True)) | {"rate": rate}
    facts |= {"steps": steps if found < GOAL else None, "test_loss": round(found, 4)}
    facts |= {name: versions()[name] for name in ("torch", "transformers")}
    return facts | {"date": datetime.date.today().isoformat()}


def jobs() -> list[tuple]:
    """What is asked for, in the order of JOB."""
    return [(way, seed, order) for seed, order, way in product(SEEDS, ORDERS, WAYS)]


if __name__ == "__main__":
    append_missing(ROWS, JOB, jobs(), measure)
