"""Write `docs/look_up.md`: the course's words, and its techniques with what they save and cost.

The words are those of lesson 00; the techniques are rows of `data/techniques.csv`, each with the
cell that shows it. `make outputs` writes the page.
"""

import re
from pathlib import Path

import nbformat
import pandas as pd

from tools import ROOT

PAGE = ROOT / "docs" / "look_up.md"
LINKS = (
    "What each technique saves on the card, what it costs, and when it pays. The link leads to the "
    "cell that shows it, predicted or measured (in JupyterLab and on the site; on GitHub to the "
    "lesson's beginning)."
)


def words() -> list[str]:
    """The lines of lesson 00's table of words."""
    notebook = nbformat.read(ROOT / "notebooks" / "00_start_here.ipynb", as_version=4)
    text = next(cell.source for cell in notebook.cells if cell.id == "glossary")
    return [line for line in text.splitlines() if line.startswith("|")]


def techniques() -> list[str]:
    """A table of the rows, in the order of the lessons."""
    rows = pd.read_csv(ROOT / "data" / "techniques.csv", dtype=str)
    lines = ["| technique | saves | costs | use it when | lesson |", "|---|---|---|---|---|"]
    for row in rows.itertuples(index=False):
        link = f"[{row.lesson[:2]}](../notebooks/{row.lesson}.ipynb#cell-id={row.cell})"
        lines.append(f"| {row.technique} | {row.saves} | {row.costs} | {row.when} | {link} |")
    return lines


def page() -> str:
    parts = ["# Look it up", "", "## Techniques", ""]
    parts += [LINKS, "", *techniques(), "", "## Words", ""]
    parts += [re.sub(r"\]\((?=\d\d_)", "](../notebooks/", line) for line in words()]
    return "\n".join([*parts, ""])


def write() -> list[Path]:
    """Bring the page up to date; the file, if it changed."""
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page():
        return []
    PAGE.write_text(page(), encoding="utf-8")
    return [PAGE]
