"""The versions of libraries that published rows name, and their runs as these versions ran them."""

from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path

import pandas as pd

from evidence.libraries import behaving, of

MEASURED = Path(__file__).resolve().parents[2] / "data" / "measurements"
TABLES = ("peaks.csv", "speeds.csv")
LIBRARIES = ("torch", "transformers")


@cache
def named() -> dict[tuple[str, str], dict[str, str]]:
    """Of each (set, run) the versions that its rows name, of bytes or of seconds.

    Raises:
        ValueError: two rows of one run name two versions of a library.
    """
    found: dict[tuple[str, str], dict[str, str]] = {}
    for table in TABLES:
        for row in pd.read_csv(MEASURED / table, dtype=str).to_dict("records"):
            known = found.setdefault((row["set"], row["run"]), {})
            told = {name: row[name] for name in LIBRARIES if isinstance(row.get(name), str)}
            for name, version in told.items():
                if row["role"] != "excluded" and known.setdefault(name, version) != version:
                    raise ValueError(
                        f"{table}: {row['set']} / {row['run']} names two versions of {name}, "
                        f"{known[name]} and {version}"
                    )
    return found


def as_it_ran(name: str, run: str, predict: Callable) -> Callable:
    """`predict` with what the versions of that run did otherwise than today's."""
    behaviours = of(**named().get((name, run), {}))

    @wraps(predict)
    def predicted():
        with behaving(behaviours):
            return predict()

    return predicted
