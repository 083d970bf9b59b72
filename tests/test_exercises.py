"""Every check of an exercise says "Right" to right answers in any form, and to no others.

`tests/answers/NN.toml` holds, for each exercise, right answers and plausible wrong ones.
"""

import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

import warm
from exercises import Exercise, exercises, names, needed

STARTS = "sys.executable"  # a lesson whose exercise starts processes
ROOT = Path(__file__).resolve().parent.parent
LESSONS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))


@cache
def table(lesson: Path) -> list[dict]:
    path = ROOT / "tests" / "answers" / f"{lesson.name[:2]}.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))["exercise"] if path.exists() else []


@cache
def of(lesson: Path) -> list[Exercise]:
    return list(exercises(lesson))


@cache
def prepared(lesson: Path, at: int) -> dict:
    return of(lesson)[at].namespace()


ANSWERS = [
    pytest.param(lesson, at, kind, answer, id=f"{entry['number']}-{kind}-{n}")
    for lesson in LESSONS
    for at, entry in enumerate(table(lesson))
    for kind in ("untouched", "right", "wrong")
    for n, answer in enumerate(entry.get(kind, [""]))
]


@pytest.mark.parametrize("lesson, at, kind, answer", ANSWERS)
def test_the_check_judges(lesson, at, kind, answer, monkeypatch):
    monkeypatch.chdir(lesson.parent)
    if STARTS in lesson.read_text(encoding="utf-8"):
        monkeypatch.setattr(sys, "executable", warm.executable())
    said = of(lesson)[at].says(prepared(lesson, at), answer).strip()
    right = any(line.startswith("Right") for line in said.splitlines())
    assert said and right == (kind == "right"), f"{answer}\n-> {said}"


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem)
def test_every_exercise_has_answers(lesson):
    number = int(lesson.name[:2])
    wanted = [f"{number}.{n}" for n in range(1, len(of(lesson)) + 1)]
    assert wanted and [entry["number"] for entry in table(lesson)] == wanted
    short = [e["number"] for e in table(lesson) if not e["right"] or len(e["wrong"]) < 4]
    assert not short, f"{short}: one right answer and four wrong ones are the least"


def test_a_check_gets_the_cells_it_needs_and_no_others():
    cells = [
        "import math\nfrom os import path",
        "n = 1",
        "slow = [math.pi for _ in range(n)]",
        "def double(x):\n    local = x\n    return factor * local",
        "n = 2",
        "factor = n",
        "for name in 'ab':\n    print(name)",
    ]
    assert needed(cells, "double(1)") == [3, 4, 5]
    assert needed(cells, "[slow for name in range(3)]") == [0, 1, 2]
    assert needed(cells, "class A:\n    b = path") == [0]
    assert needed(cells, "slow = 1\nfor n in 'ab':\n    slow += n") == []
    assert needed(cells, "n = n + 1") == [4]
    assert names("class A:\n    b = 1").bound == {"A"}
