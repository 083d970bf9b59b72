"""Say how long each lesson takes: counted on this machine, computed for a T4.

    python -m tools.minutes [--lessons "01 02"]    runs lessons, then writes their minutes
    python -m tools.minutes --write                writes the minutes again, and runs nothing

On a T4 the classification runs that `text_classification("auto")` picks are BERT-large; all else
is what runs here. So each lesson is run on this machine, the samples that those models see are
counted, and the time for them is computed from a published run: see `t4_seconds`.

Writes: data/minutes.csv, README.md, notebooks/
"""

import argparse
import json
import math
import re
import sys
import time
from pathlib import Path

import nbformat
import pandas as pd
from nbformat.v4 import new_code_cell

from tools import ROOT
from tools.shared.execution import choose_lessons, execute, read_notebook

TABLE = ROOT / "data" / "minutes.csv"
WORDS = "zero one two three four five six seven eight nine ten eleven twelve".split()
SENTENCE = re.compile(r"About (\w+) minutes? on two CPU cores, (\w+) on a T4")
COUNT = """
def _count_minutes():
    from helpers import workloads
    from torch._subclasses.fake_tensor import FakeTensor

    counted, build = {"models": 0, "samples": 0}, workloads.Workload.model

    def count(module, args, kwargs):
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is not None and not isinstance(ids, FakeTensor):
            counted["samples"] += len(ids)

    def model(self, *args, **kwargs):
        made = build(self, *args, **kwargs)
        picked = self.note.startswith("picked for") and self.task == "text_classification"
        if picked and not isinstance(next(made.parameters()), FakeTensor):
            counted["models"] += 1
            made.register_forward_pre_hook(count, with_kwargs=True)
        return made

    workloads.Workload.model = model
    return counted

_minutes = _count_minutes()  # a name that no lesson uses
"""


def run(path: Path) -> dict:
    """Seconds of one lesson here, and the models and samples that would be BERT-large on a T4."""
    notebook = read_notebook(path)
    notebook.cells.insert(0, new_code_cell(COUNT))
    notebook.cells.append(new_code_cell("import json\nprint(json.dumps(_minutes))"))
    began = time.perf_counter()
    execute(notebook, path.parent)
    seconds = round(time.perf_counter() - began, 1)
    return {
        "lesson": path.stem,
        "seconds": seconds,
        **json.loads(notebook.cells[-1].outputs[0].text),
    }


def build_seconds() -> float:
    """How long this machine takes to build BERT-large."""
    from helpers import text_classification

    large = text_classification("large")
    began = time.perf_counter()
    large.model(pretrained=False)
    return round(time.perf_counter() - began, 1)


def t4_seconds(row) -> float:
    """Seconds of a lesson on a T4, for one `row` of `minutes.csv`.

    The published rate is that of the guides' plain run, BERT-large in fp32 on a V100, divided by
    how much slower a T4 is in the worse of two rates: memory bandwidth and fp32 products. The
    rest takes what it takes here, on two cores like Colab's.
    """
    from helpers import gpu, load

    t4, v100 = gpu("T4").facts, gpu("V100").facts
    slower = max(v100[rate] / t4[rate] for rate in ("bandwidth_gb_s", "fp32_tflops"))
    published = load("published").set_index(["set", "run"])["samples_per_second"]
    rate = published["guide-2022", "vanilla"] / slower
    return row.seconds + row.samples / rate + row.models * row.build_seconds


def minutes() -> dict[str, tuple[int, int]]:
    """Whole minutes, rounded up, of each lesson: on two cores, and on a T4."""
    rows = pd.read_csv(TABLE).itertuples()
    return {r.lesson: (math.ceil(r.seconds / 60), math.ceil(t4_seconds(r) / 60)) for r in rows}


def sentence(stem: str) -> str:
    """What stands below "You need" in a lesson."""
    cpu, t4 = minutes()[stem]
    return f"About {WORDS[cpu]} minute{'s' * (cpu > 1)} on two CPU cores, {WORDS[t4]} on a T4"


def columns(stem: str) -> str:
    """The two cells of the README's table."""
    cpu, t4 = minutes()[stem]
    return f" {cpu} min | {t4} min "


def write() -> None:
    """Put the minutes of the table into README and lessons."""
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    for stem in minutes():
        row = re.compile(rf"(\(notebooks/{stem}\.ipynb\) \|[^|\n]*\|)[^|\n]*\|[^|\n]*(?=\|)")
        text = row.sub(
            lambda found, stem=stem: found[1] + columns(stem).replace(" | ", " | "), text
        )
        path = ROOT / "notebooks" / f"{stem}.ipynb"
        notebook = read_notebook(path)
        for cell in notebook.cells[:3]:
            if cell.cell_type == "markdown":
                cell.source = SENTENCE.sub(sentence(stem), cell.source)
        nbformat.write(notebook, path)
    readme.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="How long each lesson takes.")
    parser.add_argument("--lessons", default="", help='numbers such as "01 02"; all without it')
    parser.add_argument("--write", action="store_true", help="and run nothing")
    options = parser.parse_args()
    lessons = [] if options.write else choose_lessons(options.lessons)
    building = build_seconds() if lessons else 0.0
    for path in lessons:
        row = run(path) | {"build_seconds": building}
        print(row, flush=True)
        known = pd.read_csv(TABLE) if TABLE.exists() else pd.DataFrame(columns=list(row))
        rows = pd.concat([known[known["lesson"] != path.stem], pd.DataFrame([row])])
        rows.sort_values("lesson").to_csv(TABLE, index=False)
    write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
