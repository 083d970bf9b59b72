"""The second blind test of times: its first predictions, kept once and for good.

    python -m evidence.second_blind

Those are the rows of data/speeds.csv whose `reason` begins with *second blind test*; the command
takes what is predicted of them there. It writes the file only where there is none, and all of it.

Writes: data/blind_speeds_2.csv
"""

import sys

import pandas as pd

from evidence.compare import errors
from evidence.tables import DATA, replace_file

SPEEDS, FIRST = DATA / "speeds.csv", DATA / "blind_speeds_2.csv"
REASON = "second blind test"
KEY = ["set", "run"]
COLUMNS = [*KEY, *"predicted low high limited_by told roofline predicted_with date".split()]


def tested(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the test in a table of times."""
    return table[table["reason"].fillna("").str.startswith(REASON)]


def first_predictions(table: pd.DataFrame) -> pd.DataFrame:
    """What is predicted of the rows of the test.

    Raises:
        ValueError: a row has no prediction yet.
    """
    rows = tested(table)
    missing = sorted(set(rows["set"][rows["predicted"].isna()]))
    if missing or rows.empty:
        sets = " ".join(missing)
        raise ValueError(f"some rows have no prediction yet: python -m evidence {sets}")
    return rows[COLUMNS]


def write() -> None:
    """Keep the first predictions.

    Raises:
        ValueError: they are kept already, or a row has none yet.
    """
    if FIRST.exists():
        raise ValueError(f"{FIRST.name} is there, and first predictions are made once")
    replace_file(FIRST, first_predictions(pd.read_csv(SPEEDS)))


def rows() -> pd.DataFrame | None:
    """The test's rows as they were first predicted, with their error; None before that."""
    if not FIRST.exists():
        return None
    measured = pd.read_csv(SPEEDS)[[*KEY, "card", "seconds"]]
    first = pd.read_csv(FIRST).merge(measured, on=KEY)
    return first.assign(error=first["predicted"] / first["seconds"] - 1)


def words(found: pd.DataFrame, percent) -> str:
    """What the test says beyond the sizes of its errors; `percent` writes a share."""
    inside = found["seconds"].between(found["low"], found["high"]).mean()
    said, lean = errors(found), found["error"].median()
    by_card = found["error"].abs().groupby(found["card"]).agg(["size", "median"])
    often = by_card[by_card["size"] >= 8].sort_values("median")
    text = f"The second blind test of times, {len(found)} passes and steps on "
    text += f"{len(by_card)} kinds of card ([as first predicted](data/blind_speeds_2.csv)), leans "
    text += f"{percent(abs(lean))} to the {'fast' if lean < 0 else 'slow'} side in the median; "
    text += f"{100 * inside:.0f} % lay in their range, and of {said['pairs']} pairs on one machine "
    text += f"that differ by 5 % or more {100 * said['in order']:.0f} % were put in order, with "
    text += f"ratios {percent(said['ratios'])} off in the median. Of the cards with eight rows or "
    text += "more, medians are "
    return text + ", ".join(f"{percent(row['median'])} ({name})" for name, row in often.iterrows())


if __name__ == "__main__":
    try:
        write()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
