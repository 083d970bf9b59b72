"""Write `data/predictions.csv`: predictions that take too long to run in a lesson.

    python tools/record_predictions.py              every set
    python tools/record_predictions.py ledger       some sets; the rows of the others stay

The file is replaced when all is done, so an interrupted run loses nothing. Never edit it by hand.
"""

import argparse
import datetime
import importlib
import os
import sys
from pathlib import Path

import pandas as pd
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from fake_cuda import cost  # noqa: E402  (after the path is set)
from helpers.hardware import suggest, versions  # noqa: E402
from helpers.runs import row  # noqa: E402

SPEED = "samples_per_second step_seconds step_low step_high limited_by".split()
SPEED += "host matrix_products attention memory_traffic copies utilisation".split()
SPEED += "update fused_seconds".split()


def speed(prediction) -> dict:
    """What is predicted of a step's time, of a `Prediction`; empty where nothing is claimed."""
    time = prediction.time
    if not time or not time.step_seconds:
        return dict.fromkeys(SPEED)
    facts = [prediction.samples_per_second, time.step_seconds, time.low, time.high]
    facts = [n and float(f"{n:.5g}") for n in facts] + [time.limited_by]
    facts += [round(time.shares[kind], 4) for kind in cost.KINDS]
    facts += [round(time.model_flops_utilisation, 4)]
    facts += [round(time.phases.get("optimizer step", 0.0), 4), float(f"{time.fused_seconds:.5g}")]
    return dict(zip(SPEED, facts, strict=True))


def sets() -> dict:
    """Every set of predictions: a function in one of the modules of `tools/recorded`.

    It yields (run, variant, function that predicts); its name is the set's.
    """
    files = sorted((ROOT / "tools" / "recorded").glob("lesson_*.py"))
    modules = [importlib.import_module(f"recorded.{file.stem}") for file in files]
    return {function.__name__: function for module in modules for function in module.SETS}


def record(names: list[str], path: Path) -> None:
    """Predict the named sets and write them to `path` with the rows of the other sets."""
    known = sets()
    jobs = [(name, *job) for name in names for job in known[name]()]
    rows = []
    for name, run, variant, predicted in tqdm(jobs, unit="prediction"):
        prediction = predicted()
        facts = row(prediction) | speed(prediction)
        keep = "device workload settings peak_allocated peak_reserved used context".split()
        keep += "parameters gradients optimizer_states activations temporaries".split()
        keep += SPEED
        rows.append(
            {"set": name, "run": run, "variant": variant}
            | {key: facts[key] for key in keep}
            | {library: versions()[library] for library in ("torch", "transformers")}
            | {"date": datetime.date.today().isoformat()}
        )
    old_rows = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=["set"])
    table = pd.concat([old_rows[~old_rows["set"].isin(names)], pd.DataFrame(rows)])
    replace_file(path, table)


def replace_file(path: Path, table: pd.DataFrame) -> None:
    """Write a table at once or not at all."""
    unfinished = path.with_suffix(".unfinished")
    table.to_csv(unfinished, index=False)
    os.replace(unfinished, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sets", nargs="*", metavar="SET", help=", ".join(sets()))
    names = list(dict.fromkeys(parser.parse_args().sets)) or list(sets())  # each once
    for name in names:
        if name not in sets():
            print(f"error: {suggest(name, sets(), 'set of predictions')}", file=sys.stderr)
            return 2
    record(names, ROOT / "data" / "predictions.csv")
    return 0


if __name__ == "__main__":
    sys.exit(main())
