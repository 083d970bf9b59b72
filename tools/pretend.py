"""Run the lessons as on a card that is not there (see shared/pretended).

    python -m tools.pretend                              lessons, solutions, the kit, on both cards
    python -m tools.pretend --card T4 --lessons "02 05"  a part ("kit" is tools/gpu.py)

Every code cell must run, and every checked one must print what is stored, but for the cells listed
in `pretend.toml` with the reason. A listed cell that does run, or does print what is stored, is an
error too: the list is to stay honest. The same file lists the sizes that were chosen for a card and
are made smaller here, since a CPU computes them.

Writes: nothing
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
import tomllib
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from tools.shared.environment import with_variables

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tools" / "pretend.toml"
KIT = ROOT / "tools" / "gpu.py"
CARDS = ("T4", "H100")
MARK = "NBVAL_CHECK_OUTPUT"


def notebooks(lessons: str = "") -> list[Path]:
    """The notebooks named in a text like "02 05", and the kit; all of them if it is empty."""
    wanted = lessons.split()
    found = sorted(ROOT.glob("notebooks/[0-9][0-9]_*.ipynb"))
    found += sorted(ROOT.glob("notebooks/solutions/[0-9][0-9]_*.ipynb"))
    found = [path for path in found if not wanted or path.name[:2] in wanted]
    return found + ([KIT] if not wanted or "kit" in wanted else [])


def title(path: Path) -> str:
    return ("solutions/" if path.parent.name == "solutions" else "") + path.stem


def listed(path: Path, card: str, table: Path = TABLE) -> dict[str, dict]:
    """The cells of a notebook that this card's run may fail in, or answer otherwise, by id."""
    rows = tomllib.loads(table.read_text()).get("cell", [])
    rows = [row for row in rows if row["notebook"] == title(path)]
    rows = [row for row in rows if "needs" not in row or find_spec(row["needs"])]
    return {row["id"]: row for row in rows if card in row.get("cards", CARDS)}


def smaller(cells: list[dict], notebook: str, table: Path = TABLE) -> list[dict]:
    """The cells with the sizes of a card replaced as the table says; ValueError if one is gone."""
    rows = tomllib.loads(table.read_text()).get("smaller", [])
    changed = {cell["id"]: cell | {"source": "".join(cell["source"])} for cell in cells}
    for row in rows:
        if row["notebook"] == notebook:
            cell = changed.get(row["id"], {"source": ""})
            if row["find"] not in cell["source"]:
                raise ValueError(f"{table.name}: {row['find']!r} is not in the cell {row['id']}")
            cell["source"] = cell["source"].replace(row["find"], row["put"])
    return list(changed.values())


# ------------------------------------------------------------------------------ one notebook, here
def text_of(output: dict) -> str:
    """What nbval compares of a stored output: not pictures, HTML or stderr."""
    if output.get("output_type") == "stream":
        return "".join(output["text"]) if output["name"] == "stdout" else ""
    return "".join(output.get("data", {}).get("text/plain", "")) + "\n"


def plain(text: str) -> list[str]:
    text = re.sub(r"0x[0-9a-fA-F]+", "0xADDRESS", text)
    text = re.sub(r"<Figure size \d+x\d+ with", "<Figure size WxH with", text)
    return [line.rstrip() for line in text.strip().splitlines()]


def run_cells(cells: list[dict]) -> list[dict]:
    """Run code cells one after another in this process; what became of each."""
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    shell = InteractiveShell.instance()
    shell.enable_gui = lambda *_: None
    done = []
    for cell in cells:
        source, found = "".join(cell["source"]), {"id": cell["id"]}
        began = time.perf_counter()
        with capture_output() as said:
            result = shell.run_cell(source, store_history=False)
        found["seconds"] = round(time.perf_counter() - began, 1)
        error = result.error_before_exec or result.error_in_exec
        if error is not None:
            frames = traceback.extract_tb(error.__traceback__)[-4:]
            found["error"] = f"{type(error).__name__}: {str(error)[:400]}"
            found["where"] = [f"{Path(f.filename).name}:{f.lineno} {f.line}" for f in frames]
        elif MARK in source:
            here = said.stdout + "".join(
                str(output.data.get("text/plain", "")) + "\n" for output in said.outputs
            )
            stored = plain("".join(map(text_of, cell["outputs"])))
            if plain(here) != stored:
                found["differs"] = changed_lines(stored, plain(here))
        done.append(found)
    return done


