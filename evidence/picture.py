"""Draw the README's pictures: one predicted step, and predictions held against real cards.

    python -m evidence pictures

The second file says from which recorded rows it was drawn, and a test compares them with today's.
"""

import json

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from evidence.tables import DATA
from helpers import predict, show, text_classification
from planner import report

PICTURE, STEP = DATA / "real_cards.png", DATA / "step.png"
NAMES = {  # of sources, by how their sets begin
    "guide": "guide of 2022",
    "peft": "PEFT's comparison",
    "fms": "fms-hf-tuning",
    "course": "CS336, students' runs",
    "litgpt": "LitGPT",
    "llms": "LLMs from scratch",
    "vit": "ViT-L, 2023",
    "bert": "BERT-large, RTX 3090",
    "liger": "Liger, single kernels",
    "torchtune": "torchtune",
    "torchao": "torchao",
    "compiled": "compiled code",
}
MARKERS = "osD^vP*X<>hp"
PALETTE = [
    *show.LINES.by_key()["color"],
    *"#6A4C93 #000000 #7A4B00 #B0006D #00606B #5A6B00".split(),
]


def numbers() -> dict:
    """How many rows each set has, and the sizes of their errors."""
    return report.errors(report.judged()).to_dict()


def draw(rows: pd.DataFrame) -> Figure:
    """One dot a row: its error over the bytes measured, coloured by source."""
    fig, ax = plt.subplots(figsize=(7, 3.8))
    for k, (name, group) in enumerate(rows.groupby(rows["set"].str.split("-").str[0], sort=False)):
        colour, marker = PALETTE[k % len(PALETTE)], MARKERS[k % len(MARKERS)]
        look = {"mfc": (colour, 0.6), "mec": colour, "marker": marker}
        x, y = group["measured"] / 2**30, 100 * group["error"]
        ax.plot(x, y, ls="", ms=5, label=f"{NAMES.get(name, name)} ({len(group)})", **look)
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
    fig.legend(ncols=3, loc="outside lower center")
    return fig


def draw_step() -> Figure:
    """One step of the course's classic run, to the scale of its predicted time."""
    classic = text_classification("large")
    step = predict(classic, gpu="T4", per_device_train_batch_size=4)
    return show.drawn(step, f"{classic.title}, batch 4, float32: one step on a T4", time=True)


def write() -> None:
    draw_step().savefig(STEP, dpi=160)
    facts = {"Description": json.dumps(numbers())}
    draw(report.judged()).savefig(PICTURE, dpi=160, metadata=facts)
