"""Refreshing a tiny notebook: outputs in their stored form, or the file as it was."""

from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

import notebook_rules as rules
from evidence.__main__ import PARTS
from tools import outputs
from tools.shared import address

PYPROJECT = '[project]\n[project.urls]\nRepository = "https://github.com/someone/a-course"\n'
NOISY = """\
import sys

import ipywidgets
from IPython.display import display

print("kept")
print("a warning", file=sys.stderr)
display(ipywidgets.IntSlider())
print("kept too")"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (tmp_path / "notebooks" / "solutions").mkdir(parents=True)
    return tmp_path


def store(path: Path, *sources: str) -> Path:
    cells = [new_markdown_cell("# 00. Title"), *(new_code_cell(source) for source in sources)]
    for number, cell in enumerate(cells):
        cell.id = f"kept-{number}"
    nb = new_notebook(cells=cells)
    nb.metadata.update(widgets={"state": {}}, kernelspec={"name": "elsewhere", "display_name": "x"})
    nb.cells[1].metadata.update(execution={"start": "then"}, tags=["parameters"])
    nbformat.write(nb, path)
    return path


def refreshed(root: Path, lessons: str = "", **options: float) -> int:
    return outputs.refresh_all(outputs.chosen(lessons, root), root, **options)


def test_outputs_are_stored_in_their_final_form(root: Path) -> None:
    lesson = store(root / "notebooks" / "00_x.ipynb", NOISY, "6 * 7")
    solution = store(root / "notebooks" / "solutions" / "00_x.ipynb", "1 + 1")
    assert refreshed(root) == 0
    nb = rules.read(lesson)
    assert [cell.id for cell in nb.cells] == ["kept-0", "colab-setup", "kept-1", "kept-2"]
    assert nb.cells[1].source == address.colab_cell(root)
    assert [output.get("text") for output in nb.cells[2].outputs] == ["kept\nkept too\n"]
    assert nb.cells[3].outputs[0].data == {"text/plain": "42"}
    assert nb.cells[2].metadata == {"tags": ["parameters"]}
    assert nb.metadata.kernelspec.name == "python3"
    held = (rules.run_in_order, rules.no_stderr, rules.no_widgets, rules.metadata_is_standard)
    held += (rules.badge_opens_this_file, rules.colab_cell_is_the_generated_one)
    for path in lesson, solution:
        found = {rule.__name__: rule(rules.read(path), path) for rule in held}
        assert not any(found.values()), found

    text = lesson.read_text()
    assert refreshed(root, "0") == 0
    assert lesson.read_text() == text, "a second refresh changes nothing"


def test_controls_tell_the_kernel_nothing_or_its_reply_may_be_missed(root: Path) -> None:
    shows = "out = ipywidgets.Output()\nwith out:\n    print(1)"
    sources = f"import ipywidgets\n{shows}", "out.outputs"
    lesson = store(root / "notebooks" / "00_x.ipynb", *sources)
    assert refreshed(root) == 0
    cells = rules.read(lesson).cells
    assert cells[-2].outputs == [] and cells[-1].outputs[0].data == {"text/plain": "()"}


@pytest.mark.parametrize("source", ["import time; time.sleep(60)", "while True: 0"])
def test_a_cell_that_does_not_end_costs_one_notebook(
    root: Path, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    endless = store(root / "notebooks" / "00_endless.ipynb", source)
    good = store(root / "notebooks" / "01_good.ipynb", "1")
    before = endless.read_bytes()
    assert refreshed(root, limit=0.01) == 1
    late = f"cell [2] ({source}) did not end within 0.01 minutes; --limit gives it more"
    assert f"00_endless.ipynb: left as it was, {late}\n" in capsys.readouterr().out
    assert endless.read_bytes() == before
    assert not rules.run_in_order(rules.read(good), good)


@pytest.mark.parametrize(
    "source, reason",
    [
        ("1 / 0", "cell [2] (1 / 0) failed: ZeroDivisionError: division by zero"),
        ("import os\nos.getcwd()", "the output of cell [2] shows a path of this machine"),
    ],
)
def test_a_notebook_that_fails_stays_as_it_was(
    root: Path, source: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = store(root / "notebooks" / "00_bad.ipynb", source)
    good = store(root / "notebooks" / "01_good.ipynb", "1")
    before = bad.read_bytes()
    assert refreshed(root) == 1
    assert f"00_bad.ipynb: left as it was, {reason}" in capsys.readouterr().out
    assert bad.read_bytes() == before
    assert not rules.run_in_order(rules.read(good), good)
    assert sorted(path.name for path in bad.parent.glob("*")) == [bad.name, good.name, "solutions"]


def test_an_unknown_lesson_is_one_sentence(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store(root / "notebooks" / "00_x.ipynb", "1")
    assert outputs.main(["--lessons", "7"], root=root) == 2
    assert capsys.readouterr().err == "No lesson 07: the lessons are 00.\n"


@pytest.mark.parametrize("part", [False, True])
def test_the_steps_come_in_their_order_and_a_failure_ends_them(
    monkeypatch, capsys: pytest.CaptureFixture[str], part: bool
) -> None:
    ran, fails = [], True

    def step(command, **_):
        ran.append(" ".join(command[1:]))
        return SimpleNamespace(returncode=3 * fails)

    def refresh_all(paths, *_):
        ran.append(f"{len(paths)} notebooks")
        return 1

    monkeypatch.setattr(outputs.subprocess, "run", step)
    monkeypatch.setattr(outputs, "refresh_all", refresh_all)
    assert outputs.main(["--lessons", "02"] if part else []) == 3
    assert ran == ["-m evidence scoreboard readme" if part else "-m evidence"]
    assert "the evidence failed, and nothing after it was done" in capsys.readouterr().err
    ran.clear()
    fails = False
    assert outputs.main(["--lessons", "02"] if part else []) == 1
    assert ran[-1] == "2 notebooks" if part else ran[-1].endswith("notebooks")


def test_the_parts_that_are_asked_for_exist() -> None:
    assert set(outputs.JUDGED) <= set(PARTS)
