"""`make student`: the course without its answers, whatever was run and saved since the commit."""

import re
import shutil
import subprocess
from pathlib import Path

import nbformat
import pytest

import notebook_rules as rules
from helpers import runs, show
from tools import student
from tools.shared import committed

LESSON = "02_where_memory_goes.ipynb"
MINE = "2 * 21  # what I answered the day before"


def git(folder: Path, *arguments: str) -> None:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*command, *arguments], check=True, capture_output=True)


def as_committed(path: Path) -> nbformat.NotebookNode:
    return nbformat.reads(committed.text(student.ROOT, path.relative_to(student.ROOT)), 4)


def run_and_save(path: Path) -> None:
    """What JupyterLab leaves behind: folds are open, outputs are one's own, answers are given."""
    notebook = nbformat.read(path, 4)
    for cell in rules.code(notebook):
        cell.metadata.pop("collapsed", None)
        cell.metadata.pop("jupyter", None)
        cell.outputs = [nbformat.v4.new_output("stream", text="It rises, on my machine.\n")]
        cell.execution_count = 99
        if cell.id == "answer-1":
            cell.source = cell.source.replace("...", MINE)
    nbformat.write(notebook, path)


@pytest.fixture(scope="module")
def course(tmp_path_factory) -> Path:
    """A clone in which a teacher ran lessons and saved them."""
    clone = tmp_path_factory.mktemp("teacher") / "course"
    git(student.ROOT, "clone", "--quiet", str(student.ROOT), str(clone))
    for path in (clone / "notebooks").glob("*.ipynb"):
        run_and_save(path)
    (clone / "notebooks" / "my_notes.ipynb").write_text("{}")
    return clone


@pytest.fixture(scope="module")
def copy(course) -> Path:
    target = course / "build" / "student"
    assert student.main([], root=course) == 0
    return target


def notebooks(copy: Path) -> list[tuple[nbformat.NotebookNode, nbformat.NotebookNode]]:
    """Each lesson as it is committed, and as the class gets it."""
    paths = [path for path in committed.files(student.ROOT) if path.match("notebooks/*.ipynb")]
    return [(as_committed(student.ROOT / p), nbformat.read(copy / p, 4)) for p in paths]


def test_every_lesson_is_there_and_no_solution(copy):
    lessons = {p.name for p in committed.files(student.ROOT) if p.match("notebooks/*.ipynb")}
    assert {path.name for path in (copy / "notebooks").glob("*.ipynb")} == lessons
    assert not (copy / "notebooks" / "solutions").exists()
    assert not list(copy.glob("**/answers")) and (copy / "data" / "gpus.csv").is_file()


def test_nothing_leads_to_what_is_left_out(copy):
    for path in [*copy.glob("notebooks/*.ipynb"), *copy.glob("**/*.md")]:
        text = path.read_text(encoding="utf-8")
        assert "solutions/" not in text and "teaching.md" not in text, path.name
    links = rules.links((copy / "README.md").read_text(encoding="utf-8"))
    assert len(links) > 30 and all((copy / link.split("#")[0]).exists() for link in links)


def test_outputs_below_a_guess_are_gone_and_others_stay(copy):
    guesses = kept = 0
    for ours, theirs in notebooks(copy):
        cells = {cell.id: cell for cell in theirs.cells}
        for cell in rules.code(ours):
            if cell.outputs:
                hidden = rules.is_folded(cell)
                assert bool(cells[cell.id].outputs) != hidden, (ours.cells[0].source, cell.id)
                assert not rules.is_folded(cells[cell.id])
                guesses, kept = guesses + hidden, kept + (not hidden)
    assert guesses > 20 and kept > 200


def test_nothing_that_was_run_or_answered_since_the_commit_is_handed_out(copy):
    for _, theirs in notebooks(copy):
        text = nbformat.writes(theirs)
        assert "on my machine" not in text and MINE not in text
    assert not (copy / "notebooks" / "my_notes.ipynb").exists()


def test_no_answer_and_no_text_of_a_picture_tells_it(copy):
    answers = (copy.with_name("student-answers.md")).read_text(encoding="utf-8")
    alt = runs.load("alt").set_index("figure")["alt"].str.split("{").str[0].str.strip()
    folded = told = 0
    for ours, theirs in notebooks(copy):
        words = nbformat.writes(theirs)
        assert rules.REVEAL not in words and "<summary>After" not in words
        for cell in rules.markdown(ours):
            for answer in student.REVEAL.findall(cell.source):
                assert answer in answers
                assert all(answer not in cell.source for cell in theirs.cells)
                folded += 1
        number = ours.cells[0].source[2:4]
        guessed = [f"{number}.{cell.id}" for cell in rules.code(ours) if rules.is_folded(cell)]
        texts = [alt[name] for name in guessed if name in alt]
        assert not [text for text in texts if len(text) > 20 and text in words]
        told += len(texts)
    assert folded > 20 and told > 5


def worked_lines(path: Path) -> set[str]:
    """What a solution has and its lesson has not: the lines of code by which an answer is known."""
    solved, asked = as_committed(path), as_committed(path.parents[1] / path.name)
    given = {line.strip() for cell in asked.cells for line in cell.source.splitlines()}
    given |= {line.removeprefix("- ").removeprefix("+ ").strip() for line in given}
    cells = [cell for cell in rules.code(solved) if re.fullmatch(r"solution-\d", cell.id)]
    lines = {line.strip() for cell in cells for line in cell.source.splitlines()}
    common = ("def ", "return ", "print(", "for ", "import ", "from ", "#")
    return {x for x in lines - given if len(x) > 24 and not x.startswith(common)}


