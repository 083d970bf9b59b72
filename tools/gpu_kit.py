"""Measure the course on this machine's GPU, beside its predictions, and record every row.

    python tools/gpu_kit.py                      all sections
    python tools/gpu_kit.py classic matrix       some sections; minutes on a large card
    python tools/gpu_kit.py --wheels FOLDER      first install wheels from a folder, without network
    python tools/gpu_kit.py --device cpu         prove the kit itself on a CPU, at tiny sizes

Rows go to data/measurements/<card>.csv, one by one and always appended, so a crash loses at most
the row under way and a second start goes on where the first one stopped (--again measures anew). A
row in which the process itself died is recorded as such by the next start, and not tried again.
On a CPU they go to build/measurements/cpu.csv: nothing is recorded as a GPU's that was not.
"""

import argparse
import csv
import datetime
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from environment import set_variables, with_variables

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = (
    "section run card driver cuda torch transformers date outcome workload settings seconds "
    "samples_per_second tokens_per_second peak_allocated peak_reserved used context "
    "predicted_allocated predicted_reserved predicted_samples_per_second "
    "error_allocated error_reserved error_samples_per_second last_loss"
).split()
# What each package is for; without the first group there is no kit at all.
NEEDED = (
    "torch transformers accelerate datasets pandas filelock psutil pynvml matplotlib IPython "
    "tokenizers safetensors"
).split()
OPTIONAL = {"bitsandbytes": "8-bit optimizers", "peft": "LoRA", "nbval": "the section lessons"}


@dataclass
class Job:
    """A run to predict and to measure. `needs` names packages or keywords it cannot do without."""

    run: str
    model: str
    settings: dict
    task: str = "text_classification"
    length: int | None = None
    optimizer: Callable | None = None
    changes: tuple[Callable, ...] = ()
    needs: tuple[str, ...] = ()
    steps: int = 7


def missing(names) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name) is None]


# ---------------------------------------------------------------------------------------- the jobs
def eager(model):
    model.set_attn_implementation("eager")
    return model


def lora(model):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))


def classic() -> Iterator[Job]:
    """The nine runs of 2022, with that year's attention and optimizers and with today's."""
    import behaviours_2022 as old

    for run, (optimizer, settings) in old.CLASSIC.items():
        needs = ("bitsandbytes",) if optimizer == "8-bit Adam" else ()
        options = {"model": "large", "needs": needs, "steps": 22}
        today = settings | {"optim": old.TODAY[optimizer]}
        yield Job(f"{run}, today", settings=today, **options)
        factory = old.OPTIMIZERS[optimizer]
        yield Job(f"{run}, 2022", settings=settings, optimizer=factory, changes=(eager,), **options)


def matrix() -> Iterator[Job]:
    """Prediction against measurement over models, sizes, precisions, optimizers and adapters."""
    bert, llama, text = "bert-large-uncased", "tinyllama-1.1b", "language_modelling"
    for batch in (1, 4, 16):
        for precision in ({}, {"bf16": True}, {"fp16": True}):
            settings = {"per_device_train_batch_size": batch} | precision
            name = f"batch {batch} {next(iter(precision), 'fp32')}"
            yield Job(f"{bert} {name}", bert, settings, length=512)
            yield Job(f"gpt2 {name}", "gpt2", settings, text, 1024)
    four = {"per_device_train_batch_size": 4}
    for optim in ("adamw_torch", "adafactor", "sgd", "rmsprop", "adamw_bnb_8bit", "lion_8bit"):
        needs = ("bitsandbytes",) if "8bit" in optim else ()
        yield Job(f"{bert} {optim}", bert, four | {"optim": optim}, length=512, needs=needs)
    yield Job(f"{bert} eager", bert, four, length=512, changes=(eager,))
    yield Job(f"{bert} eager bf16", bert, four | {"bf16": True}, length=512, changes=(eager,))
    yield Job(f"{bert} length 128", bert, four, length=128)
    yield Job("roberta-large length 256", "roberta-large", four, length=256)
    yield Job("modernbert-base bf16", "modernbert-base", four | {"bf16": True}, length=1024)
    checkpointed = {"activation_checkpointing": True}
    accumulated = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    for name, model, task in (("bert", bert, "text_classification"), ("gpt2", "gpt2", text)):
        for precision in ({}, {"bf16": True}):
            kind = next(iter(precision), "fp32")
            yield Job(f"{name} accumulated {kind}", model, accumulated | precision, task, 512)
            both = accumulated | checkpointed | precision
            yield Job(f"{name} checkpointed {kind}", model, both, task, 512, needs=(*checkpointed,))
    for model in ("qwen3-0.6b", llama, "llama-3.2-1b", "smollm2-1.7b"):
        for precision in ({}, {"bf16": True}):
            settings = {"per_device_train_batch_size": 2} | precision
            yield Job(f"{model} {next(iter(precision), 'fp32')}", model, settings, text, 1024)
        saved = {"per_device_train_batch_size": 4, "bf16": True} | checkpointed
        yield Job(f"{model} checkpointed", model, saved, text, 2048, needs=(*checkpointed,))
        adapter = {"changes": (lora,), "needs": ("peft",)}
        settings = {"per_device_train_batch_size": 4, "bf16": True}
        yield Job(f"{model} LoRA", model, settings, text, 1024, **adapter)


