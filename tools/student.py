"""Copy the course for a class: nobody reads an answer there before the question.

    python -m tools.student --repository https://github.com/me/class

It is made of the last commit, so what a teacher ran and saved the day before is not in it. Left out
are solutions, outputs below a guess, the answers that follow them, and the verdicts on what guides
say. The answers go into a page for the teacher, build/student-answers.md. The two tables that tell
them, and that cells need when they run, are packed. `--repository` names the address under which
the copy will be published: its badges then open the copy on Colab, and not the course.

Writes: build/student/, build/student-answers.md
"""

import argparse
import gzip
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat

from tools import ROOT
from tools.shared import address, committed

STUDENT = ROOT / "build" / "student"
# "Worked answers are in [solutions/..](..)." of a lesson, and what the README says of them.
SOLUTIONS = re.compile(
    r" ?Worked answers[^.]*?\[[^]]*\]\([^)]*\)\.|, and \[worked solutions\]\([^)]*\)"
)
# Which belief is false, and where, stands in the page for teachers.
LEFT_OUT = ("notebooks/solutions", "tests", ".github", ".ci", "docs/teaching.md", "CONTRIBUTING.md")
PACKED = ("data/alt.csv", "data/claims.csv")  # cells read them, and so would the curious
GONE = "|".join([*map(re.escape, PACKED), r"solutions/[^)]*"])
GONE_LINK = re.compile(rf"\[([^]]*)\]\((?:\.\./)*(?:{GONE})\)")
REVEAL = re.compile(
    r"<details>\n<summary>After you have run it</summary>\n\n(.*?)\n\n</details>\s*", re.DOTALL
)
VERDICTS = re.compile(r"^\| what the guide says \| verdict \|.*?(?=\n\n|\Z)", re.DOTALL | re.M)
SENTENCE = re.compile(r"(?<=[.!?]) +(?=[A-Z`\[])")


def without_outputs(notebook: nbformat.NotebookNode) -> int:
    """Remove the outputs that are folded because a question stands above them; how many cells."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.outputs]
    guessed = [cell for cell in cells if cell.metadata.get("jupyter", {}).get("outputs_hidden")]
    for cell in guessed:
        cell.outputs, cell.execution_count = [], None
        cell.metadata.pop("collapsed", None)
        cell.metadata["jupyter"].pop("outputs_hidden")  # to be seen once it is there
        if not cell.metadata["jupyter"]:
            cell.metadata.pop("jupyter")  # code that was folded stays folded
    return len(guessed)


def without_verdicts(table: str) -> str:
    """The rows of a table of verdicts, for the reader to judge."""
    head, line, *rows = table.splitlines()
    cells = [re.split(r"(?<!\\)\|", row) for row in rows]
    return "\n".join([head, line, *(f"|{row[1]}| ? |{row[-2]}|" for row in cells)])


def without_answers(notebook: nbformat.NotebookNode) -> Iterator[str]:
    """Take the answers out of the texts, and yield them."""
    for cell in notebook.cells:
        if cell.cell_type != "markdown":
            continue
        yield from REVEAL.findall(cell.source)
        text = REVEAL.sub("What did you see, and why? Write it down.\n\n", cell.source)
        text = VERDICTS.sub(lambda found: without_verdicts(found[0]), text)
        cell.source = GONE_LINK.sub(r"\1", SOLUTIONS.sub("", text)).rstrip()


def lesson(text: str) -> tuple[nbformat.NotebookNode, int, list[str]]:
    """A lesson for the class, how many cells lost their outputs, and the answers taken out."""
    notebook = nbformat.reads(text, as_version=4)
    guesses = without_outputs(notebook)
    return notebook, guesses, list(without_answers(notebook))


def page(text: str) -> str:
    """README or another page, without the sentences that lead to what is left out."""
    gone = re.compile(r"\]\((?:\.\./)*(?:" + "|".join(map(re.escape, LEFT_OUT + PACKED)) + r")")
    lines = []
    for line in SOLUTIONS.sub("", text).splitlines():
        kept = [sentence for sentence in SENTENCE.split(line) if not gone.search(sentence)]
        if kept or not line:
            lines.append(" ".join(kept))
    return "\n".join(lines) + "\n"


def copy(root: Path, target: Path) -> tuple[int, int, str]:
    """Write the copy; how many lessons it has, how many guesses, and the teacher's page."""
    lessons = guesses = 0
    pages = ["# What follows the guesses", "For the teacher: it is not in the copy for the class."]
    for path in committed.files(root):
        name = path.as_posix()
        if name.startswith(LEFT_OUT):
            continue
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".ipynb":
            notebook, found, answers = lesson(committed.text(root, path))
            nbformat.write(notebook, target / path)
            lessons, guesses = lessons + 1, guesses + found
            pages += [f"## {path.stem}"] * bool(answers) + answers
        elif name in PACKED:
            packed = gzip.compress(committed.content(root, path), mtime=0)
            (target / f"{name}.gz").write_bytes(packed)
        elif path.suffix == ".md":
            (target / path).write_text(page(committed.text(root, path)), encoding="utf-8")
        else:
            (target / path).write_bytes(committed.content(root, path))
    return lessons, guesses, "\n\n".join(pages) + "\n"


def publish_as(repository: str, target: Path) -> None:
    """Let badges, the Colab cells and `git clone` name the copy's own address."""
    project = target / "pyproject.toml"
    text = project.read_text(encoding="utf-8").replace(address.repository(target), repository)
    project.write_text(text, encoding="utf-8")
    address.rewrite(target)


def main(arguments: list[str] | None = None, root: Path = ROOT, target: Path | None = None) -> int:
    parser = argparse.ArgumentParser(description="Copy the course for a class.")
    parser.add_argument("--repository", default="", help="the address the copy will be at")
    options = parser.parse_args(arguments)
    target = target or root / "build" / "student"
    try:
        own = committed.changed(root, "notebooks")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    shutil.rmtree(target, ignore_errors=True)
    lessons, guesses, answers = copy(root, target)
    target.with_name("student-answers.md").write_text(answers, encoding="utf-8")
    if options.repository:
        publish_as(options.repository.rstrip("/"), target)
    else:
        print("Its badges open the full course: name the copy's own address with REPOSITORY=...")
    if own:
        print(f"As committed, so without your changes in {', '.join(own)}")
    print(f"build/student: {lessons} lessons; outputs and answers below {guesses} guesses left out")
    print("build/student-answers.md: those answers, for the teacher")
    return 0


if __name__ == "__main__":
    sys.exit(main())
