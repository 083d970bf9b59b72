"""Pictures with alternative text."""

import html
import io

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from IPython.display import HTML, Image, display
from matplotlib.figure import Figure

from .hardware import GIB
from .runs import CATEGORIES, load

# Okabe and Ito's palette, told apart by colour-blind readers, its light colours darkened until they
# stand out from white (3:1); hatches repeat it without colour.
COLOURS = dict(
    zip(CATEGORIES, ["#0072B2", "#C98700", "#009E73", "#CC79A7", "#5A5A5A"], strict=True)
)
HATCHES = dict(zip(CATEGORIES, ["", "//", "..", "xx", "\\\\"], strict=True))
# What every figure shares, so that a lesson draws one with a line of pandas: `table.plot()`.
STYLE = {"figure.figsize": (7, 3.2), "figure.constrained_layout.use": True}
STYLE |= {"legend.frameon": False, "legend.fontsize": 8, "hatch.linewidth": 0.5}
LINES = plt.cycler(color=[*COLOURS.values(), "#A63C00"])
LINES += plt.cycler(linestyle=["-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1))])
plt.rcParams.update(STYLE | {"axes.prop_cycle": LINES})


def words(name: str, **values) -> str:
    """The alternative text of a figure that answers a guess: it must not stand in the cell.

    Args:
        name: the lesson's number, a dot and the cell's id, as in `data/alt.csv`.
        values: what the text leaves open in braces, computed by the cell.

    Raises:
        KeyError: no row has this name.

    Example:
        >>> show.timeline(step, show.words("16.second"))  # doctest: +SKIP
    """
    texts = load("alt").set_index("figure")["alt"]
    if name not in texts:
        raise KeyError(f"data/alt.csv has no text for {name!r}")
    return texts[name].format(**values)


def figure(fig, alt: str) -> None:
    """Show a matplotlib figure as a PNG; `alt` states its finding for those who cannot see it.

    Web pages read it from the metadata. JupyterLab gives a picture no alternative text at all
    (renderImage in its rendermime/src/renderers.ts), so the words also follow, folded.
    """
    buffer = io.BytesIO()
    fig.savefig(buffer, format="png", dpi=110, pil_kwargs={"optimize": True})
    plt.close(fig)
    # Not Image(alt=...): Colab's IPython 7.34 does not know it.
    display(Image(buffer.getvalue()), metadata={"image/png": {"alt": alt}})
    display(HTML(f"<details><summary>In words</summary>{html.escape(alt)}</details>"))


def bars(
    rows: dict[str, dict[str, float]], alt: str, title: str = "", limit=None, end=None
) -> None:
    """Show horizontal bars of memory by category, one a row.

    Args:
        rows: of each row's label the bytes of each category; a category left out is none.
        alt: what the picture shows, for those who do not see it.
        title: above the picture.
        limit: bytes at which a dashed line stands, such as a card's.
        end: bytes at which the axis ends, for pictures that take each other's place.
    """
    table = pd.DataFrame(rows, index=CATEGORIES).T.fillna(0) / GIB
    shape = {"figsize": (7, 1.1 + 0.5 * len(rows)), "width": 0.8, "legend": False}
    ax = table.plot.barh(stacked=True, color=COLOURS, edgecolor="white", **shape)
    for group, category in zip(ax.containers, CATEGORIES, strict=True):
        plt.setp(group.patches, hatch=HATCHES[category])
    totals = [f" {n:.2f}" if n >= 1 else f" {n:.3g}" for n in table.sum(axis=1)]
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0}  # a limit may pass behind it
    ax.bar_label(ax.containers[-1], totals, bbox=box, zorder=3)
    if limit is not None:
        ax.axvline(limit / GIB, color="black", linestyle="--", zorder=2)
    ax.margins(x=0.15)
    ax.invert_yaxis()
    if end is not None:
        ax.set_xlim(0, end / GIB)
    ax.set(xlabel="GiB allocated at the peak", title=title)
    ax.figure.legend(ncols=len(CATEGORIES), loc="outside lower center")
    figure(ax.figure, alt)


def timeline(prediction, alt: str, title: str = "", top: float | None = None, time=False) -> None:
    """Show one step of a prediction: bytes by category after each birth or death of a tensor.

    One operation may make and free hundreds of tensors, so widths say nothing of time. A dot marks
    the peak.

    Args:
        prediction: what `predict` returned.
        alt: what the picture shows, for those who do not see it.
        title: above the picture.
        top: bytes that make the axis as high as that of another picture; else the peak.
        time: draw to the scale of the predicted time.

    Raises:
        ValueError: `time` is asked for, and none is predicted: the card's rates are not known.
    """
    figure(drawn(prediction, title, top, time), alt)


def drawn(prediction, title: str = "", top: float | None = None, time=False) -> Figure:
    """The figure of a `timeline`."""
    if time and prediction.step_seconds is None:
        raise ValueError(prediction.note or "no time is predicted here: name a card with gpu=")
    fig, ax = plt.subplots(figsize=(7, 3.6))
    data = prediction.timeline / GIB
    at = 1000 * prediction.seconds if time else np.arange(len(data))
    look = {"colors": COLOURS.values(), "hatch": list(HATCHES.values()), "linewidth": 0}
    ax.stackplot(at, data.T, labels=CATEGORIES, edgecolor="white", **look)
    sums = data.sum(axis=1)
    peak = int(sums.argmax())
    ax.plot(at[peak], sums[peak], "o", color="black", markersize=4, clip_on=False)
    top = sums[peak] if top is None else top / GIB
    for row, phase in prediction.phases:
        x = at[max(row - 1, 0)]  # a phase begins where what precedes it ends
        ax.axvline(x, color="black", linewidth=0.8)
        side = "right" if x > 0.8 * at[-1] else "left"  # the last label must not leave the axes
        ax.text(x, top * 1.03, f" {phase} ", fontsize=8, ha=side)
    ax.set(xlim=(0, at[-1]), ylim=(0, top * 1.12), ylabel="GiB allocated", title=title)
    ordered = "one step: births and deaths of tensors, in order (not to the scale of time)"
    ax.set_xlabel(f"one step in ms, predicted for {prediction.device}" if time else ordered)
    fig.legend(ncols=len(CATEGORIES), loc="outside lower center")
    return fig
