"""The teacher's guide: clock times that add up, questions that belong to a guess of a lesson."""

import re
from pathlib import Path

import nbformat
import pytest

import notebook_rules as rules

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "teaching.md").read_text(encoding="utf-8")
QUESTION = "| question | lesson |"
LINK = re.compile(r"notebooks/(\d\d)_(\w+)\.ipynb#cell-id=([\w-]+)")


def rows(text: str, head: str) -> list[list[str]]:
    """The rows of all tables whose first line begins with `head`."""
    found = []
    for table in re.findall(rf"^{re.escape(head)}.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.M):
        found += [
            [cell.strip() for cell in re.split(r"\|", line)[1:-1]] for line in table.splitlines()
        ]
    return found


def clock(text: str) -> int:
    hours, minutes = text.split(":")
    return 60 * int(hours) + int(minutes)


def clock_problems(text: str) -> list[str]:
    plan = rows(text, "| clock | min |")
    pairs = zip(plan, plan[1:], strict=False)
    return [
        f"{a[2]} does not end at {b[0]}" for a, b in pairs if clock(a[0]) + int(a[1]) != clock(b[0])
    ]


def question_problems(text: str) -> list[str]:
    """A question belongs to a lesson, has an answer, and leads to a cell that asks for a guess."""
    problems = []
    for question, lesson, room, right, cell in rows(text, QUESTION):
        links = LINK.findall(cell)
        if not links or not (room and right):
            problems.append(f"{question} has no answer or no cell")
        for number, name, cell_id in links:
            nb = nbformat.read(ROOT / "notebooks" / f"{number}_{name}.ipynb", 4)
            cells = {c.id: c for c in rules.code(nb)}
            if number != lesson or cell_id not in cells or not rules.is_folded(cells[cell_id]):
                problems.append(f"{question}: {number} {cell_id} is no guess of lesson {lesson}")
    return problems


def test_the_clock_of_the_half_day_adds_up():
    plan = rows(TEXT, "| clock | min |")
    assert clock_problems(TEXT) == []
    assert (plan[0][0], clock(plan[-1][0]) + int(plan[-1][1])) == ("9:00", clock("12:40"))
    assert sum("break" in row[2] for row in plan) == 2


def test_each_question_is_a_guess_of_its_lesson():
    assert question_problems(TEXT) == []


def test_every_lesson_of_the_plan_has_a_question():
    planned = set(re.findall(r"\[(\d\d)\]", "".join(r[2] for r in rows(TEXT, "| clock | min |"))))
    assert planned == {"00", "02", "05", "12", "17"}
    assert planned <= {row[1] for row in rows(TEXT, QUESTION)}


@pytest.mark.parametrize(
    ("old", "new", "check"),
    [
        ("| 9:15 | 25 |", "| 9:15 | 30 |", clock_problems),
        ("#cell-id=ledger)", "#cell-id=napkin)", question_problems),
        ("| 02 | activations |", "| 03 | activations |", question_problems),
        ("| less: gradients and most", "| | less: gradients and most", None),
    ],
)
def test_a_defect_is_seen(old, new, check):
    assert old in TEXT
    defect = TEXT.replace(old, new)
    if check is None:
        with pytest.raises(ValueError):
            question_problems(defect)
    else:
        assert check(defect)
