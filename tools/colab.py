"""Run lessons as Colab does: its versions, its first cell, a clone of this repository.

    make colab                     (it makes an environment of Colab's versions first)
    python -m tools.colab --lessons "00 02 05 12"

Each lesson starts in /content with `google.colab` imported, so that its first cell clones and
installs; the clone is of the last commit here. No cell may fail, checked cells must say what is
stored, and what Colab brought must be as before.

Writes: .venv-colab/
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tools import ROOT
from tools.shared.address import repository
from tools.shared.execution import LessonError, choose_lessons, execute, read_notebook

CONTENT = Path("/content")
MAY_CHANGE = {"torchao"}  # peft refuses the one that Colab brings
PRETEND = """
import importlib.machinery, importlib.util, sys
spec = importlib.machinery.ModuleSpec("google.colab", None)
sys.modules["google.colab"] = importlib.util.module_from_spec(spec)
"""


def versions() -> dict[str, str]:
    """The pinned packages of `colab_versions.txt`, and which version is installed now."""
    pins = (Path(__file__).parent / "colab_versions.txt").read_text()
    names = re.findall(r"^([\w-]+)==", pins, re.MULTILINE)
    show = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"
    found = subprocess.check_output([sys.executable, "-c", show, *names], text=True)
    return dict(zip(names, found.split(), strict=True))


def text(cell) -> str:
    """What a checked cell printed."""
    streams = (output for output in cell.outputs if output.get("name") == "stdout")
    return "".join(output.text for output in streams)


def problems(path: Path) -> list[str]:
    """Run one lesson from /content; a sentence for each thing that is not as stored."""
    notebook, stored = read_notebook(path), read_notebook(path)
    try:
        execute(notebook, CONTENT)
    except LessonError as error:
        return [f"{path.name}: {error}"]
    pairs = zip(notebook.cells, stored.cells, strict=True)
    return [
        f"{path.name}: cell {ran.id} printed\n{text(ran)}instead of\n{text(kept)}"
        for ran, kept in pairs
        if "# NBVAL_CHECK_OUTPUT" in ran.source.splitlines() and text(ran) != text(kept)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Run lessons as Colab does.")
    parser.add_argument("--lessons", default="00 02 05 12")
    lessons = choose_lessons(parser.parse_args().lessons)
    clone = CONTENT / repository().rsplit("/", 1)[-1]
    try:
        CONTENT.mkdir(exist_ok=True)
        clone.mkdir()  # not somebody's own
        clone.rmdir()
    except OSError as error:
        print(f"{clone} cannot be made: {error.strerror}. Colab's cell needs it.", file=sys.stderr)
        return 2
    before, found = versions(), []
    with tempfile.TemporaryDirectory() as folder:
        startup = Path(folder, "profile_default", "startup")
        startup.mkdir(parents=True)
        (startup / "colab.py").write_text(PRETEND)
        os.environ |= {"IPYTHONDIR": folder, "GIT_CONFIG_COUNT": "2"}
        os.environ |= {"GIT_CONFIG_KEY_0": f"url.{ROOT.as_uri()}.insteadOf"}
        os.environ |= {"GIT_CONFIG_VALUE_0": repository()}
        os.environ |= {"GIT_CONFIG_KEY_1": "safe.directory", "GIT_CONFIG_VALUE_1": "*"}
        try:
            for path in lessons:
                found += problems(path)
                print(f"{path.name}: run", flush=True)
            if not (clone / "data" / "gpus.csv").is_file():
                found.append("the first cell fetched no course: is google.colab emulated?")
        finally:
            shutil.rmtree(clone, ignore_errors=True)
    after = versions()
    moved = [name for name in before if before[name] != after[name]]
    for name in moved:
        change = f"{name} {before[name]} became {after[name]}"
        print(change)
        found += [] if name in MAY_CHANGE else [change]
    print("\n".join(found) or f"{len(lessons)} lessons ran as on Colab.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
