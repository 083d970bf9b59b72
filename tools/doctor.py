"""Tell what a bug report needs: this machine, the versions, and whether the course can work here.

    python -m tools.doctor    and paste what it prints

Exit status 1 if a check fails. Nothing is changed, and no name of a folder is printed.

Writes: nothing
"""

import importlib.metadata
import subprocess
import sys
import tempfile
from pathlib import Path

from planner.doctor import data, prediction, report, room
from tools import ROOT

NEEDED = "torch transformers accelerate datasets peft bitsandbytes torchao ipywidgets jupyterlab"


def commit() -> str:
    """Of the checkout, and whether files were changed."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "not a git checkout"


def tested() -> dict[str, str]:
    """The versions last tested together, by name."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def versions() -> list[str]:
    """One line a library: what is here, and what was tested where that is another."""
    lines, known = [], tested()
    for name in NEEDED.split():
        try:
            here = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{name} is missing: run make install")
            continue
        other = known.get(name, "").split("+")[0]
        lines.append(f"{name} {here}" + (f" (tested: {other})" * (here.split("+")[0] != other)))
    return lines


def importable() -> str:
    """Whether a notebook finds this course's helpers, and no others of that common name."""
    ask = "import importlib.util as u; s = u.find_spec('helpers'); print(s and s.origin)"
    options = dict(cwd=ROOT / "notebooks", capture_output=True, text=True)
    found = subprocess.run([sys.executable, "-c", ask], **options).stdout.strip()
    if found in ("", "None"):
        raise ValueError("a notebook does not find helpers: run make install")
    if Path(found).resolve().parent != ROOT / "helpers":
        raise ValueError(
            "a notebook finds another helpers than this course's: rename it if it is yours (beside "
            "the notebooks, or on PYTHONPATH); if the course was moved or copied, run make install"
        )
    return "a notebook finds this course's helpers"


def writable() -> str:
    """Whether runs, executed copies and the tiny model can be kept."""
    for name in ("build", "data/cache"):
        try:
            (ROOT / name).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=ROOT / name):
                pass
        except OSError as error:
            why = f"{name}/ cannot be written ({error.strerror})"
            raise ValueError(f"{why}: copy the course") from error
    return "build/ and data/cache/ can be written"


CHECKS = (importable, data, writable, room, prediction)


def main() -> int:
    text, good = report(f"course {commit()}", versions(), CHECKS)
    print(text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