def changed_lines(stored: list[str], here: list[str]) -> list[str]:
    lines = []
    for at in range(max(len(stored), len(here))):
        old = stored[at] if at < len(stored) else ""
        new = here[at] if at < len(here) else ""
        if old != new:
            lines += [f"stored: {old}", f"here:   {new}"]
    return lines


def run_notebook(path: Path, card: str, free: float) -> list[dict]:
    """Run a notebook in this process, which is fit for nothing else afterwards."""
    import matplotlib

    matplotlib.use("agg")
    import torch

    import helpers  # noqa: F401
    from tools.shared.pretended import pretended

    torch.set_num_threads(1)
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    cells = [cell for cell in cells if cell["cell_type"] == "code" and cell["id"] != "colab-setup"]
    cells = smaller(cells, title(path))
    os.chdir(path.parent)
    with pretended(card, free):
        return run_cells(cells)


def run_kit(card: str, free: float) -> list[dict]:
    """Every job of the kit with the tiny models, a few steps each; a result for each row."""
    import csv
    import tempfile
    from contextlib import redirect_stdout
    from dataclasses import replace

    import torch

    from tools import gpu
    from tools.shared.pretended import pretended

    torch.set_num_threads(1)
    tiny = {"model": "tiny", "length": None, "steps": 3}
    for name, jobs in gpu.SECTIONS.items():
        gpu.SECTIONS[name] = lambda jobs=jobs: (replace(job, **tiny) for job in jobs())
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        with pretended(card, free):
            gpu.main([*gpu.SECTIONS, "--output", folder])
        rows = []
        for path in Path(folder).glob("*.csv"):
            with path.open(newline="") as file:
                rows += list(csv.DictReader(file))
    done = []
    for row in rows:
        bad = {"error": row["outcome"], "where": []} if row["outcome"] != "measured" else {}
        done.append({"id": f"{row['section']}: {row['run']}"} | bad)
    return done


# ------------------------------------------------------------------------------ all, and the judge
def judge(results: list[dict], known: dict[str, dict]) -> list[str]:
    """The sentences of what is wrong: cells that fail, and listed cells that do not."""
    wrong = []
    for result in results:
        kind = "fails" if "error" in result else "differs" if "differs" in result else None
        row = known.get(result["id"])
        if row is None and kind == "fails":
            wrong += [f"{result['id']}: {result['error']}", *("  " + w for w in result["where"])]
        elif row is None and kind == "differs":
            wrong += [f"{result['id']}: other output", *("  " + w for w in result["differs"])]
        elif row is not None and row["kind"] != kind:
            wrong.append(
                f"{result['id']} is listed in {TABLE.name} ({row['kind']}), but it does not"
            )
    there = {result["id"] for result in results}
    wrong += [f"{TABLE.name} lists a cell that does not exist: {id}" for id in known.keys() - there]
    return wrong


def start(path: Path, card: str, free: float) -> tuple[list[str], float]:
    """Run a notebook in a process of its own and judge it: (what is wrong, seconds)."""
    command = [sys.executable, "-m", "tools.pretend", "--one", str(path)]
    command += ["--card", card, "--free", str(free)]
    began = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=with_variables(), capture_output=True, text=True)
    seconds = time.perf_counter() - began
    try:
        results = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return [f"the process ended: {done.stderr.strip()[-800:]}"], seconds
    return judge(results, listed(path, card)), seconds


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--card", default="", help="T4, H100, or any in data/gpus.csv; both if empty"
    )
    parser.add_argument(
        "--lessons", default="", help='numbers such as "02 05"; all of them if empty'
    )
    parser.add_argument("--free", type=float, default=6.0, help="GiB free on the card")
    parser.add_argument("--jobs", type=int, default=2, help="notebooks at a time")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        run = run_kit if options.one == KIT else partial(run_notebook, options.one.resolve())
        results = run(options.card, options.free)
        print("\n" + json.dumps(results), flush=True)
        os._exit(0)  # no clean-up of a card that is not there
    failed = 0
    for card in options.card.split() or CARDS:
        began = time.perf_counter()
        paths = notebooks(options.lessons)
        with ThreadPoolExecutor(options.jobs) as pool:
            runs = pool.map(lambda path, card=card: start(path, card, options.free), paths)
            for path, (wrong, seconds) in zip(paths, runs, strict=True):
                failed += bool(wrong)
                print(f"{card} {title(path)}: {'FAILED' if wrong else 'ok'} ({seconds:.0f} s)")
                print("".join(f"    {line}\n" for line in wrong), end="", flush=True)
        print(f"{card}: {len(paths)} notebooks in {time.perf_counter() - began:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
