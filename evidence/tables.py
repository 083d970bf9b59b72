"""The tables under `data/`: where they lie, and how one is replaced."""

import datetime
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from helpers.hardware import versions

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "data"
MEASURED = DATA / "measurements"
# A row keeps what made it: the hash of our code (evidence/code.py), libraries, the day.
MADE = ["predicted_with", "date", "code_hash"]


def replace_file(path: Path, table: pd.DataFrame) -> None:
    """Write a table at once or not at all."""
    unfinished = path.with_suffix(".unfinished")
    table.to_csv(unfinished, index=False)
    os.replace(unfinished, path)


def old_rows(path: Path, columns: list[str]) -> pd.DataFrame:
    """The rows of a table that was made before, with these columns, empty where it lacks one."""
    table = pd.read_csv(path) if path.exists() else pd.DataFrame()
    return table.reindex(columns=columns)


def append_missing(
    path: Path, key: Iterable[str], jobs: Iterable[tuple], measure: Callable[..., dict]
) -> None:
    """Measure what a table lacks: each row is written when it is there, so that work can go on.

    Args:
        key: the columns that name a job, in the order of a job's parts.
        measure: called with the parts of a job; the row, those of the key among its columns.
    """
    there = pd.read_csv(path)[list(key)] if path.exists() else pd.DataFrame()
    done = set(there.itertuples(index=False, name=None))
    for job in tqdm([job for job in jobs if tuple(job) not in done], unit="run"):
        row = pd.DataFrame([measure(*job)])
        row.to_csv(path, mode="a", header=not path.exists(), index=False)


def libraries() -> str:
    """The versions that predict today, as `predicted_with` keeps them."""
    return f"torch {versions()['torch']}, transformers {versions()['transformers']}"


def today() -> str:
    return datetime.date.today().isoformat()


def unchanged(
    measured: pd.DataFrame, recorded: pd.DataFrame, columns: list[str], key: list[str], code
) -> pd.Series:
    """Whether each measured row stands in a record as it is, predicted by today's code.

    Args:
        columns: of the measured table; its words (reason, remark, source) may differ.
        code: today's hash for each measured row.
    """
    facts = [name for name in columns if name not in ("reason", "remark", "source")]
    before = recorded.dropna(subset="predicted").set_index(key, drop=False)
    before = before[~before.index.duplicated()].reindex(pd.MultiIndex.from_frame(measured[key]))
    here, there = (table[facts].map(_plain).to_numpy() for table in (measured, before))
    return (here == there).all(axis=1) & (before["code_hash"].to_numpy() == code.to_numpy())


def _plain(cell) -> str:
    """A cell as text, the same for 1 and 1.0, and for all that is empty."""
    if pd.isna(cell):
        return ""
    return f"{cell:.12g}" if isinstance(cell, int | float) else str(cell)
