"""The rows that `make gpu` records and `make check-rows` reads over."""

import csv
import datetime
from pathlib import Path

COLUMNS = (
    "section run card driver cuda torch transformers date outcome workload settings seconds "
    "samples_per_second tokens_per_second peak_allocated peak_reserved used context "
    "predicted_allocated predicted_reserved predicted_samples_per_second "
    "error_allocated error_reserved error_samples_per_second last_loss"
).split()


class Record:
    """A file of rows that is only ever appended to."""

    def __init__(self, path: Path, facts: dict[str, str]):
        self.path, self.facts = path, facts
        path.parent.mkdir(parents=True, exist_ok=True)
        self.done = set()
        if path.exists():
            with path.open(encoding="utf-8", newline="") as file:
                rows = list(csv.DictReader(file))
            if rows and list(rows[0]) != COLUMNS:
                raise SystemExit(
                    f"{path} has other columns than this kit writes: move it away first"
                )
            self.done = {self.key(row) for row in rows if not row["outcome"].startswith("skipped")}
        self.under_way = path.with_suffix(".running")
        if self.under_way.exists():
            section, run = self.under_way.read_text(encoding="utf-8").splitlines()
            why = "the process died, most often because the machine's memory was full"
            self.add(section, run, outcome=f"failed: {why}")
            self.done.add(self.key(facts | {"section": section, "run": run}))
            print(f"{section}: {run}: {why}; --again tries it once more", flush=True)

    def start(self, section: str, run: str) -> None:
        """Remember the row under way, should nothing come after it."""
        self.under_way.write_text(f"{section}\n{run}\n", encoding="utf-8")

    def key(self, row: dict) -> tuple:
        return tuple(row[name] for name in ("section", "run", "torch", "transformers"))

    def add(self, section: str, run: str, **values) -> None:
        row = dict.fromkeys(COLUMNS, "") | self.facts | {"section": section, "run": run} | values
        row["date"] = datetime.datetime.now().isoformat(timespec="seconds")
        with self.path.open("a", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow({name: "" if v is None else v for name, v in row.items()})
        self.under_way.unlink(missing_ok=True)


def compared(path: Path) -> str:
    """How well the predictions met the rows of a table, by section and what was predicted."""
    import pandas as pd

    from planner import report

    rows = pd.read_csv(path)
    errors = ["error_allocated", "error_reserved", "error_samples_per_second"]
    long = rows.melt(["section"], errors, "of", "error")
    long["error"] = pd.to_numeric(long["error"])
    long, text = long.dropna(), "No prediction was held against a measurement."
    if not long.empty:
        table = report.errors(long, ["section", "of"]).reset_index()
        text = f"Errors of the predictions, in %\n{table.to_string(index=False)}"
    rest = rows[(rows["error_allocated"].abs() > 0.03) | (rows["outcome"] != "measured")]
    if rest.empty:
        return text
    rest = rest[["run", "outcome", "error_allocated"]].to_string(index=False)
    return f"{text}\n\nOff by more than 3 %, or not measured\n{rest}"
