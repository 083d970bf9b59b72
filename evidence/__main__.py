"""Remake what is recorded of what others measured and lessons show: all, or what is named.

    make evidence                                  what other code made, or whose row changed
    make evidence SETS="fms liger"                 some sets; rows of the others stay
    python -m evidence calculators readme          some parts
    python -m evidence --plan                      say what would be made, and stop

A set is a source's (data/measurements/peaks.csv, several_cards.csv, speeds.csv) or a lesson's
(evidence/lessons). An interrupted run goes on where it stopped, and a file is replaced whole or not
at all.

Writes: data/real_cards.csv, data/several_cards.csv, data/speeds.csv, data/speed_constants.csv,
data/predictions.csv, data/fits.csv, data/atlas, data/atlas_check.csv, data/calculators.csv,
data/board.csv, data/real_cards.png, data/step.png, README.md
"""

import argparse
import importlib
import sys
from typing import NamedTuple

from evidence import fits, peaks, predictions, record, runs, steps
from evidence.atlas import check
from evidence.atlas import table as atlas
from evidence.runs import Job
from helpers.hardware import suggest


class Part(NamedTuple):
    """What follows from the recorded rows without a long prediction; its module has `write`."""

    module: str
    writes: str


PARTS = {  # in this order
    "calculators": Part("evidence.calculators", "data/calculators.csv"),
    "scoreboard": Part("evidence.scoreboard", "data/board.csv"),
    "readme": Part("evidence.trust", "the table in README.md"),
    "words": Part("evidence.atlas.page", "data/atlas/planner.json.gz"),
    "pictures": Part("evidence.picture", "data/real_cards.png, data/step.png"),
}
PASTED = "pasted"  # the code in data/fits.csv, without a search
CONSTANTS = "constants"  # data/speed_constants.csv, which needs the steps of all sets


class Plan(NamedTuple):
    """What will be predicted and written."""

    sources: list[Job] = ()
    lessons: list[Job] = ()
    fits: list[Job] = ()
    atlas: list[Job] = ()
    checks: list[Job] = ()
    constants: bool = False
    pasted: bool = False
    parts: list[str] = ()
    missing: dict[str, str] = {}  # sets that this machine cannot predict, and why

    @property
    def jobs(self) -> list[Job]:
        return [*self.sources, *self.lessons, *self.fits, *self.atlas, *self.checks]


def names() -> list[str]:
    """Everything that can be asked for."""
    sets = [*runs.of_peaks(), *runs.of_steps(), *runs.of_lessons()]
    return list(
        dict.fromkeys([*sets, "fits", PASTED, CONSTANTS, *PARTS, *atlas.names(), check.SET])
    )


def source_jobs(asked: list[str], again: bool, all_steps: bool) -> tuple[list[Job], dict[str, str]]:
    """The runs of sources to predict, of each the bytes, the seconds or both, as they are due.

    Returns:
        The jobs, and the sets that cannot be listed on this machine, with the reason.
    """
    of_bytes = peaks.to_make(asked, again)
    of_seconds = steps.to_make(list(runs.of_steps()) if all_steps else asked, again or all_steps)
    found, missing = [], {}
    for name in dict.fromkeys(key[0] for key in sorted(of_bytes | of_seconds)):
        try:
            jobs = list(runs.source_jobs([name]))
        except ImportError as error:  # a package that nothing else needs
            missing[name] = str(error)
            continue
        for job in jobs:
            due = job._replace(
                bytes_too=job.bytes_too and job.key[:2] in of_bytes,
                seconds_too=job.seconds_too and job.key[:2] in of_seconds,
            )
            found += [due] if due.bytes_too or due.seconds_too else []
    return found, missing


