"""Run notebooks and store their outputs in the form the repository keeps.

    python tools/refresh_outputs.py [--lessons "01 02"]

Lessons and their solutions, in place, one write per notebook and only after all of its cells ran.
"""

import argparse
import os
import sys
from pathlib import Path

import nbformat
from tqdm import tqdm

from address import rewrite_notebook
from execution import LIMIT, ROOT, LessonError, choose_lessons, execute, read_notebook, runnable

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
    rewrite_notebook(notebook, path, root)
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


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="Run notebooks and store their outputs.")
    parser.add_argument("--lessons", default="", help='numbers such as "01 02"; all without it')
    parser.add_argument("--limit", type=float, default=LIMIT, help="minutes a cell, default 30")
    options = parser.parse_args(arguments)
    try:
        lessons = choose_lessons(options.lessons, root)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    both = [(path, path.with_name("solutions") / path.name) for path in lessons]
    page = [] if options.lessons else [root / "notebooks" / "measure_your_card.ipynb"]
    paths = [path for path in [*(p for pair in both for p in pair), *page] if path.exists()]
    failed = 0
    cells = sum(len(runnable(read_notebook(path))) for path in paths)
    with tqdm(total=cells, unit="cell", disable=None) as bar:
        for path in paths:
            name = path.relative_to(root / "notebooks")
            bar.set_postfix_str(str(name))
            try:
                refresh(path, root, bar, options.limit)
                tqdm.write(f"{name}: refreshed")
            except LessonError as error:
                failed += 1
                tqdm.write(f"{name}: left as it was, {error}")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("Stopped.")
