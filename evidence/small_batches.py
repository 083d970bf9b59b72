"""Train the tiny language model with and without accumulation: what the same samples teach it.

    python -m evidence.small_batches        appends to data/measurements/small_batches.csv

Each run sees the same number of samples in micro-batches of four, with the optimizer's step after
one or after eight of them, at several learning rates and in several orders of the data. Five
minutes on two CPU cores. Lesson 04 shows the rows.
"""

import datetime
from itertools import product

import pandas as pd
from tqdm import tqdm

from evidence.tables import MEASURED
from helpers import language_modelling, train
from helpers.hardware import versions

ROWS = MEASURED / "small_batches.csv"
SAMPLES, MICRO, ORDERS = 1024, 4, (0, 1, 2)
RATES = {1: (0.00075, 0.0015, 0.003), 8: (0.003, 0.006, 0.012)}  # by micro-batches in a step


def test_loss(trainer) -> float:
    return trainer.evaluate(trainer.eval_dataset.select(range(64)))["eval_loss"]


def measure(passes: int, rate: float, order: int) -> dict:
    """One run as a row: its seed sets the first weights and the order of the samples."""
    run = train(
        language_modelling("tiny", seed=order),
        after=test_loss,
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=passes,
        learning_rate=rate,
        max_steps=SAMPLES // MICRO // passes,
        train_sampling_strategy="random",
    )
    facts = {"passes": passes, "learning_rate": rate, "order": order, "samples": SAMPLES}
    facts |= {"test_loss": round(run.after, 4), "peak_allocated": run.peak_allocated}
    facts |= {"device": run.device} | {name: versions()[name] for name in ("torch", "transformers")}
    return facts | {"date": datetime.date.today().isoformat()}


if __name__ == "__main__":
    jobs = [(n, rate, order) for n, order in product(RATES, ORDERS) for rate in RATES[n]]
    for job in tqdm(jobs, unit="run"):
        pd.DataFrame([measure(*job)]).to_csv(ROWS, mode="a", header=not ROWS.exists(), index=False)
