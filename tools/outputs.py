"""Make anew what the repository stores: recorded predictions, outputs of notebooks, pages.

    python -m tools.outputs [--lessons "01 02"]

Recorded predictions come first, because the lessons read them; with `--lessons` they stay as they
are, and only those lessons are run. Lessons and their solutions are executed in place, one write
per notebook and only after all of its cells ran. A step that fails ends the work.

Writes: what make evidence writes, notebooks/, docs/look_up.md, README.md, tools/README.md
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import nbformat
from tqdm import tqdm

from tools import ROOT
from tools.shared import address, folds, look_up, table
from tools.shared.execution import (
    LIMIT,
    LessonError,
    choose_lessons,
    execute,
    read_notebook,
    runnable,
)

EVIDENCE = ("-m", "evidence")  # an hour if all of it is due
JUDGED = ("scoreboard", "readme")  # its parts that only read recorded rows
WIDGET = "application/vnd.jupyter.widget-view+json"
METADATA = {
    "accelerator": "GPU",
    "colab": {"gpuType": "T4"},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
}


def normalise(notebook: nbformat.NotebookNode) -> None:
    """Leave out what differs from run to run or breaks the page on GitHub; ids stay."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [
                output
                for output in cell.outputs
                if output.get("name") != "stderr" and WIDGET not in output.get("data", {})
            ]
    notebook.metadata.pop("widgets", None)
    notebook.metadata.get("language_info", {}).pop("version", None)
    notebook.metadata.update(nbformat.from_dict(METADATA))


def find_path(notebook: nbformat.NotebookNode, root: Path) -> str | None:
    """The cell whose output shows where this copy of the course lies, if there is one."""
    for number, cell in enumerate(runnable(notebook), start=1):
        # Pictures are base64, in which a path cannot appear by name.
        if any(str(folder) in str(cell.outputs) for folder in {root, root.resolve()}):
            return f"cell [{number}]"
    return None


def refresh(path: Path, root: Path, bar: tqdm, limit: float) -> None:
    """Execute one notebook and replace the file. Raises LessonError, the file then untouched."""
    notebook = read_notebook(path)
    address.rewrite_notebook(notebook, path, root)
    folds.complete(notebook, path)
    execute(notebook, path.parent, after_cell=bar.update, limit=limit)
    normalise(notebook)
    if cell := find_path(notebook, root):
        raise LessonError(f"the output of {cell} shows a path of this machine: do not print it")
    draft = path.with_name(f".{path.name}.draft")
    try:
        nbformat.write(notebook, draft)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def refresh_all(paths: list[Path], root: Path = ROOT, limit: float = LIMIT) -> int:
    """Refresh notebooks, one after the other; how many were left as they were."""
    failed = 0
    cells = sum(len(runnable(read_notebook(path))) for path in paths)
    with tqdm(total=cells, unit="cell", disable=None) as bar:
        for path in paths:
            name = path.relative_to(root / "notebooks")
            bar.set_postfix_str(str(name))
            try:
                refresh(path, root, bar, limit)
                tqdm.write(f"{name}: refreshed")
            except LessonError as error:
                failed += 1
                tqdm.write(f"{name}: left as it was, {error}")
    return failed


def chosen(lessons: str, root: Path = ROOT) -> list[Path]:
    """The lessons of a text like "01 02", each with its solutions; all notebooks if it is empty."""
    found = choose_lessons(lessons, root)
    both = [path for one in found for path in (one, one.with_name("solutions") / one.name)]
    page = [] if lessons else [root / "notebooks" / "measure_your_card.ipynb"]
    return [path for path in [*both, *page] if path.exists()]


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="Make anew what the repository stores.")
    parser.add_argument("--lessons", default="", help='numbers such as "01 02"; all without it')
    parser.add_argument("--limit", type=float, default=LIMIT, help="minutes a cell, default 30")
    options = parser.parse_args(arguments)
    try:
        paths = chosen(options.lessons, root)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    command = [sys.executable, *EVIDENCE, *(JUDGED if options.lessons else ())]
    if status := subprocess.run(command, cwd=root).returncode:
        print("the evidence failed, and nothing after it was done", file=sys.stderr)
        return status
    if refresh_all(paths, root, options.limit):
        return 1
    for path in (*look_up.write(), *table.write(), *address.rewrite(root)):
        print(f"updated {path.relative_to(root)}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("Stopped.")
