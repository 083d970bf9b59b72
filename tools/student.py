"""A copy of the course for a class: without solutions, and without outputs below a guess.

    python tools/student.py         # or make student; it goes to build/student

Whoever opens a lesson there sees the question before its answer exists. Everything else is as in
the course, also what checks an exercise.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[1]
STUDENT = ROOT / "build" / "student"
# "Worked answers are in [solutions/..](..)." of a lesson, and what the README says of them.
SOLUTIONS = re.compile(
    r" ?Worked answers[^.]*?\[[^]]*\]\([^)]*\)\.|, and \[worked solutions\]\([^)]*\)"
)
LEFT_OUT = ("notebooks/solutions", "tests", ".github", ".ci")


def files(root: Path) -> list[Path]:
    """What belongs to the course, relative to its root; ValueError outside of a git checkout."""
    command = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError("make student copies a git checkout: clone the course") from error
    paths = [Path(line) for line in found.splitlines()]
    return [p for p in paths if not p.as_posix().startswith(LEFT_OUT) and (root / p).is_file()]


def without_answers(notebook: nbformat.NotebookNode) -> int:
    """Remove the outputs that are folded because a question stands above them; how many cells."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.outputs]
    guessed = [cell for cell in cells if cell.metadata.get("jupyter", {}).get("outputs_hidden")]
    for cell in guessed:
        cell.outputs, cell.execution_count = [], None
        cell.metadata.pop("collapsed", None)
        cell.metadata.pop("jupyter")  # its output is to be seen once it is there
    return len(guessed)


def main(root: Path = ROOT, target: Path = STUDENT) -> int:
    try:
        paths = files(root)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    shutil.rmtree(target, ignore_errors=True)
    questions = 0
    for path in paths:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".ipynb":
            notebook = nbformat.read(root / path, as_version=4)
            questions += without_answers(notebook)
            for cell in notebook.cells:
                if cell.cell_type == "markdown":
                    cell.source = SOLUTIONS.sub("", cell.source).rstrip()
            nbformat.write(notebook, target / path)
        elif path.name == "README.md":
            text = (root / path).read_text(encoding="utf-8")
            (target / path).write_text(SOLUTIONS.sub("", text), encoding="utf-8")
        else:
            shutil.copy(root / path, target / path)
    lessons = sum(path.suffix == ".ipynb" for path in paths)
    print(f"build/student: {lessons} lessons, the outputs below {questions} guesses left out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