def leaks(copy: Path) -> list[str]:
    """Lines of worked answers that a check of the copy holds, or shows in its output."""
    found = []
    for path in sorted((student.ROOT / "notebooks" / "solutions").glob("*.ipynb")):
        notebook = nbformat.read(copy / "notebooks" / path.name, 4)
        checks = filter(rules.is_check, notebook.cells)
        text = "\n".join(f"{check.source} {check.outputs}" for check in checks)
        found += [f"{path.name}: {line}" for line in sorted(worked_lines(path)) if line in text]
    return found


def test_no_check_holds_a_line_of_a_worked_answer(copy):
    paths = list((student.ROOT / "notebooks" / "solutions").glob("*.ipynb"))
    assert sum(len(worked_lines(path)) for path in paths) > 60
    assert leaks(copy) == []


def test_checks_ask_for_what_is_missing_and_stay_folded(copy):
    """An untouched exercise shows a hint; the check's code waits for a click."""
    checks = 0
    for ours, theirs in notebooks(copy):
        for mine, yours in zip(ours.cells, theirs.cells, strict=True):
            if mine.cell_type == "code" and (closed := mine.metadata.get("jupyter", {})):
                kept = yours.metadata.get("jupyter", {})
                assert kept.get("source_hidden") == closed.get("source_hidden"), mine.id
                assert yours.metadata.get("cellView") == mine.metadata.get("cellView"), mine.id
            if rules.is_check(yours):
                assert not re.search(r"^Right", str(yours.outputs), re.M), yours.id
                checks += 1
    assert checks > 40


def test_a_check_that_reveals_would_be_seen(copy, tmp_path):
    """The planted defect: a check that holds the worked answer."""
    bad = tmp_path / "copy"
    shutil.copytree(copy, bad)
    path = bad / "notebooks" / LESSON
    notebook = nbformat.read(path, 4)
    answer = sorted(worked_lines(student.ROOT / "notebooks" / "solutions" / LESSON))[0]
    check = next(cell for cell in notebook.cells if cell.get("id") == "check-1")
    check.source += f"\n# {answer}"
    nbformat.write(notebook, path)
    assert leaks(bad) == [f"{LESSON}: {answer}"]


def test_verdicts_are_for_the_class_to_find(copy):
    tables = 0
    for ours, theirs in notebooks(copy):
        for mine, yours in zip(ours.cells, theirs.cells, strict=True):
            if found := student.VERDICTS.search(mine.source):
                rows = student.VERDICTS.search(yours.source)[0].splitlines()
                assert len(rows) == len(found[0].splitlines())
                assert all(re.search(r"\| \? \|", row) for row in rows[2:]), rows
                tables += 1
    assert tables > 15


def test_the_tables_that_tell_are_packed_and_can_still_be_loaded(copy, monkeypatch):
    before = {name: len(runs.load(name)) for name in ("alt", "claims")}
    monkeypatch.chdir(copy / "notebooks")
    assert not list(copy.glob("data/claims.csv")) and not list(copy.glob("data/alt.csv"))
    assert {name: len(runs.load(name)) for name in before} == before
    name = runs.load("alt")["figure"].iloc[0] if before["alt"] else None
    if name:
        assert show.words.__name__ and name in set(runs.load("alt")["figure"])


def test_what_differs_from_the_commit_is_named(course, capsys):
    assert student.main([], root=course) == 0
    said = capsys.readouterr().out
    assert "without your changes in" in said and LESSON in said and "my_notes.ipynb" in said


def test_badges_open_the_copy_where_it_is_published(course, tmp_path):
    target = tmp_path / "copy"
    address = "https://github.com/a-teacher/a-class"
    assert student.main(["--repository", address], root=course, target=target) == 0
    text = (target / "notebooks" / LESSON).read_text(encoding="utf-8")
    assert "github/a-teacher/a-class/blob/main/notebooks" in text
    assert f"git clone -q --depth 1 {address}" in text and "OWNER" not in text
    assert f"git clone {address}" in (target / "README.md").read_text(encoding="utf-8")


def test_an_answer_that_is_not_folded_would_be_seen(course, tmp_path):
    """The planted defect: an answer that stands in the open stays in the copy."""
    clone = tmp_path / "course"
    shutil.copytree(course, clone, ignore=shutil.ignore_patterns("build"))
    git(clone, "checkout", "--quiet", "--", ".")
    path = clone / "notebooks" / LESSON
    notebook = nbformat.read(path, 4)
    cell = next(cell for cell in notebook.cells if cell.id == "ledger-read")
    cell.source = "It is the gradients.\n\n" + cell.source
    nbformat.write(notebook, path)
    git(clone, "commit", "--quiet", "--no-verify", "--all", "-m", "an answer in the open")
    assert student.main([], root=clone) == 0
    assert "It is the gradients." in (clone / "build/student/notebooks" / LESSON).read_text()
    assert rules.answers_to_guesses_are_folded(rules.read(path), path)


def test_without_git_one_sentence(tmp_path, capsys):
    assert student.main([], root=tmp_path, target=tmp_path / "out") == 2
    assert "clone the course" in capsys.readouterr().err
