"""A run as data, and tables of runs and predictions."""

import datetime
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from fake_cuda import CATEGORIES

from .hardware import data_file, gib, own_file, suggest, versions

SIZES = {"allocated": "peak_allocated", "reserved": "peak_reserved", "used": "used"}
COMPARED = SIZES | {"samples/s": "samples_per_second"}
COLUMNS = (  # what a recorded row takes from a run or a prediction as it is
    "name kind device workload settings peak_allocated peak_reserved used context seconds "
    "samples_per_second tokens_per_second step_seconds limited_by"
).split()


@dataclass
class Run:
    """One measured run. Memory in bytes, None where the device keeps no such number.

    `seconds`, `samples` and `tokens` are those of the timed steps, without the warm-up.
    """

    name: str
    workload: str
    device: str
    settings: dict[str, Any]
    seconds: float
    steps: int
    samples: int
    tokens: int
    peak_allocated: int | None
    peak_reserved: int | None = None
    used: int | None = None
    losses: list[float] = field(default_factory=list)
    changes: tuple[str, ...] = ()  # names of the functions that changed the model
    after: Any = None  # what the `after` function of `train` returned
    note: str = ""

    kind = "measured"

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def __str__(self) -> str:
        """The summary of the classic guides: time, samples per second, GPU memory."""
        sizes = {name: getattr(self, key) for name, key in SIZES.items()}
        known = ", ".join(f"{gib(n)} {name}" for name, n in sizes.items() if n is not None)
        lines = [
            f"Time: {self.seconds:.2f} s ({self.steps} steps)",
            f"Samples/second: {self.samples_per_second:.2f}",
            f"{'CPU' if self.device == 'cpu' else 'GPU'} memory: {known or 'not reported here'}",
        ]
        return "\n".join(lines + ([self.note] if self.note else []))

    __repr__ = __str__  # the last line of a cell shows this


def settings_text(settings: dict[str, Any]) -> str:
    """Settings as they are recorded: `a=1; b=True`, functions by their name."""

    def text(value) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k}: {text(v)}" for k, v in value.items()) + "}"
        return str(getattr(value, "__name__", value))

    return "; ".join(f"{key}={text(value)}" for key, value in settings.items())


def row(item) -> dict[str, Any]:
    """A `Run` or a `Prediction` as one flat record, in bytes and seconds."""
    cells = {column: getattr(item, column, None) for column in COLUMNS}
    cells["settings"] = settings_text(item.settings)
    losses = getattr(item, "losses", None) or [None]
    cells |= {"first_loss": losses[0], "last_loss": losses[-1]}
    categories = getattr(item, "by_category", {})
    cells |= {c.replace(" ", "_"): categories.get(c) for c in CATEGORIES}
    cells |= {library: versions().get(library) for library in ("torch", "transformers")}
    return cells | {"date": datetime.datetime.now().isoformat(timespec="seconds")}


def compare(*items) -> pd.DataFrame:
    """A table of runs and predictions, one row each; times in seconds.

    `fits` says whether a predicted run fits its card, CUDA context included. A run that follows
    the prediction of the same settings on the same device is followed by a third row: the error of
    the prediction, in percent of what was measured. A table of predictions alone shows the bytes
    by category at the peak instead of times and losses.
    """
    only_predictions = all(item.kind == "predicted" for item in items)
    rows, waiting = [], []
    for item in items:
        cells = {"name": item.name, "kind": item.kind, "device": item.device}
        sizes = {name: getattr(item, key) for name, key in SIZES.items()}
        cells |= {name: None if n is None else gib(n) for name, n in sizes.items()}
        cells["fits"] = {True: "yes", False: "no"}.get(getattr(item, "fits", None))
        if item.kind == "predicted" and item.step_seconds:
            rate = item.samples_per_second
            cells |= {"step (s)": f"{item.step_seconds:.3g}", "samples/s": rate and f"{rate:.3g}"}
        if only_predictions:
            cells |= {category: gib(n) for category, n in item.by_category.items()}
        rows.append(cells)
        if item.kind == "predicted":
            waiting.append(item)
            continue
        cells |= {"time (s)": f"{item.seconds:.2f}", "samples/s": f"{item.samples_per_second:.2f}"}
        if item.losses:
            cells["loss"] = f"{item.losses[0]:.3f} → {item.losses[-1]:.3f}"
        match = next((p for p in waiting if _subject(p) == _subject(item)), None)
        if match is not None:
            waiting.remove(match)
            rows.append({"name": "error", "kind": "error", "device": item.device})
            for name, key in COMPARED.items():
                predicted, measured = getattr(match, key), getattr(item, key)
                if predicted and measured and (name != "used" or match.context):
                    rows[-1][name] = f"{100 * (predicted / measured - 1):+.2f} %"
    table = pd.DataFrame(rows).set_index("name").rename_axis(None)
    return table.dropna(axis="columns", how="all").fillna("")


def _subject(item) -> tuple:
    """What a prediction shares with the run it is for: all but how long that lasts."""
    lasting = ("max_steps", "num_train_epochs")
    settings = {k: v for k, v in item.settings.items() if k not in lasting}
    return item.workload, item.changes, item.device, settings


def record(lesson: str, *items) -> Path | None:
    """Append runs and predictions to `build/runs/<lesson>.csv`, the learner's own.

    Args:
        lesson: the lesson's name, which is the file's.
        *items: what `train` and `predict` returned; one row each.

    Returns:
        The file's path. None where it cannot be written: a sentence says so, the lesson goes on.

    Raises:
        ValueError: there is nothing to record.
    """
    if not items:
        raise ValueError("nothing to record: give the runs and predictions after the lesson")
    path = own_file("runs", f"{lesson}.csv")
    try:
        return _append(path, pd.DataFrame([{"lesson": lesson, **row(item)} for item in items]))
    except OSError:  # no right to write, no room, a file in its place
        print("Not recorded: build/runs of the course cannot be written.")
        return None


def _append(path: Path, new: pd.DataFrame) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists() or not path.stat().st_size
    if not fresh and list(pd.read_csv(path, nrows=0).columns) != list(new.columns):
        now = datetime.datetime.now()  # the columns of an older course: keep them beside
        path.rename(path.with_suffix(f".{now:%Y-%m-%d-%H%M%S%f}.csv"))
        fresh = True
    new.to_csv(path, mode="a", header=fresh, index=False)
    return path


def load(name: str) -> pd.DataFrame:
    """Recorded rows: `data/<name>.csv` or else `data/measurements/<name>.csv`, packed or not.

    "measured" gathers our own rows of all cards; it is empty until one was measured.
    FileNotFoundError names the tables there are.
    """
    folder = data_file()
    found = [p for part in ("measurements", ".") for p in folder.glob(f"{part}/*.csv*")]
    tables = {p.name.split(".")[0]: p for p in found}
    if name == "measured":
        ours = [pd.read_csv(p) for p in sorted(folder.glob("measurements/*.csv"))]
        ours = [table for table in ours if "outcome" in table]  # the kit's, not published ones
        return pd.concat(ours, ignore_index=True) if ours else pd.DataFrame(columns=["card"])
    if name not in tables:
        raise FileNotFoundError(suggest(name, sorted(tables), "table of recorded rows"))
    return pd.read_csv(tables[name])
