"""Write `data/real_cards.csv`: what others measured on real cards, beside what is predicted.

    python tools/record_real_cards.py                every set of data/measurements/peaks.csv
    python tools/record_real_cards.py fms liger      some sets; the predictions of the others stay

A run is predicted once for all quantities that were measured of it. The file is replaced when all
is done, so an interrupted run loses nothing. Never edit it by hand.
"""

import argparse
import datetime
import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from helpers.hardware import gpu, suggest, versions  # noqa: E402  (after the path is set)
from record_predictions import replace_file  # noqa: E402

MEASURED = ROOT / "data" / "measurements" / "peaks.csv"
PREDICTED = ROOT / "data" / "real_cards.csv"
COLUMNS = (
    "set run card quantity measured torch transformers peft model settings "
    "role reason remark source"
).split()
OURS = ["predicted", "predicted_with", "date"]
ROLES = ("judged", "calibrates", "excluded")
PEAKS = {"allocated": "peak_allocated", "reserved": "peak_reserved"}


def sets() -> dict[str, Callable]:
    """Every set of runs: a function in a module of `tools/real_cards`.

    It yields (run, function that predicts).
    """
    files = sorted((ROOT / "tools" / "real_cards").glob("[!_]*.py"))
    modules = [importlib.import_module(f"real_cards.{file.stem}") for file in files]
    return {name: function for module in modules for name, function in module.SETS.items()}


def checked(rows: pd.DataFrame, name: str) -> pd.DataFrame:
    """The rows as they are; ValueError, in one sentence, if the table cannot be right."""
    for column in COLUMNS:
        if column not in rows:
            raise ValueError(f"{name} lacks the column {column}: data/README.md describes the file")
    for card in rows["card"].dropna().unique():
        gpu(card)
    for at in rows.index[~rows["role"].isin(ROLES)]:
        raise ValueError(f"{name}, row {at + 2}: the role is none of {', '.join(ROLES)}")
    for at in rows.index[rows[["set", "run", "quantity"]].duplicated()]:
        raise ValueError(f"{name}, row {at + 2}: set, run and quantity stand there twice")
    bare = rows["reason"].isna() & (rows["role"] != "judged")
    for at in rows.index[bare]:
        raise ValueError(f"{name}, row {at + 2}: a row that does not judge needs a reason")
    measured = pd.to_numeric(rows["measured"], errors="coerce")
    for at in rows.index[~(measured > 0)]:
        raise ValueError(f"{name}, row {at + 2}: measured is not a positive number of bytes")
    return rows


def amounts(found) -> dict[str, float]:
    """Bytes by quantity: of a simulation or prediction its peaks, else what the run returned."""
    if isinstance(found, dict):
        return found
    return {name: getattr(found, field) for name, field in PEAKS.items()}


def record(names: list[str], measured: Path = MEASURED, path: Path = PREDICTED) -> None:
    """Predict the named sets and write them to `path` beside what was measured.

    ValueError if a run that is to be judged has no prediction, or none of that quantity.
    """
    rows = checked(pd.read_csv(measured), measured.name)
    known, found = sets(), {}
    wanted = rows[rows["set"].isin(names) & (rows["role"] != "excluded")]
    asked = set(zip(wanted["set"], wanted["run"], strict=True))
    jobs = [(name, run, predict) for name in names for run, predict in known[name]()]
    jobs = [job for job in jobs if job[:2] in asked]
    for name, run, predict in tqdm(jobs, unit="run"):
        for quantity, n in amounts(predict()).items():
            found[name, run, quantity] = int(n)
    key = ["set", "run", "quantity"]
    missing = [k for k in wanted[key].itertuples(index=False, name=None) if k not in found]
    if missing:
        raise ValueError(f"tools/real_cards has no prediction of {' / '.join(missing[0])}")
    made = f"torch {versions()['torch']}, transformers {versions()['transformers']}"
    today = datetime.date.today().isoformat()
    new = pd.DataFrame([[*k, n, made, today] for k, n in found.items()], columns=key + OURS)
    old = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=key + OURS)
    new = pd.concat([old[~old["set"].isin(names)][key + OURS], new])
    table = rows.merge(new, on=key, how="left").astype({"predicted": "Int64"})
    table.loc[table["role"] == "excluded", OURS] = pd.NA
    table.insert(COLUMNS.index("measured") + 1, "predicted", table.pop("predicted"))
    replace_file(path, table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sets", nargs="*", metavar="SET", help=", ".join(sets()))
    names = list(dict.fromkeys(parser.parse_args().sets)) or list(sets())
    try:
        for name in names:
            if name not in sets():
                raise ValueError(suggest(name, sorted(sets()), "set of runs on real cards"))
        record(names)
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
