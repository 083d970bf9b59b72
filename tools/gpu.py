"""Measure the course on this machine's GPU, beside its predictions, and record every row.

    python -m tools.gpu                      all sections
    python -m tools.gpu classic matrix       some sections; minutes on a large card
    python -m tools.gpu --wheels FOLDER      first install wheels from a folder, without network
    python -m tools.gpu --device cpu         prove the kit itself on a CPU, at tiny sizes
    python -m tools.gpu --predict H100       without a card: write its predictions down first

Rows go to data/measurements/<card>.csv, one by one and always appended, so a crash loses at most
the row under way and a second start goes on where the first one stopped (--again measures anew). A
row in which the process itself died is recorded as such by the next start, and not tried again.
On a CPU they go to build/measurements/cpu.csv: nothing is recorded as a GPU's that was not.

Writes: data/measurements/CARD.csv, or build/measurements/cpu.csv, or data/announced_CARD.csv
"""

import argparse
import importlib
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tools import ROOT
from tools.shared.environment import set_variables, with_variables
from tools.shared.jobs import SECTIONS, Job, missing
from tools.shared.rows import Record, compared

# What each package is for; without the first group there is no kit at all.
NEEDED = (
    "torch transformers accelerate datasets pandas filelock psutil pynvml matplotlib IPython "
    "tokenizers safetensors"
).split()
OPTIONAL = {"bitsandbytes": "8-bit optimizers", "peft": "LoRA", "nbval": "the section lessons"}
# What a run that does not have the card for itself leaves empty.
SHARED = "seconds samples_per_second tokens_per_second used error_samples_per_second".split()
COMMANDS = {
    # One notebook at a time, because they share the card; a cell may train the large model.
    "lessons": [
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0"),
        *("--nbval-cell-timeout=1800", "notebooks"),
    ],
    "overhead": ["-m", "tools.benchmark"],
}


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


def measure(job: Job, on_cpu: bool, blind: dict | None = None) -> dict:
    """`tools.shared.measuring.measure`, which loads torch and what was perhaps just installed."""
    from tools.shared.measuring import measure as run

    return run(job, on_cpu, blind)


def outcome(section: str, job: Job, record: Record, on_cpu: bool, blind: dict | None) -> dict:
    """The values of one row, whatever becomes of the job; SystemExit where it is stopped."""
    if absent := lacking(job):
        return {"outcome": f"skipped: {', '.join(absent)} is missing or too old here"}
    record.start(section, job.run)
    try:
        return measure(job, on_cpu, blind)
    except KeyboardInterrupt:  # by hand: that is no finding
        record.under_way.unlink(missing_ok=True)
        raise SystemExit(f"{section}: {job.run}: stopped; the next start measures it") from None
    except Exception as error:  # one bad row must not cost the others
        return {"outcome": f"failed: {type(error).__name__}: {str(error)[:200]}"}


def chosen(section: str, options: argparse.Namespace) -> list[Job]:
    """The jobs of a section that were asked for."""
    jobs = [job for job in SECTIONS[section]() if re.search(options.match, job.run)]
    return jobs[: options.limit]


def run_jobs(section: str, record: Record, on_cpu: bool, options: argparse.Namespace) -> None:
    """Measure and record the jobs of a section that are not recorded yet."""
    from tools.shared.announced import announced

    new, before = 0, {} if on_cpu else announced(blind_table())
    for job in chosen(section, options):
        if new == options.more:
            print(f"{section}: {new} new rows; the next start goes on", flush=True)
            return
        key = record.key(record.facts | {"section": section, "run": job.run})
        if key in record.done and not options.again:
            print(f"{section}: {job.run}: recorded already", flush=True)
            continue
        new += 1
        values = outcome(section, job, record, on_cpu, before.get((section, job.run)))
        if options.untimed:
            values |= dict.fromkeys(SHARED)
        record.add(section, job.run, **values)
        error = values.get("error_allocated")
        shown = values["outcome"] if error is None else f"allocated predicted {100 * error:+.2f} %"
        print(f"{section}: {job.run}: {shown}", flush=True)
        if shown.startswith("failed") and not on_cpu and not answers():
            raise SystemExit("The card no longer answers this process: start again to go on.")
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


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    every = ", ".join([*SECTIONS, *COMMANDS])
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=every)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to install first")
    parser.add_argument("--again", action="store_true", help="measure what is recorded once more")
    parser.add_argument("--limit", type=int, help="only the first rows of each section")
    parser.add_argument("--more", type=int, help="only so many new rows of each section")
    parser.add_argument("--match", default="", help="the runs whose name has this expression")
    parser.add_argument("--untimed", action="store_true", help="others run on the card: no times")
    parser.add_argument("--predict", metavar="CARD", help="only write predictions for a card")
    parser.add_argument("--output", type=Path, help="folder for the rows")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options, every = options_of(arguments), [*SECTIONS, *COMMANDS]
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
    importlib.import_module("helpers")  # first: it says which version is out of range
    import torch

    if options.predict:
        return predict_only(options)
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
    failed = run_sections(options.sections or every, record, on_cpu, options)
    print(f"Rows: {record.path.name} in {folder.name}")
    if record.path.exists():
        print(compared(record.path))
    if failed:
        print(f"Failed: {', '.join(failed)}")
    return 1 if failed else 0


def blind_table(card: str = "") -> Path:
    """Where the predictions for a card of data/gpus.csv stand; for the one in this machine."""
    from helpers import hardware

    facts = None if card else hardware.this_gpu().facts
    here = [name for name, known in hardware.cards().items() if known.facts == facts]
    name = hardware.gpu(card).name if card else (here or ["unknown"])[0]
    return ROOT / "data" / f"announced_{re.sub(r'[^a-z0-9]+', '_', name.lower()).strip('_')}.csv"


def predict_only(options: argparse.Namespace) -> int:
    """Write predictions for a card that is not here."""
    from tools.shared.announced import announce

    try:
        path = blind_table(options.predict)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    path = options.output / path.name if options.output else path
    names = [name for name in options.sections or SECTIONS if name in SECTIONS]
    jobs = [(name, job) for name in names for job in chosen(name, options)]
    announce(path, options.predict, jobs, lambda line: print(line, flush=True))
    return 0


def run_sections(sections: list[str], record: Record, on_cpu: bool, options) -> list[str]:
    """Measure some sections; the names of the commands that failed."""
    failed = []
    for section in sections:
        if section in SECTIONS:
            run_jobs(section, record, on_cpu, options)
        elif section == "lessons" and missing(["nbval"]):
            print("lessons: skipped, nbval is not installed")
        else:
            command = [sys.executable, *COMMANDS[section]]
            if subprocess.run(command, cwd=ROOT, env=with_variables()).returncode:
                failed.append(section)
    return failed


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
    command = [sys.executable, "-m", "tools.gpu", *rest]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}).returncode


if __name__ == "__main__":
    sys.exit(main())
