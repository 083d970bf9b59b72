"""The repository's address stands in pyproject.toml; badges and the Colab cell follow from it.

`make outputs` writes them into every notebook and into README.md.
"""

import copy
import re
import tomllib
from pathlib import Path

import nbformat

from tools import ROOT

COLAB = "https://colab.research.google.com"
COLAB_COMMENT = "# Colab only: "  # the cell is recognised by how its first line starts
COLAB_CELL = """\
# Colab only: fetch the course and install what it needs. Elsewhere this cell does nothing.
import os
import sys

if "google.colab" in sys.modules:
    %cd -q /content
    if not os.path.isdir("{name}"):
        !git clone -q --depth 1 {address}
    %pip install -q ./{name}
    %cd -q {name}/notebooks"""
BADGE = re.compile(r"\[!\[[^\]]*\]\([^)]*colab-badge\.svg\)\]\([^)]*?(?P<file>notebooks/[^)]+)?\)")


def repository(root: Path = ROOT) -> str:
    """The address in [project.urls] of pyproject.toml, without a slash at its end."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address = project.get("urls", {}).get("Repository")
    if not address:
        raise LookupError("pyproject.toml names no Repository below [project.urls].")
    return address.rstrip("/").removesuffix(".git")


def badge_for(file: str, root: Path = ROOT) -> str:
    """The badge that opens `file` (a path in the repository) on Colab."""
    github = repository(root).removeprefix("https://github.com/")
    image = f"![Open in Colab]({COLAB}/assets/colab-badge.svg)"
    return f"[{image}]({COLAB}/github/{github}/blob/main/{file})"


def badge(stem: str, solutions: bool = False, root: Path = ROOT) -> str:
    """The badge of one lesson, or of its solutions."""
    return badge_for(f"notebooks/{'solutions/' if solutions else ''}{stem}.ipynb", root)


def colab_cell(root: Path = ROOT) -> str:
    """The first code cell of every notebook."""
    address = repository(root)
    return COLAB_CELL.format(address=address, name=address.rsplit("/", 1)[-1])


def rewrite_notebook(notebook: nbformat.NotebookNode, path: Path, root: Path = ROOT) -> None:
    """Put this notebook's badge below its title and the Colab cell first among its code cells."""
    if not notebook.cells:
        return
    first = notebook.cells[0]
    wanted = badge(path.stem, path.parent.name == "solutions", root)
    if BADGE.search(first.source):
        first.source = BADGE.sub(lambda _: wanted, first.source)
    else:
        title, _, rest = first.source.partition("\n")
        first.source = f"{title}\n\n{wanted}\n{rest}".rstrip()

    code = [index for index, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    ours = [index for index in code if notebook.cells[index].source.startswith(COLAB_COMMENT)]
    if ours:
        notebook.cells[ours[0]].source = colab_cell(root)
    else:
        position = code[0] if code else len(notebook.cells)
        notebook.cells.insert(
            position, nbformat.v4.new_code_cell(colab_cell(root), id="colab-setup")
        )


def rewrite_readme(text: str, root: Path = ROOT) -> str:
    """README.md with today's address in its badges and its `git clone` line."""
    text = BADGE.sub(
        lambda found: badge_for(found["file"], root) if found["file"] else found[0], text
    )
    return re.sub(r"(git clone )https?://[^\s`]+", lambda found: found[1] + repository(root), text)


def rewrite(root: Path = ROOT) -> list[Path]:
    """Bring all files up to date; returns those that changed."""
    changed = []
    for path in sorted((root / "notebooks").glob("**/*.ipynb")):
        if ".ipynb_checkpoints" in path.parts:
            continue
        notebook = nbformat.read(path, as_version=4)
        before = copy.deepcopy(notebook)
        rewrite_notebook(notebook, path, root)
        if notebook != before:
            nbformat.write(notebook, path)
            changed.append(path)
    readme = root / "README.md"
    if readme.exists():
        text = readme.read_text(encoding="utf-8")
        if (new := rewrite_readme(text, root)) != text:
            readme.write_text(new, encoding="utf-8")
            changed.append(readme)
    return changed
