"""The table of `tools/README.md`: which file a `make` target runs, and what that one writes.

It is made of the Makefile and of the files' docstrings: their first lines, and the files named
after "Writes:". `make outputs` writes it, and a test holds the page to it.
"""

import ast
import re
from pathlib import Path
from typing import NamedTuple

from tools import ROOT

PAGE = ROOT / "tools" / "README.md"
BEGIN, END = "<!-- made by make outputs -->\n", "<!-- to here -->\n"


class Target(NamedTuple):
    """A line of the table. `file` is relative to the repository; `writes` are words."""

    name: str
    file: str
    does: str
    writes: str


# Targets that call another program, so that there is nothing of ours to look at.
WITHOUT_A_FILE = {
    "install": Target("install", "pyproject.toml", "Install the course into .venv.", ".venv/"),
    "test": Target("test", "tests", "Run every test and every notebook: pytest.", "nothing"),
    "test-browser": Target(
        "test-browser",
        "tests/browser",
        "Use lessons in a real JupyterLab, in Chromium: pytest.",
        "build/browser/",
    ),  # fmt: skip
    "format": Target("format", "pyproject.toml", "Put the code in order: ruff.", "Python files"),
}


def targets(makefile: str) -> list[str]:
    """The targets of a Makefile that somebody calls by name."""
    lines = makefile.replace("\\\n", " ")
    phony = re.search(r"^\.PHONY: (.*)$", lines, re.MULTILINE)
    return phony[1].split() if phony else []


def described(name: str, file: Path, root: Path) -> Target:
    """A target as the docstring of its file tells it.

    Raises:
        LookupError: the docstring has no line that begins with "Writes:".
    """
    told = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    writes = re.search(r"^Writes: (.*)\Z", told, re.DOTALL | re.MULTILINE)
    place = file.relative_to(root).as_posix()
    if writes is None:
        raise LookupError(f"the docstring of {place} does not end with what it writes: Writes: ...")
    return Target(name, place, told.partition("\n")[0], " ".join(writes[1].split()))


def rows(root: Path = ROOT) -> list[Target]:
    """Every target of the Makefile.

    Raises:
        LookupError: a target has no file, a file no target, or a docstring does not say enough.
    """
    named = targets((root / "Makefile").read_text(encoding="utf-8"))
    found, used = [], set()
    for name in named:
        file = next(iter(candidates(name, root)), None)
        if file is not None:
            found.append(described(name, file, root))
            used.add(file)
        elif name in WITHOUT_A_FILE and (root / WITHOUT_A_FILE[name].file).exists():
            found.append(WITHOUT_A_FILE[name])
        else:
            raise LookupError(f"make {name} has no file: tools/{name.replace('-', '_')}.py")
    left = sorted({*(root / "tools").glob("[!_]*.py")} - used)
    if left:
        raise LookupError(f"{left[0].relative_to(root)} has no target of its name in the Makefile")
    return found


def candidates(name: str, root: Path) -> list[Path]:
    """The files that a target may run: a tool of its name, or the command of such a package."""
    module = name.replace("-", "_")
    both = (root / "tools" / f"{module}.py", root / module / "__main__.py")
    return [path for path in both if path.is_file()]


def text(root: Path = ROOT) -> str:
    """The table, in Markdown."""
    lines = ["| make | runs | to | writes |", "|---|---|---|---|"]
    for row in rows(root):
        link = f"[{row.file}](../{row.file})"
        lines.append(f"| `{row.name}` | {link} | {row.does} | {row.writes} |")
    return "\n".join(lines) + "\n"


def page(old: str, root: Path = ROOT) -> str:
    """The page with today's table."""
    before, rest = old.split(BEGIN)
    return before + BEGIN + text(root) + END + rest.split(END)[1]


def write() -> list[Path]:
    """Bring the page up to date; the file, if it changed."""
    old = PAGE.read_text(encoding="utf-8")
    if (new := page(old)) == old:
        return []
    PAGE.write_text(new, encoding="utf-8")
    return [PAGE]
