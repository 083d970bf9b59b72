"""Find the lessons and run them: what several tools do with notebooks."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbclient.output_widget import OutputWidget
from traitlets import default

from tools import ROOT
from tools.shared.environment import with_variables

LIMIT = 30.0  # minutes for one cell: more than any takes on a slow machine


class ThisInterpreter(AsyncKernelManager):
    """Kernels of the interpreter that runs this file, whatever "python3" means to Jupyter here."""

    @default("kernel_spec_manager")
    def _without_installed_kernels(self) -> KernelSpecManager:
        return KernelSpecManager(kernel_dirs=[])


class SilentOutput(OutputWidget):
    """What a panel of controls shows is kept here, and the kernel is not told of it.

    nbclient would tell it on the socket on which it waits for the cell's reply. A reply that comes
    in that moment wakes nobody, and the wait never ends (nbclient's issue 312).
    """

    def send(self, *_, **__) -> None:
        pass


class LessonError(Exception):
    """A notebook that did not run to its end, in one sentence."""


def find_lessons(root: Path = ROOT) -> dict[str, Path]:
    """The lessons of the course by their two-digit number."""
    return {path.name[:2]: path for path in sorted((root / "notebooks").glob("[0-9][0-9]_*.ipynb"))}


def choose_lessons(wanted: str, root: Path = ROOT) -> list[Path]:
    """The lessons named in a text like "01 02"; all of them if it is empty."""
    lessons = find_lessons(root)
    if not lessons:
        raise ValueError("There are no lessons in the notebooks folder.")
    numbers = [number.zfill(2) for number in re.split(r"[\s,]+", wanted.strip()) if number]
    unknown = [number for number in numbers if number not in lessons]
    if unknown:
        raise ValueError(f"No lesson {', '.join(unknown)}: the lessons are {' '.join(lessons)}.")
    return [lessons[number] for number in sorted(set(numbers))] if numbers else [*lessons.values()]


def read_notebook(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def runnable(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """The cells that execute() runs."""
    return [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]


def first_lines(source: str, count: int = 2) -> str:
    """The first lines of a text that say something."""
    lines = [line.strip() for line in source.splitlines() if line.strip()]
    return " / ".join(lines[:count])


def reason(error: Exception) -> str:
    if isinstance(error, CellExecutionError):
        return f"{error.ename}: {first_lines(error.evalue, 1)}"
    if isinstance(error, DeadKernelError):
        return "the kernel died, most often because the machine ran out of memory"
    return f"{type(error).__name__}: {error}"


def execute(
    notebook: nbformat.NotebookNode,
    folder: Path,
    after_cell: Callable[[], object] = lambda: None,
    limit: float = LIMIT,
) -> None:
    """Run every cell in place, each within `limit` minutes.

    Raises LessonError with the cell, its first lines and the error.
    """
    current = {"number": 0, "source": ""}

    def started(cell: nbformat.NotebookNode, cell_index: int) -> None:
        current.update(number=current["number"] + 1, source=cell.source)

    client = NotebookClient(
        notebook,
        kernel_name="python3",
        kernel_manager_class=ThisInterpreter,
        resources={"metadata": {"path": str(folder)}},
        on_cell_execute=started,
        on_cell_executed=lambda **_: after_cell(),
        record_timing=False,
        coalesce_streams=True,
        timeout=max(1, round(60 * limit)),
    )
    client.widget_registry["@jupyter-widgets/output"]["OutputModel"] = SilentOutput
    try:
        # What the kernel's process itself says would only tear the progress bar.
        client.execute(env=with_variables(), stderr=subprocess.DEVNULL)
        # nbclient needs the widgets' state while it runs; stored, it breaks the page on GitHub.
        notebook.metadata.pop("widgets", None)
    except Exception as error:
        # nbclient answers Ctrl-C by ending the kernel and failing in one of several ways.
        if getattr(client, "_async_cleanup_kernel_future", None):
            raise KeyboardInterrupt from None
        place = f"cell [{current['number']}] ({first_lines(current['source'])})"
        if isinstance(error, CellTimeoutError):
            late = f"{place} did not end within {limit:g} minutes; --limit gives it more"
            raise LessonError(late) from error
        raise LessonError(f"{place} failed: {reason(error)}") from error