def waterfalls() -> Iterator[Job]:
    """The two models of lesson 16, one technique after another."""
    if missing(["bitsandbytes", "peft"]):
        print("waterfalls: skipped, bitsandbytes or peft is missing here", flush=True)
        return
    import waterfalls as both

    models = {
        "bert-large-uncased": ("text_classification", 512, both.CLASSIC),
        "llama-3.2-3b": ("language_modelling", 4096, both.DECODER),
    }
    for model, (task, length, steps) in models.items():
        for step in steps:
            job = Job(f"{model} {step.name}", model, step.settings, task, length, step.optimizer)
            job.changes, job.needs = step.changes, ("bitsandbytes", "peft")
            yield job


SECTIONS: dict[str, Callable[[], Iterator[Job]]] = {
    "classic": classic,
    "matrix": matrix,
    "waterfalls": waterfalls,
}
COMMANDS = {
    # One notebook at a time, because they share the card; a cell may train the large model.
    "lessons": [
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0"),
        *("--nbval-cell-timeout=1800", "notebooks"),
    ],
    "overhead": ["tests/benchmarks/trainer_overhead.py"],
}


# --------------------------------------------------------------------------------------- recording
class Record:
    """A file of rows that is only ever appended to."""

    def __init__(self, path: Path, facts: dict[str, str]):
        self.path, self.facts = path, facts
        path.parent.mkdir(parents=True, exist_ok=True)
        self.done = set()
        if path.exists():
            with path.open(encoding="utf-8", newline="") as file:
                rows = list(csv.DictReader(file))
            if rows and list(rows[0]) != COLUMNS:
                raise SystemExit(
                    f"{path} has other columns than this kit writes: move it away first"
                )
            self.done = {self.key(row) for row in rows if not row["outcome"].startswith("skipped")}
        self.under_way = path.with_suffix(".running")
        if self.under_way.exists():
            section, run = self.under_way.read_text(encoding="utf-8").splitlines()
            why = "the process died, most often because the machine's memory was full"
            self.add(section, run, outcome=f"failed: {why}")
            self.done.add(self.key(facts | {"section": section, "run": run}))
            print(f"{section}: {run}: {why}; --again tries it once more", flush=True)

    def start(self, section: str, run: str) -> None:
        """Remember the row under way, should nothing come after it."""
        self.under_way.write_text(f"{section}\n{run}\n", encoding="utf-8")

    def key(self, row: dict) -> tuple:
        return tuple(row[name] for name in ("section", "run", "torch", "transformers"))

    def add(self, section: str, run: str, **values) -> None:
        row = dict.fromkeys(COLUMNS, "") | self.facts | {"section": section, "run": run} | values
        row["date"] = datetime.datetime.now().isoformat(timespec="seconds")
        with self.path.open("a", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow({name: "" if v is None else v for name, v in row.items()})
        self.under_way.unlink(missing_ok=True)


def machine(device: str) -> dict[str, str]:
    """What every row says of the machine it was measured on."""
    import torch
    import transformers

    facts = {"torch": torch.__version__, "transformers": transformers.__version__, "card": "cpu"}
    if device == "cuda":
        import pynvml

        facts["card"] = torch.cuda.get_device_name()
        facts["cuda"] = torch.version.cuda or ""
        with suppress(pynvml.NVMLError):  # some containers do not tell
            pynvml.nvmlInit()
            facts["driver"] = str(pynvml.nvmlSystemGetDriverVersion())
    return facts


def lacking(job: Job) -> list[str]:
    """The packages and keywords of TrainingArguments that this machine has not got for a job."""
    from transformers import TrainingArguments

    keywords = TrainingArguments.__dataclass_fields__
    packages = [name for name in job.needs if name in OPTIONAL]
    return missing(packages) + [k for k in job.settings if k not in keywords]


def measure(job: Job, on_cpu: bool) -> dict:
    """Predict and run one job; out of memory is an outcome like any other."""
    import psutil
    import torch

    import helpers

    size, length = ("tiny", None) if on_cpu else (job.model, job.length)
    workload = getattr(helpers, job.task)(size, **({"length": length} if length else {}))
    need, room = 4 * workload.parameters(), psutil.virtual_memory().available
    if need > 0.9 * room:
        why = f"is built in float32 in the machine's memory: {helpers.gib(need)}, of which"
        return {"outcome": f"skipped: {workload.name} {why} {helpers.gib(room)} are free"}
    for change in job.changes:
        workload = workload.with_model(change)
    settings = dict(job.settings)
    if on_cpu and settings.pop("fp16", False):
        settings["bf16"] = True
    values = {"workload": workload.title, "settings": helpers.runs.settings_text(settings)}
    try:
        predicted = helpers.predict(workload, optimizer=job.optimizer, **settings)
    except (ValueError, NotImplementedError) as error:
        return values | {"outcome": f"skipped: {error}"}
    values |= {"predicted_allocated": predicted.peak_allocated, "context": predicted.context}
    values["predicted_reserved"] = predicted.peak_reserved
    values["predicted_samples_per_second"] = predicted.samples_per_second
    steps = 3 if on_cpu else job.steps
    try:
        run = helpers.train(workload, optimizer=job.optimizer, max_steps=steps, **settings)
    except torch.OutOfMemoryError:
        return values | {"outcome": "out of memory"}
    for key in ("seconds", "samples_per_second", "tokens_per_second", "peak_allocated"):
        values[key] = getattr(run, key)
    values |= {"peak_reserved": run.peak_reserved, "used": run.used, "last_loss": run.losses[-1]}
    measured = {"allocated": "peak_allocated", "reserved": "peak_reserved"}
    for kind, key in (measured | {"samples_per_second": "samples_per_second"}).items():
        mine, real = values[f"predicted_{kind}"], values[key]
        values[f"error_{kind}"] = mine / real - 1 if mine and real else None
    return values | {"outcome": "measured"}


def run_jobs(section: str, record: Record, on_cpu: bool, options: argparse.Namespace) -> None:
    new = 0
    for job in list(SECTIONS[section]())[: options.limit]:
        if new == options.more:
            print(f"{section}: {new} new rows; the next start goes on", flush=True)
            break
        if (
            not options.again
            and record.key(record.facts | {"section": section, "run": job.run}) in record.done
        ):
            print(f"{section}: {job.run}: recorded already", flush=True)
            continue
        new += 1
        if absent := lacking(job):
            values = {"outcome": f"skipped: {', '.join(absent)} is missing or too old here"}
        else:
            record.start(section, job.run)
            try:
                values = measure(job, on_cpu)
            except KeyboardInterrupt:  # by hand: that is no finding
                record.under_way.unlink(missing_ok=True)
                why = f"{section}: {job.run}: stopped; the next start measures it"
                raise SystemExit(why) from None
            except Exception as error:  # one bad row must not cost the others
                values = {"outcome": f"failed: {type(error).__name__}: {str(error)[:200]}"}
        record.add(section, job.run, **values)
        error = values.get("error_allocated")
        shown = values["outcome"] if error is None else f"allocated predicted {100 * error:+.2f} %"
        print(f"{section}: {job.run}: {shown}", flush=True)
        if shown.startswith("failed") and not on_cpu and not answers():
            raise SystemExit("The card no longer answers this process: start again to go on.")
    else:
        if options.limit is None:
            print(f"{section}: complete", flush=True)


def answers() -> bool:
    """Whether the card still works: some errors of CUDA spoil all that a process does later."""
    import torch

    try:
        torch.cuda.synchronize()
        return bool(torch.ones(1, device="cuda").item())
    except RuntimeError:
        return False


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    every = [*SECTIONS, *COMMANDS]
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(every))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to install first")
    parser.add_argument("--again", action="store_true", help="measure what is recorded once more")
    parser.add_argument("--limit", type=int, help="only the first rows of each section")
    parser.add_argument("--more", type=int, help="only so many new rows of each section")
    parser.add_argument("--output", type=Path, help="folder for the rows")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.sections if name not in every]
    if unknown:
        print(f"error: no section {unknown[0]!r}: choose from {', '.join(every)}", file=sys.stderr)
        return 2
    if options.wheels is not None:
        return _with_wheels(options.wheels, arguments if arguments is not None else sys.argv[1:])
    if absent := missing(NEEDED):
        print(f"error: the kit needs {', '.join(absent)}: install it, or --wheels", file=sys.stderr)
        return 2
    for name in missing(OPTIONAL):
        print(f"{name} is not installed: without {OPTIONAL[name]}")
    set_variables()
    sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
    importlib.import_module("helpers")  # first: it quietens what transformers imports
    import torch

    on_cpu = options.device == "cpu"
    if not on_cpu and not torch.cuda.is_available():
        print("error: no CUDA card here; --device cpu proves the kit itself", file=sys.stderr)
        return 2
    if on_cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    facts = machine(options.device)
    slug = re.sub(r"[^a-z0-9]+", "-", facts["card"].lower().removeprefix("nvidia ")).strip("-")
    folder = options.output or ROOT / ("build" if on_cpu else "data") / "measurements"
    record = Record(folder / f"{slug}.csv", facts)
    failed = []
    for section in options.sections or every:
        if section in SECTIONS:
            run_jobs(section, record, on_cpu, options)
            continue
        if section == "lessons" and missing(["nbval"]):
            print("lessons: skipped, nbval is not installed")
            continue
        command = [sys.executable, *COMMANDS[section]]
        if subprocess.run(command, cwd=ROOT, env=with_variables()).returncode:
            failed.append(section)
    print(f"Rows: {record.path.name} in {folder.name}")
    if record.path.exists():
        print(compared(record.path))
    if failed:
        print(f"Failed: {', '.join(failed)}")
    return 1 if failed else 0


