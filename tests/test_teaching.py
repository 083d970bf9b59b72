"""The teacher's guide: clock times that add up, questions that belong to a guess of a lesson."""

import html
import re
import shutil
from pathlib import Path

import nbformat
import pandas as pd
import pytest

import notebook_rules as rules
from tools import sheets

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


def plans(text: str) -> list[list[list[str]]]:
    """The rows of each plan: half a day, one day, the first and the second of two."""
    tables = re.findall(r"^\| clock \| min \|.*\n\|[-|]+\|\n(?:\|.*\n)+", text, re.M)
    return [rows(table, "| clock | min |") for table in tables]


def clock_problems(text: str) -> list[str]:
    return [
        f"{a[2]} does not end at {b[0]}"
        for plan in plans(text)
        for a, b in zip(plan, plan[1:], strict=False)
        if clock(a[0]) + int(a[1]) != clock(b[0])
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


def test_the_clocks_add_up():
    assert clock_problems(TEXT) == []
    ends = [clock(plan[-1][0]) + int(plan[-1][1]) for plan in plans(TEXT)]
    assert ends == [clock("12:40"), clock("17:20"), clock("17:05"), clock("17:20")]
    assert {plan[0][0] for plan in plans(TEXT)} == {"9:00"}
    pauses = [sum("break" in row[2] or "lunch" in row[2] for row in plan) for plan in plans(TEXT)]
    assert pauses == [2, 4, 4, 3]


def test_each_question_is_a_guess_of_its_lesson():
    assert question_problems(TEXT) == []


def test_every_lesson_of_a_plan_has_a_question():
    half, _, *two = [
        set(re.findall(r"\[(\d\d)\]", "".join(row[2] for row in plan))) for plan in plans(TEXT)
    ]
    assert half == {"00", "02", "05", "12", "17"}
    assert set.union(*two) == {f"{n:02}" for n in range(18)}
    asked = {row[1] for row in rows(TEXT, QUESTION)}
    assert set.union(half, *two) <= asked


def ten_problems(text: str) -> list[str]:
    """Ten numbered questions, each with an answer and a cell of its lesson that shows something."""
    asked, problems = rows(text, "| ask | lesson | right |"), []
    if [row[0].split(".")[0] for row in asked] != [str(n) for n in range(1, 11)]:
        problems.append("the questions are not numbered from 1 to 10")
    for question, lesson, right, cell in asked:
        for number, name, cell_id in LINK.findall(cell) or [("", "", "")]:
            path = ROOT / "notebooks" / f"{number}_{name}.ipynb"
            cells = rules.code(nbformat.read(path, 4)) if number == lesson else []
            if not right or not any(c.id == cell_id and c.outputs for c in cells):
                problems.append(f"{question}: no cell of lesson {lesson} answers it")
    return problems


def test_ten_questions_have_their_cells():
    assert ten_problems(TEXT) == []


def test_the_class_hour_is_in_order():
    minutes = [int(row[0]) for row in rows(TEXT, "| min | who | what |")]
    assert minutes[0] == 0 and minutes == sorted(set(minutes)) and minutes[-1] < 45


def test_sheets_ask_and_do_not_tell(tmp_path):
    """Each plan's questions are on its handout, and no answer of the guide is on any."""
    assert sheets.main(target=tmp_path) == 0
    names = {path.stem for path in tmp_path.glob("*.html")}
    plans = {"handout_the_half_day", "handout_one_day", "handout_two_days"}
    assert names == plans | {"cheat_sheet"}
    texts = [html.unescape((tmp_path / f"{name}.html").read_text("utf-8")) for name in plans]
    for question, _, _, right, _ in rows(TEXT, QUESTION):
        assert any(sheets.plain(question) in text for text in texts), question
        assert not any(sheets.plain(right) in text for text in texts), right
    assert not any("notebooks/" in text for text in texts)
    cheat = html.unescape((tmp_path / "cheat_sheet.html").read_text("utf-8"))
    table = pd.read_csv(ROOT / "data" / "techniques.csv", dtype=str)
    assert all(row.technique in cheat and row.costs in cheat for row in table.itertuples())


def test_a_copy_for_a_class_prints_the_cheat_sheet_alone(tmp_path):
    (tmp_path / "data").mkdir()
    shutil.copy(ROOT / "data" / "techniques.csv", tmp_path / "data")
    assert sheets.main(root=tmp_path, target=tmp_path / "out") == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["cheat_sheet.html"]


@pytest.mark.parametrize(
    ("old", "new", "check"),
    [
        ("| 9:15 | 25 |", "| 9:15 | 30 |", clock_problems),
        ("#cell-id=ledger)", "#cell-id=napkin)", question_problems),
        ("| 02 | activations |", "| 03 | activations |", question_problems),
        ("#cell-id=leave-fact)", "#cell-id=nothing)", ten_problems),
        ("| 3. 8 x 1", "| 8 x 1", ten_problems),
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
