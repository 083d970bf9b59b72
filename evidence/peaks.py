"""`data/real_cards.csv`: bytes that others measured on real cards, beside what is predicted.

`data/measurements/peaks.csv` has what was measured. A run is predicted once for all quantities.
Rows of one card among several stand apart, in tables of their own: `several_cards.csv` each.
"""

from pathlib import Path

import pandas as pd

from evidence import runs, schemas
from evidence.runs import Job
from evidence.tables import DATA, MADE, libraries, old_rows, replace_file, today, unchanged
from evidence.tables import MEASURED as FOLDER
from evidence.traces import Predicted

MEASURED, PREDICTED = FOLDER / "peaks.csv", DATA / "real_cards.csv"
OF_SEVERAL = FOLDER / "several_cards.csv", DATA / "several_cards.csv"
TABLES = ((MEASURED, PREDICTED), OF_SEVERAL)
COLUMNS = (
    "set run card quantity measured torch transformers peft model settings role reason remark "
    "source"
).split()
KEY = ["set", "run", "quantity"]
OURS = ["predicted", *MADE]


def wanted(names: list[str], measured: Path = MEASURED) -> pd.DataFrame:
    """The measured rows of the named sets that get a prediction."""
    rows = schemas.read("measurements/peaks", measured)
    return rows[rows["set"].isin(names) & (rows["role"] != "excluded")]


def to_make(names: list[str], again: bool = False) -> set[tuple[str, str]]:
    """The runs (set, run) whose rows other code made, or whose measured row changed."""
    names = [name for name in names if name in runs.of_peaks()]
    found = set()
    for measured, path in TABLES:
        rows = wanted(names, measured)
        code = rows["set"].map({name: runs.hash_of(runs.of_peaks()[name]) for name in names})
        stands = unchanged(rows, old_rows(path, COLUMNS + OURS), COLUMNS, KEY, code)
        left = rows if again else rows[~stands]
        found |= set(left[["set", "run"]].itertuples(index=False, name=None))
    return found


def write_each(results: dict[Job, Predicted]) -> None:
    """Put predictions into the tables that measure their sets; the other stays untouched."""
    made = {job.set for job in results}
    for measured, path in TABLES:
        if made & set(pd.read_csv(measured)["set"]):
            write(results, measured, path)


def write(results: dict[Job, Predicted], measured: Path = MEASURED, path: Path = PREDICTED) -> None:
    """Put predictions beside what was measured; rows of other runs keep theirs.

    Raises:
        ValueError: a run that is to be judged has no prediction of a quantity, or a measured row
            is wrong.
    """
    rows = schemas.read("measurements/peaks", measured)
    told = {(*job.key[:2], quantity): (n, job.code) for job, found in results.items()
            for quantity, n in found.amounts.items()}  # fmt: skip
    made = {job.key[:2] for job in results}
    for row in rows[rows["role"] != "excluded"].itertuples():
        key = row.set, row.run, row.quantity
        if key[:2] in made and key not in told:
            raise ValueError(f"evidence/sources has no prediction of {' / '.join(key)}")
    new = [[*key, n, libraries(), today(), code] for key, (n, code) in told.items()]
    old = old_rows(path, KEY + OURS)
    old = old[[pair not in made for pair in zip(old["set"], old["run"], strict=True)]]
    both = pd.concat([old, pd.DataFrame(new, columns=KEY + OURS)])
    table = rows.merge(both, on=KEY, how="left").astype({"predicted": "Int64"})
    table.loc[table["role"] == "excluded", OURS] = pd.NA
    table.insert(COLUMNS.index("measured") + 1, "predicted", table.pop("predicted"))
    replace_file(path, table)
