"""Predict runs in several processes, each kept on the disk until its table is written.

So an interrupted recording goes on where it stopped. What is kept of a run of a source: its bytes
and the operations of its last step, from which a time follows for any host; of a lesson's run its
row; of a question to the planner its answers; of a recipe of the atlas all of its points.
"""

import gzip
import hashlib
import multiprocessing
import os
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

from tqdm import tqdm

from evidence import traces
from evidence.runs import Job
from evidence.tables import ROOT, libraries
from helpers import host

KEPT = ROOT / "build" / "evidence"


def made(job: Job) -> Any:
    """Predict whatever a job is, with no host that was found of this machine."""
    with mock.patch.object(host, "kept", lambda card: None):
        return _made(job)


def _made(job: Job) -> Any:
    if job.kind in ("source", "lesson"):
        return traces.of(job)
    if job.kind == "atlas":
        from evidence.atlas.points import recipe

        return recipe(job.set.removeprefix("atlas-"), job.variant, job.run)
    if job.kind == "full":
        from evidence.atlas import check, full

        return full.prediction(check.key_of(job.run))
    from evidence.fits import answers

    return answers(job.run)


def place(job: Job, folder: Path = KEPT) -> Path:
    """The file that keeps a prediction until its table is written."""
    name = hashlib.sha256(repr((job.kind, job.module, *job.key, job.nth)).encode()).hexdigest()
    return folder / f"{name[:32]}.pickle.gz"


def kept(job: Job, folder: Path = KEPT, whole: bool = True) -> Any:
    """What an interrupted recording left of a job, if this code made it; else None.

    Args:
        whole: False asks only if there is something: True or None.
    """
    with suppress(OSError, EOFError, pickle.UnpicklingError, AttributeError, ValueError):
        with gzip.open(place(job, folder)) as file:  # our own file, never a downloaded one
            if pickle.load(file) == (job, job.code, libraries()):
                return pickle.load(file) if whole else True
    return None


def keep(job: Job, folder: Path = KEPT) -> None:
    """Predict a job and leave the result on the disk, whole or not at all."""
    result = made(job)
    path = place(job, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    with gzip.open(unfinished, "wb", compresslevel=1) as file:
        pickle.dump((job, job.code, libraries()), file)
        pickle.dump(result, file)
    os.replace(unfinished, path)


def make(jobs: list[Job], processes: int = 2, folder: Path = KEPT) -> dict[Job, str]:
    """Predict what is not kept yet, with progress.

    Returns:
        The jobs that failed, with the reason: a package that is missing, or a fault of the code.
    """
    left = [job for job in jobs if not kept(job, folder, whole=False)]
    failed: dict[Job, str] = {}
    bar = tqdm(total=len(left), unit="prediction", disable=not left)
    for job, error in _each(left, processes, folder):
        if error:
            failed[job] = f"{' / '.join(filter(None, job.key))} of {job.module}: {error}"
            bar.write(failed[job])
        bar.set_postfix_str(f"{job.set}, {job.run}")
        bar.update()
    bar.close()
    return failed


def _each(jobs: list[Job], processes: int, folder: Path) -> Iterator[tuple[Job, str]]:
    """Each job when it is kept, or with what went wrong."""
    if processes == 1:
        yield from ((job, attempt(job, folder)) for job in jobs)
        return
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with ProcessPoolExecutor(processes, mp_context=context, initializer=end_with_parent) as pool:
        waiting = {pool.submit(attempt, job, folder): job for job in jobs}
        try:
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)  # an interrupt: what runs now is the last
            raise


def end_with_parent() -> None:
    """A process of the pool ends when the one that started it is gone, killed, say: by itself it
    would wait for its next task for ever."""

    def watch() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def attempt(job: Job, folder: Path) -> str:
    """Keep a job; what went wrong, as one line, or nothing."""
    try:
        keep(job, folder)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ""


def forget(jobs: list[Job], folder: Path = KEPT) -> None:
    """Delete what was kept, once it stands in its tables."""
    for job in jobs:
        place(job, folder).unlink(missing_ok=True)
