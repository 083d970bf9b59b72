"""The course as it is committed: what somebody ran, wrote or saved since then is not in it.

JupyterLab saves by itself. Whoever tried the lessons has outputs, opened folds and answers of his
own in the working folder; a copy for a class and the reading site are made without them.
"""

import subprocess
from pathlib import Path


def git(root: Path, *arguments: str) -> bytes:
    """What a git command prints; ValueError where `root` is no checkout with a commit."""
    command = ["git", "-C", str(root), *arguments]
    try:
        return subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(
            "this takes what is committed, and here is no git checkout: clone the course"
        ) from error


def files(root: Path) -> list[Path]:
    """The files of the last commit, relative to the root."""
    names = git(root, "ls-tree", "-r", "-z", "--name-only", "--full-tree", "HEAD").decode()
    return [Path(name) for name in names.split("\0") if name]


def content(root: Path, path: Path) -> bytes:
    """A file of the last commit; `path` is relative to the root."""
    return git(root, "show", f"HEAD:{path.as_posix()}")


def text(root: Path, path: Path) -> str:
    """The same as text."""
    return content(root, path).decode("utf-8")


def changed(root: Path, under: str) -> list[str]:
    """The files below a folder that differ from the last commit, new ones included."""
    lines = git(root, "status", "--porcelain", "-z", "--no-renames", "--", under).decode()
    return sorted(Path(line[3:]).name for line in lines.split("\0") if line)
