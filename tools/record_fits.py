"""Write `data/fits.csv`: answers of the planner that take too long to search for in a lesson.

    python tools/record_fits.py [--code]

One row a recipe; where nothing fits, one row with the nearest miss. Never edit it by hand. With
`--code` nothing is searched: the rows stay, and each gets the code that is pasted today.
"""

import datetime
import json
import sys
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from helpers import language_modelling  # noqa: E402  (after the path is set)
from helpers.fit import Search, card, fit  # noqa: E402
from helpers.hardware import data_file, versions  # noqa: E402
from record_predictions import replace_file  # noqa: E402

QUESTIONS = (  # model, card, tokens of a sample, samples of a step
    ("llama-3.2-1b", "T4", 1024, 8),
    ("llama-3.1-8b", "12GiB", 1024, 8),
    ("llama-3.1-8b", "6GiB", 1024, 8),
)


def answers(model: str, gpu: str, length: int, batch: int) -> list[dict]:
    """What `fit` says, in bytes and tokens."""
    found = fit(model, gpu, length=length, batch=batch, say=print)
    rows = []
    for r in found.recipes or [found.miss]:
        row = {"model": model, "gpu": gpu, "length": length, "batch": batch}
        row |= {"fits": bool(found.recipes), "recipe": r.name, "kind": r.kind}
        row |= {"micro_batch": r.micro_batch, "accumulation": r.accumulation, "need": r.need}
        row |= {"memory": found.search.card.memory, "peak_allocated": r.facts.peak_allocated}
        row |= r.facts.by_category | {"tokens_per_second": r.tokens_per_second}
        row |= {"tokens_low": r.tokens_low, "tokens_high": r.tokens_high}
        row |= {"limited_by": r.facts.limited_by, "largest_micro_batch": r.largest_micro_batch}
        row |= {"smallest_card": r.smallest_card}
        row |= {"price": r.price, "remedy": "" if found.recipes else found.remedy, "code": r.code}
        row |= {library: versions()[library] for library in ("torch", "transformers")}
        rows.append(row | {"date": datetime.date.today().isoformat()})
    return rows


def code(row: pd.Series) -> str:
    """What is pasted today for the recipe of a row."""
    config = json.loads(data_file("configs", f"{row['model']}.json").read_text("utf-8"))
    workload = language_modelling(row["model"], length=row["length"])
    asked = Search(workload, card(row["gpu"]), row["batch"], 0.0, config["_name_or_path"])
    return asked.code(row["recipe"], row["micro_batch"])


def main() -> None:
    if sys.argv[1:] == ["--code"]:
        table = pd.read_csv(ROOT / "data" / "fits.csv")
        table["code"] = table.apply(code, axis=1)
        replace_file(ROOT / "data" / "fits.csv", table)
        return
    rows = [row for question in QUESTIONS for row in answers(*question)]
    replace_file(ROOT / "data" / "fits.csv", pd.DataFrame(rows))


if __name__ == "__main__":
    main()
