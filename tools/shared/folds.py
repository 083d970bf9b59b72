"""A code cell that is folded in JupyterLab is folded on Colab too, under a title that says what it
shows; tools/site.py does the same for the site.

    python -m tools.shared.folds

JupyterLab reads `jupyter.source_hidden`; Colab reads `cellView` and shows what follows `# @title`.
Whoever folds a cell sets the first and begins the cell with a comment, and this adds the rest, for
every notebook; `make outputs` does it for those that it runs.
"""

import sys
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from tools import ROOT

TITLE = "# @title "
MARK = "# NBVAL_CHECK_OUTPUT"


def titled(source: str, name: str, exercise: str) -> str:
    """The source with its first comment as Colab's title; checks of exercises are given one."""
    lines = source.splitlines()
    place = next((i for i, line in enumerate(lines) if line != MARK), 0)
    first = lines[place] if lines else ""
    if name.startswith("check-") and not first.startswith("#"):
        lines.insert(place, f"{TITLE}Check of exercise {exercise}.{name.removeprefix('check-')}")
    elif first.startswith("# ") and not first.startswith(TITLE):
        lines[place] = TITLE + first.removeprefix("# ")
    return "\n".join(lines)


def complete(notebook: NotebookNode, path: Path) -> None:
    """Fold on Colab what JupyterLab folds, and nothing else."""
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        if cell.metadata.get("jupyter", {}).get("source_hidden"):
            cell.metadata["cellView"] = "form"
            lesson = str(int(path.stem[:2])) if path.stem[:2].isdigit() else ""
            cell.source = titled(cell.source, cell.get("id", ""), lesson)
        else:
            cell.metadata.pop("cellView", None)


def main(root: Path = ROOT) -> int:
    for path in sorted((root / "notebooks").glob("**/[!.]*.ipynb")):
        if ".ipynb_checkpoints" in path.parts:
            continue
        before = path.read_text(encoding="utf-8")
        notebook = nbformat.reads(before, as_version=4)
        complete(notebook, path)
        if (text := nbformat.writes(notebook) + "\n") != before:
            path.write_text(text, encoding="utf-8")
            print(f"updated {path.relative_to(root)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
