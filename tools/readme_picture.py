"""Draw the README's picture from recorded rows: predicted against published memory.

    python tools/readme_picture.py

The nine runs of the guides' table, with that year's behaviours of the libraries. `make outputs`
draws it; the file says from which numbers, and a test compares them with today's rows.
"""

import json
import sys
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from matplotlib import pyplot as plt  # noqa: E402

from helpers import load  # noqa: E402  (after the path is set; it also sets the course's style)

PICTURE = ROOT / "data" / "predicted_and_published.png"


def numbers() -> pd.DataFrame:
    """GiB that the driver counts, predicted and published, by run, the largest first."""
    published = load("published").query("set == 'guide-2022'").set_index("run")["memory"] / 1024
    rows = load("predictions").query("set == 'classic' and variant == '2022'").set_index("run")
    table = pd.DataFrame({"predicted": rows["used"] / 2**30, "published": published})
    return table.sort_values("published").round(2)


def draw(table: pd.DataFrame, path: Path) -> None:
    ax = plt.subplots(figsize=(7, 3.4))[1]
    places = range(len(table))
    ax.hlines(places, table.min(axis=1), table.max(axis=1), color="#999999", linestyle="-")
    ax.plot(table["published"], places, "o", color="#0072B2", ms=9, mfc="none", label="published")
    ax.plot(table["predicted"], places, "D", color="#D55E00", ms=4, label="predicted")
    for place, (predicted, published) in enumerate(table.itertuples(index=False)):
        error = f"{100 * (predicted / published - 1):+.1f} %"
        ax.text(max(predicted, published) + 0.3, place, error, va="center", fontsize=8)
    ax.set(yticks=places, xlim=(0, 17), xlabel="GPU memory in use (GiB)")
    ax.set_yticklabels(table.index, fontsize=8)
    ax.set_title("Nine training runs of BERT-large on a V100, published in 2022", fontsize=10)
    ax.legend(loc="lower right")
    ax.figure.savefig(path, dpi=160, metadata={"Description": json.dumps(table.to_dict())})
    plt.close(ax.figure)


if __name__ == "__main__":
    draw(numbers(), PICTURE)
