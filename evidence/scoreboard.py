"""Write `data/board.csv`: the scoreboard that lesson 16 shows and judges.

    python -m evidence scoreboard

`data/scoreboard.csv` says what the guides claim and names the recorded runs to compare. Here they
become shares: the run with the method divided by the run without it.
"""

from math import nan
from pathlib import Path

import pandas as pd

from evidence.tables import DATA

COLUMNS = ["question", "method", "claimed", "predicted", "recorded", "judged", "not_here"]
NOTHING = "not measured yet"


def read(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, keep_default_na=True)


def named(table: pd.DataFrame, keys: list[str]) -> dict[str, dict]:
    """The rows of a table by the name that `scoreboard.csv` gives them: `a / b / c`."""
    return {" / ".join(str(row[key]) for key in keys): row for row in table.to_dict("records")}


def pairs(row: dict, kind: str) -> list[tuple[str, str]]:
    """The names of the runs with and without the method; several pairs stand apart by `;`."""
    one, two = row[f"{kind}_with"], row[f"{kind}_without"]
    return [] if pd.isna(one) else list(zip(one.split(" ; "), two.split(" ; "), strict=True))


def speed(run: dict) -> float:
    for column in ("samples_per_second", "tokens_per_second"):
        if not pd.isna(run.get(column)):
            return run[column]
    return 1 / run["seconds"]


def predicted(row: dict, runs: dict[str, dict]) -> str:
    """The shares of the predicted pairs, those of speed with model and card; words before them."""
    shares: dict[str, list[str]] = {}  # by model and card
    for one, two in pairs(row, "predicted"):
        share = runs[one][row["counted"]] / runs[two][row["counted"]]
        if row["question"] == "speed":  # two digits are all that is known of it
            place = f" ({runs[one]['workload'].split(',')[0]} on {runs[one]['device']})"
            shares.setdefault(place, []).append(f"{share:#.2g}")
        else:
            shares.setdefault("", []).append(f"{share:.2f}")
    text = "; ".join(", ".join(found) + place for place, found in shares.items())
    return " ".join([row["predicted"]] * (not pd.isna(row["predicted"])) + [text] * bool(text))


def recorded(row: dict, kind: str, runs: dict[str, dict], memory: str) -> str | None:
    """The share of the recorded pair with its card; None without such a pair."""
    for one, two in pairs(row, kind):
        if one in runs and two in runs:
            if row["question"] == "speed":
                share = speed(runs[one]) / speed(runs[two])
            else:
                share = runs[one].get(memory, nan) / runs[two].get(memory, nan)
            if not pd.isna(share):
                card = runs[one]["gpu"]
                card = "card not named" if pd.isna(card) else card
                published = ", published" if kind == "published" else ""
                return f"{share:.2f} ({card}{published})"
    return None


def own_runs(data: Path) -> list[dict[str, dict]]:
    """What we measured ourselves: for each card the last row of each run."""
    cards = []
    for path in sorted((data / "measurements").glob("*.csv")):
        rows = read(path)
        if "outcome" in rows:  # others' rows have none
            rows = rows[rows["outcome"] == "measured"].assign(gpu=rows["card"])
            cards.append(named(rows, ["section", "run"]))
    return cards


def board(data: Path) -> pd.DataFrame:
    predictions = named(read(data / "predictions.csv"), ["set", "run", "variant"])
    others = [read(data / "measurements" / f"{name}.csv") for name in ("speeds", "published")]
    others[0]["gpu"] = others[0]["card"]
    published = {key: run for table in others for key, run in named(table, ["set", "run"]).items()}
    rows = []
    for row in read(data / "scoreboard.csv").to_dict("records"):
        found = [recorded(row, "own", runs, "peak_allocated") for runs in own_runs(data)]
        found.append(recorded(row, "published", published, "memory"))
        row["recorded"] = "; ".join(filter(None, reversed(found))) or NOTHING  # published first
        rows.append(row | {"predicted": predicted(row, predictions)})
    return pd.DataFrame(rows)[COLUMNS]


def write() -> None:
    board(DATA).to_csv(DATA / "board.csv", index=False, lineterminator="\n")