def planned(asked: list[str], again: bool = False) -> Plan:
    """What is to be made of the named sets and parts, of everything without a name."""
    if asked and set(asked) <= set(PARTS):
        return Plan(parts=[name for name in PARTS if name in asked])
    everything = not asked
    asked = asked or [name for name in names() if name not in (PASTED, check.SET, *atlas.names())]
    sources, missing = source_jobs(asked, again, all_steps=CONSTANTS in asked and not everything)
    due = any(job.seconds_too for job in sources)
    if everything and due:  # the constants are about all steps
        sources, missing = source_jobs(asked, again, all_steps=True)
    lessons = predictions.to_make(asked, again)
    answers = fits.to_make(again) if "fits" in asked else []
    recipes, checks = atlas.to_make(asked, again), check.to_make(asked, again)
    changed = bool(sources or lessons)
    parts = [name for name in PARTS if name in asked or changed]
    constants = CONSTANTS in asked and due
    return Plan(
        sources, lessons, answers, recipes, checks, constants, PASTED in asked, parts, missing
    )


def told(plan: Plan) -> str:
    """The plan in words."""
    lines = []
    counts = {
        "runs of sources": plan.sources,
        "predictions of lessons": plan.lessons,
        "questions to the planner": plan.fits,
        "recipes of the atlas": plan.atlas,
        "points of the atlas in full": plan.checks,
    }
    for what, jobs in counts.items():
        sets = {job.set for job in jobs}
        if jobs:
            lines.append(f"{len(jobs)} {what}, {len(sets)} sets: {' '.join(sorted(sets))}")
    kept = sum(bool(record.kept(job, whole=False)) for job in plan.jobs)
    lines += [f"{kept} of them are kept from an interrupted run"] * bool(kept)
    written = ["data/speed_constants.csv"] * plan.constants + ["data/fits.csv"] * plan.pasted
    written += [PARTS[name].writes for name in plan.parts]
    lines += [f"{name} is left as it is: {why}" for name, why in plan.missing.items()]
    lines += [f"then: {', '.join(written)}"] * bool(written)
    return "\n".join(lines or ["Nothing is due: today's code made every row."])


def results(jobs: list[Job], failed: dict[Job, str]) -> dict:
    """What was predicted, without the sets in which a run failed: their rows stay."""
    lost = {job.set for job in failed}
    return {job: record.kept(job) for job in jobs if job.set not in lost}


def carry_out(plan: Plan, processes: int) -> int:
    """Predict and write; the exit status."""
    failed = record.make(plan.jobs, processes)
    sources = results(plan.sources, failed)
    if of_bytes := {job: found for job, found in sources.items() if job.bytes_too}:
        peaks.write_each(of_bytes)
    of_seconds = {job: found for job, found in sources.items() if job.seconds_too}
    if of_seconds:
        steps.write(of_seconds)
    if plan.constants and not (failed or plan.missing):
        steps.write_constants(of_seconds)
    if lessons := results(plan.lessons, failed):
        predictions.write(lessons)
    if answers := results(plan.fits, failed):
        fits.write(answers)
    if recipes := results(plan.atlas, failed):
        atlas.write(recipes)
    if sample := results(plan.checks, failed):
        check.write(sample)
    if plan.pasted:
        fits.write_pasted()
    record.forget([job for job in plan.jobs if job not in failed])
    for name in plan.parts:
        importlib.import_module(PARTS[name].module).write()
    for why in failed.values():
        print(f"error: {why}; the rows of its set stay", file=sys.stderr)
    return 2 if failed or plan.missing else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m evidence", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="a set, or a part: see --list")
    parser.add_argument("--again", action="store_true", help="also what today's code made")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (2)")
    parser.add_argument("--plan", action="store_true", help="say what would be made, and stop")
    parser.add_argument("--keep", action="store_true", help="keep traces and write no table")
    parser.add_argument("--list", action="store_true", help="say what can be named, and stop")
    options = parser.parse_args(arguments)
    if options.list:
        print(*names(), sep="\n")
        return 0
    asked = list(dict.fromkeys(options.names))
    try:
        for name in asked:
            if name not in PARTS and name not in names():
                raise ValueError(suggest(name, names(), "set or part of the evidence"))
        plan = planned(asked, options.again)
        print(told(plan), flush=True)
        if options.keep:
            return 2 if record.make(plan.jobs, options.jobs) else 0
        return 0 if options.plan else carry_out(plan, options.jobs)
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
