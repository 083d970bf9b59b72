"""Write `data/predictions.csv`: predictions that take too long to run in a lesson.

    python tools/record_predictions.py              every set
    python tools/record_predictions.py ledger       some sets; the rows of the others stay

The file is replaced when all is done, so an interrupted run loses nothing. Never edit it by hand.
"""

import argparse
import datetime
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import behaviours_2022 as old  # noqa: E402  (after the path is set)
from helpers import predict, text_classification  # noqa: E402
from helpers.hardware import suggest, versions  # noqa: E402
from helpers.runs import row  # noqa: E402

# What changed since the classic table, in the order of the years.
VARIANTS = {
    "2022": old.BEHAVIOURS,
    "softmax keeps its output only": old.BEHAVIOURS[1:],
    "gradients are freed": old.BEHAVIOURS[2:],
    "today": (),
}
PRECISIONS = {"fp32": {}, "fp16": {"fp16": True}}
OPTIMIZERS = ("adamw_torch_fused", "adamw_bnb_8bit", "adafactor", "sgd")


def classic() -> Iterator[tuple[str, str, object]]:
    """The nine runs of the classic table, from the libraries of 2022 to today's."""
    for variant, run in itertools.product(VARIANTS, old.CLASSIC):
        yield run, variant, lambda run=run, variant=variant: old.classic(run, VARIANTS[variant])


def ledger() -> Iterator[tuple[str, str, object]]:
    """BERT-large on a T4 over batch size, length, precision and optimizer: lesson 02's explorer."""
    axes = ((1, 2, 4, 8, 16), (128, 256, 512), PRECISIONS, OPTIMIZERS)
    for batch, length, precision, optimizer in itertools.product(*axes):

        def run(batch=batch, length=length, precision=precision, optimizer=optimizer):
            workload = text_classification("large", length=length)
            settings = {"per_device_train_batch_size": batch, "optim": optimizer}
            return predict(workload, gpu="T4", **settings, **PRECISIONS[precision])

        yield f"batch {batch}, length {length}, {precision}, {optimizer}", "today", run


SETS = {"classic": classic, "ledger": ledger}


def record(names: list[str], path: Path) -> None:
    """Predict the named sets and write them to `path` with the rows of the other sets."""
    old_rows = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=["set"])
    jobs = [(name, *job) for name in names for job in SETS[name]()]
    rows = []
    for name, run, variant, predicted in tqdm(jobs, unit="prediction"):
        facts = row(predicted())
        keep = "device workload settings peak_allocated peak_reserved used context".split()
        keep += "parameters gradients optimizer_states activations temporaries".split()
        rows.append(
            {"set": name, "run": run, "variant": variant}
            | {key: facts[key] for key in keep}
            | {library: versions()[library] for library in ("torch", "transformers")}
            | {"date": datetime.date.today().isoformat()}
        )
    table = pd.concat([old_rows[~old_rows["set"].isin(names)], pd.DataFrame(rows)])
    unfinished = path.with_suffix(".unfinished")
    table.to_csv(unfinished, index=False)
    os.replace(unfinished, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sets", nargs="*", metavar="SET", help=", ".join(SETS))
    names = parser.parse_args().sets or list(SETS)
    for name in names:
        if name not in SETS:
            print(f"error: {suggest(name, SETS, 'set of predictions')}", file=sys.stderr)
            return 2
    record(names, ROOT / "data" / "predictions.csv")
    return 0


if __name__ == "__main__":
    sys.exit(main())