def compared(path: Path) -> str:
    """How well the predictions met the rows of a table, by section and what was predicted."""
    import pandas as pd

    from helpers import report

    rows = pd.read_csv(path)
    errors = ["error_allocated", "error_reserved", "error_samples_per_second"]
    long = rows.melt(["section"], errors, "of", "error")
    long["error"] = pd.to_numeric(long["error"])
    long, text = long.dropna(), "No prediction was held against a measurement."
    if not long.empty:
        table = report.errors(long, ["section", "of"]).reset_index()
        text = f"Errors of the predictions, in %\n{table.to_string(index=False)}"
    rest = rows[(rows["error_allocated"].abs() > 0.03) | (rows["outcome"] != "measured")]
    if rest.empty:
        return text
    rest = rest[["run", "outcome", "error_allocated"]].to_string(index=False)
    return f"{text}\n\nOff by more than 3 %, or not measured\n{rest}"


def _with_wheels(wheels: Path, arguments: list[str]) -> int:
    """Install every wheel of a folder below build/ and start again with it on the path."""
    files = sorted(map(str, wheels.glob("*.whl")))
    if not files:
        print(f"error: no wheels in {wheels}", file=sys.stderr)
        return 2
    target = ROOT / "build" / "from_wheels"  # build/site is the reading site
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    if subprocess.run([*install, "--upgrade", "--target", str(target), *files]).returncode:
        print(f"error: pip cannot install the wheels in {wheels}, see above", file=sys.stderr)
        return 2
    at = next(i for i, a in enumerate(arguments) if a.startswith("--wheels"))
    rest = arguments[:at] + arguments[at + (1 if "=" in arguments[at] else 2) :]
    path = os.pathsep.join(filter(None, (str(target), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, str(Path(__file__).resolve()), *rest]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}).returncode


if __name__ == "__main__":
    sys.exit(main())
