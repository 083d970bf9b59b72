"""Train the tiny language model with and without accumulation: what the same samples teach it.

    python -m evidence.small_batches        appends to data/measurements/small_batches.csv

Each run sees the same number of samples in micro-batches of four, with the optimizer's step after
one or after eight of them, at several learning rates and in several orders of the data: with
`Trainer`'s second beta, and with the one whose half-life is as many tokens as the other batch has.
Ten minutes on two CPU cores. An interrupted run goes on where it stopped. Lesson 04 shows the rows.
"""

import datetime
from itertools import product

from evidence.tables import MEASURED, append_missing
from helpers import language_modelling, train
from helpers.hardware import versions

ROWS = MEASURED / "small_batches.csv"
SAMPLES, MICRO, ORDERS = 1024, 4, (0, 1, 2)
RATES = {1: (0.00075, 0.0015, 0.003), 8: (0.003, 0.006, 0.012)}  # by micro-batches in a step
# Adam's second average keeps beta2 of itself in a step: the root, or the power, for other batches.
BETAS = {1: (0.999, round(0.999 ** (1 / 8), 6)), 8: (0.999, round(0.999**8, 6))}
JOB = ["passes", "learning_rate", "order", "beta2"]


def test_loss(trainer) -> float:
    return trainer.evaluate(trainer.eval_dataset.select(range(64)))["eval_loss"]


def measure(passes: int, rate: float, order: int, beta2: float) -> dict:
    """One run as a row: its seed sets the first weights and the order of the samples."""
    run = train(
        language_modelling("tiny", seed=order),
        after=test_loss,
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=passes,
        learning_rate=rate,
        adam_beta2=beta2,
        max_steps=SAMPLES // MICRO // passes,
        train_sampling_strategy="random",
    )
    facts = dict(zip(JOB, (passes, rate, order, beta2), strict=True)) | {"samples": SAMPLES}
    facts |= {"test_loss": round(run.after, 4), "peak_allocated": run.peak_allocated}
    facts |= {"device": run.device} | {name: versions()[name] for name in ("torch", "transformers")}
    return facts | {"date": datetime.date.today().isoformat()}


def jobs() -> list[tuple]:
    """What is asked for, in the order of JOB."""
    return [
        (passes, rate, order, beta2)
        for passes in RATES
        for beta2, order, rate in product(BETAS[passes], ORDERS, RATES[passes])
    ]


if __name__ == "__main__":
    append_missing(ROWS, JOB, jobs(), measure)
