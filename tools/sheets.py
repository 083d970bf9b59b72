"""Print two sheets for a class: a handout with the questions, and a cheat sheet of the techniques.

    python -m tools.sheets

The handout has the questions of docs/teaching.md, with room for guesses and without answers: one
page for half a day, one for each of the other plans. The cheat sheet is data/techniques.csv, on
one page as well. Open them in a browser and print them.

Writes: build/sheets/
"""

import re
import sys
from pathlib import Path

import jinja2
import pandas as pd

from tools import ROOT

TEMPLATE = Path(__file__).parent / "shared" / "sheets.html"
SHEETS = ROOT / "build" / "sheets"
PLAN = re.compile(r"^### The questions of ([^\n]+)$(.*?)(?=^#|\Z)", re.MULTILINE | re.DOTALL)
BEFORE = ["My model, my card, the length of my texts:"]
AFTER = [
    "What stands in memory at the worst moment of a step, largest first:",
    "The recipe that was named for my model, its price, and what it needs in GiB:",
    "On Monday I will first:",
]
Rows = list[list[str]]


def questions(teaching: str) -> dict[str, Rows]:
    """By plan: the lesson and the question, and two fields to fill in. No answer is among them."""
    plans = {}
    for name, text in PLAN.findall(teaching):
        cells = [re.split(r"(?<!\\)\|", line)[1:3] for line in text.splitlines() if "|" in line]
        plans[name] = [[lesson.strip(), plain(asked), "", ""] for asked, lesson in cells[2:]]
    return plans


def plain(markdown: str) -> str:
    return re.sub(r"[*`]", "", markdown).strip()


def handout(plan: str, rows: Rows) -> str:
    words = "Write a number or a word before the cell runs, and what you saw behind it."
    columns = ["lesson", "question", "my guess", "what I saw, and why"]
    return page(f"One GPU, measured: {plan}", words, columns, rows, BEFORE, AFTER)


def cheat_sheet(table: pd.DataFrame) -> str:
    table = table.assign(lesson=table["lesson"].str[:2])
    columns = ["technique", "saves", "costs", "when", "lesson"]
    words = "What each technique saves on the card, what it costs, when it pays, who shows it."
    return page("One GPU, measured: techniques", words, columns, table[columns].values, wide=True)


def page(title, words, columns, rows, before=(), after=(), wide=False) -> str:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    parts = {"columns": columns, "rows": rows, "before": before, "after": after, "wide": wide}
    return template.render(title=title, words=words, **parts)


def main(root: Path = ROOT, target: Path = SHEETS) -> int:
    target.mkdir(parents=True, exist_ok=True)
    table = pd.read_csv(root / "data" / "techniques.csv", dtype=str)
    sheets = {"cheat_sheet": cheat_sheet(table)}
    teaching = root / "docs" / "teaching.md"
    if teaching.is_file():  # a copy for a class has none
        plans = questions(teaching.read_text(encoding="utf-8"))
        sheets |= {f"handout_{k.replace(' ', '_')}": handout(k, rows) for k, rows in plans.items()}
    for name, text in sheets.items():
        (target / f"{name}.html").write_text(text + "\n", encoding="utf-8")
        print(f"build/sheets/{name}.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
