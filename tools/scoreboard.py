"""Write `data/board.csv`: the scoreboard that lesson 16 shows and judges.

    python tools/scoreboard.py

`data/scoreboard.csv` says what the guides claim and names the recorded runs to compare. Here they
become shares: the run with the method divided by the run without it. Start it again when
predictions or measurements have changed; `make outputs` does.
"""

import sys
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = ["question", "method", "claimed", "predicted", "recorded", "judged", "not_here"]
NOTHING = "not measured yet"


def read(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, keep_default_na=True)


def named(table: pd.DataFrame, keys: list[str]) -> dict[str, dict]:
    """The rows of a table by the name that `scoreboard.csv` gives them: `a / b / c`."""
    return {" / ".join(row[key] for key in keys): row for row in table.to_dict("records")}


def pairs(row: dict, kind: str) -> list[tuple[str, str]]:
    """The names of the runs with and without the method; several pairs stand apart by `;`."""
    one, two = row[f"{kind}_with"], row[f"{kind}_without"]
    return [] if pd.isna(one) else list(zip(one.split(" ; "), two.split(" ; "), strict=True))


def speed(run: dict) -> float:
    for column in ("samples_per_second", "tokens_per_second"):
        if not pd.isna(run[column]):
            return run[column]
    return 1 / run["seconds"]


def predicted(row: dict, runs: dict[str, dict]) -> str:
    shares = []
    for one, two in pairs(row, "predicted"):
        shares.append(f"{runs[one][row['counted']] / runs[two][row['counted']]:.2f}")
    return ", ".join(shares) or row["predicted"]


def recorded(row: dict, kind: str, runs: dict[str, dict], memory: str) -> str | None:
    """The share of the recorded pair with its card; None without such a pair."""
    for one, two in pairs(row, kind):
        if one in runs and two in runs:
            if row["question"] == "speed":
                share = speed(runs[one]) / speed(runs[two])
            else:
                share = runs[one][memory] / runs[two][memory]
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
    published = named(read(data / "measurements" / "published.csv"), ["set", "run"])
    rows = []
    for row in read(data / "scoreboard.csv").to_dict("records"):
        found = [recorded(row, "own", runs, "peak_allocated") for runs in own_runs(data)]
        found.append(recorded(row, "published", published, "memory"))
        row["recorded"] = next((text for text in found if text), NOTHING)
        rows.append(row | {"predicted": predicted(row, predictions)})
    return pd.DataFrame(rows)[COLUMNS]


def main() -> int:
    path = ROOT / "data" / "board.csv"
    board(path.parent).to_csv(path, index=False, lineterminator="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
