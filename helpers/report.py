"""Predictions held against what other people measured on real cards."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from .hardware import GIB
from .runs import load
from .show import LINES

MARKERS = "osD^vP*X"
PALETTE = [*LINES.by_key()["color"], "#6A4C93", "black"]


def judged(rows: pd.DataFrame | None = None) -> pd.DataFrame:
    """The rows of `data/real_cards.csv` that judge, with `error`, predicted / measured - 1."""
    rows = load("real_cards") if rows is None else rows
    missing = {*"set run card quantity measured predicted role remark".split()} - {*rows}
    if missing:
        raise ValueError(f"real_cards.csv lacks the column {min(missing)}: see data/README.md")
    rows = rows[rows["role"] == "judged"].dropna(subset="predicted")
    return rows.assign(error=rows["predicted"] / rows["measured"] - 1)


def errors(rows: pd.DataFrame, by: str | list[str] = "set") -> pd.DataFrame:
    """How many rows, and the sizes of their errors in %: the middle one, nine of ten, the worst."""
    sizes = rows.assign(error=100 * rows["error"].abs()).groupby(by, sort=False)["error"]
    table = sizes.quantile([0.5, 0.9, 1.0]).unstack().set_axis(["median", "90 %", "worst"], axis=1)
    table.insert(0, "rows", sizes.size())
    return table.round(2)


def draw(rows: pd.DataFrame) -> Figure:
    """One dot a row of `judged`: its error over the bytes measured, coloured by source."""
    fig, ax = plt.subplots(figsize=(7, 3.8))
    for k, (name, group) in enumerate(rows.groupby(rows["set"].str.split("-").str[0], sort=False)):
        colour, marker = PALETTE[k % len(PALETTE)], MARKERS[k % len(MARKERS)]
        look = {"mfc": (colour, 0.6), "mec": colour, "marker": marker}
        x, y = group["measured"] / GIB, 100 * group["error"]
        ax.plot(x, y, ls="", ms=5, label=f"{name} ({len(group)})", **look)
    for y, line in {1: ":", -1: ":", 5: "--", -5: "--"}.items():
        ax.axhline(y, color="#666666", linestyle=line, linewidth=0.8)
    ax.axhline(0, color="black", linewidth=0.8, linestyle="-")
    ax.set_yscale("symlog", linthresh=1)
    worst = max(6, 100 * rows["error"].abs().max())
    ticks = [t for t in (-50, -20, -10, -5, -1, 0, 1, 5, 10, 20, 50) if abs(t) <= 1.4 * worst]
    ax.set_yticks(ticks, [f"{t:+}" if t else "0" for t in ticks])
    ax.set(xscale="log", xlabel="GiB measured on a real card", ylabel="error of the prediction (%)")
    ax.set_ylim(-1.3 * worst, 1.3 * worst)
    ax.xaxis.set_major_formatter("{x:g}")
    ax.minorticks_off()
    fig.legend(ncols=4, loc="outside lower center")
    return fig


def on_real_cards(rows: pd.DataFrame) -> str:
    """What `judged` rows say, as text: by source, and each row that is off by more than 5 %."""
    sizes = 100 * rows["error"].abs()
    text = (
        f"Predicted against measured on real cards: {len(rows)} measurements by other people, "
        f"{rows['set'].nunique()} sets, {rows['card'].nunique()} known cards\n"
        f"error: median {sizes.median():.2f} %, nine of ten within {sizes.quantile(0.9):.2f} %, "
        f"worst {sizes.max():.2f} %\n\n"
    )
    text += errors(rows, ["set", "quantity"]).reset_index().to_string(index=False)
    far = rows[sizes > 5].assign(error=lambda far: (100 * far["error"]).map("{:+.1f} %".format))
    if far.empty:
        return f"{text}\n\nNo row is off by more than 5 %."
    far = far[["set", "run", "quantity", "error", "remark"]].fillna("unexplained")
    return f"{text}\n\nOff by more than 5 %\n{far.to_string(index=False)}"
