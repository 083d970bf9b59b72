"""Lessons in a real JupyterLab, read and used in a browser without a window: `make test-browser`.

A copy of the course is served, so that nothing of the checkout changes. Screenshots go to
build/browser.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.lab import SENTENCE, WIDGET

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "build" / "browser"
LESSONS = ("00", "02", "07", "17")
WIDGETS = ("02", "17")
EXECUTED = """() => {
    const panel = window.jupyterapp.shell.currentWidget;
    const kernel = panel.sessionContext.session && panel.sessionContext.session.kernel;
    const cells = [...panel.content.model.cells].filter(c => c.type === "code");
    const run = c => c.executionCount !== null && c.executionState !== "running";
    return Boolean(kernel) && kernel.status === "idle" && cells.every(run);
}"""
OPENED = """() => {
    const panel = window.jupyterapp && window.jupyterapp.shell.currentWidget;
    const session = panel && panel.sessionContext && panel.sessionContext.session;
    return Boolean(session && session.kernel && session.kernel.status === "idle");
}"""


def lesson(number: str) -> Path:
    return next((ROOT / "notebooks").glob(f"{number}_*.ipynb"))


@pytest.fixture(scope="session")
def course(tmp_path_factory) -> Path:
    """A copy of what a reader has, without the outputs that a run must bring."""
    folder = tmp_path_factory.mktemp("course")
    for name in ("notebooks", "data", "helpers", "fake_cuda", "tests/exercises.py", "tools/lab.py"):
        source = ROOT / name
        (folder / name).parent.mkdir(exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
    return folder


@pytest.fixture(scope="session")
def server(course, tmp_path_factory) -> Iterator[str]:
    """The address of a JupyterLab of its own: no settings, no workspaces of the user's."""
    home = tmp_path_factory.mktemp("jupyter")
    kinds = "CONFIG DATA RUNTIME LAB_SETTINGS LAB_WORKSPACES".split()
    names = [f"JUPYTER{'' if kind.startswith('LAB') else '_'}{kind}_DIR" for kind in kinds]
    own = {name: str(home / name.lower()) for name in names}
    settings = Path(own["JUPYTERLAB_SETTINGS_DIR"]) / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    news = {"fetchNews": "false", "checkForUpdates": False}
    (settings / "notification.jupyterlab-settings").write_text(json.dumps(news))
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    arguments = "--no-browser --port=0 --IdentityProvider.token=secret --allow-root".split()
    arguments += [f"--ServerApp.root_dir={course}", "--LabApp.expose_app_in_browser=True"]
    # As `make lab` starts it.
    started = re.search(r"-m (jupyterlab [^$#\\\n]*)", (ROOT / "Makefile").read_text())
    command = [sys.executable, "-m", *started[1].split(), *arguments]
    with open(home / "log", "w") as log:
        options = {"stdout": log, "stderr": log, "env": os.environ | own | quiet, "cwd": course}
        process = subprocess.Popen(command, start_new_session=True, **options)
    try:
        for _ in range(240):
            found = re.search(r"http://(?:localhost|127.0.0.1):(\d+)/", (home / "log").read_text())
            if found:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"{found[0]}api", timeout=2).close()
                    break
            assert process.poll() is None, (home / "log").read_text()[-2000:]
            time.sleep(0.5)
        yield found[0]
    finally:
        process.terminate()  # the server stops its kernels
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


class Lab:
    """One window of JupyterLab."""

    def __init__(self, page, server: str):
        self.page, self.server = page, server

    def command(self, name: str, **arguments) -> None:
        self.page.evaluate(
            "([name, given]) => window.jupyterapp.commands.execute(name, given)", [name, arguments]
        )

    def open(self, path: Path, first: bool = True) -> None:
        if first:
            address = f"{self.server}lab/tree/notebooks/{path.name}?token=secret&reset"
            self.page.goto(address)
        else:
            self.command("docmanager:open", path=f"notebooks/{path.name}")
        self.page.wait_for_function(OPENED, timeout=60_000)
        self.page.wait_for_timeout(1500)

    def run(self) -> None:
        self.command("notebook:run-all-cells")
        self.page.wait_for_timeout(1000)
        self.page.wait_for_function(EXECUTED, timeout=180_000)
        self.page.wait_for_timeout(1500)  # what comes with the last message is drawn

    def outputs(self) -> list[dict]:
        notebook = self.page.evaluate(
            "() => window.jupyterapp.shell.currentWidget.content.model.toJSON()"
        )
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        return [output for cell in cells for output in cell["outputs"]]

    def widget(self) -> int:
        """The place of the first cell that shows controls."""
        index = self.page.evaluate(
            """kind => [...window.jupyterapp.shell.currentWidget.content.model.cells].findIndex(
                c => c.type === "code" && c.outputs.toJSON().some(o => o.data && o.data[kind]))""",
            WIDGET,
        )
        assert index >= 0, "no cell shows a widget"
        return index

    def cell(self, index: int):
        """A cell, scrolled to."""
        self.page.evaluate(
            "i => window.jupyterapp.shell.currentWidget.content.scrollToItem(i, 'start')", index
        )
        self.page.wait_for_timeout(1500)
        cells = self.page.locator(".jp-Notebook:visible .jp-Cell")
        return cells.and_(self.page.locator(f"[data-windowed-list-index='{index}']"))

    def picture(self, name: str) -> None:
        PICTURES.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=PICTURES / f"{name}.png")

    def close(self) -> None:
        self.command("application:close")
        self.page.wait_for_timeout(500)


@pytest.fixture
def lab(chromium, server) -> Iterator[Lab]:
    page = chromium.new_page(viewport={"width": 1400, "height": 1000})
    page.set_default_timeout(30_000)
    yield Lab(page, server)
    page.close()


def complaints(outputs: list[dict]) -> list[str]:
    """What no reader should meet: errors, and warnings on a red ground."""
    errors = [f"{o['ename']}: {o['evalue']}" for o in outputs if o["output_type"] == "error"]
    red = [o["text"] for o in outputs if o["output_type"] == "stream" and o["name"] == "stderr"]
    return [*errors, *map(str, red)]


@pytest.mark.parametrize("number", LESSONS)
def test_a_lesson_runs_is_saved_and_opened_again(number, lab, course):
    path = lesson(number)
    lab.open(path)
    lab.run()
    assert complaints(lab.outputs()) == []
    lab.picture(f"{number}-run")
    if number in WIDGETS:
        panel = lab.widget()
        use_by_keyboard(lab, lab.cell(panel))
        assert complaints(lab.outputs()) == []
        lab.picture(f"{number}-moved")
    lab.command("docmanager:save")
    lab.page.wait_for_timeout(1500)
    saved = json.loads((course / "notebooks" / path.name).read_text(encoding="utf-8"))
    assert "widgets" not in saved["metadata"]
    lab.close()
    # The next day: another kernel, and what was saved.
    lab.page.evaluate("() => window.jupyterapp.serviceManager.sessions.shutdownAll()")
    lab.open(path, first=False)
    assert not [output for output in lab.outputs() if WIDGET in output.get("data", {})]
    if number in WIDGETS:
        assert SENTENCE in lab.cell(panel).inner_text()
        lab.picture(f"{number}-again")
        beside = [lab.cell(panel + step).locator("img").count() for step in (-1, 1)]
        assert any(beside), "no picture beside the place of the controls"


def use_by_keyboard(lab: Lab, cell) -> None:
    """Tab reaches every control, each has a name and shows its focus; the first one is changed."""
    page, controls = lab.page, cell.locator(".widget-interact :is(select, input)")
    cell.locator("img").first.scroll_into_view_if_needed()
    look = "e => [getComputedStyle(e).outlineStyle, getComputedStyle(e).borderColor].join()"
    before = [control.evaluate(look) for control in controls.all()]
    assert len(before) >= 4
    controls.first.focus()
    for control, unfocused in zip(controls.all(), before, strict=True):
        assert control.evaluate("e => e === document.activeElement")
        assert control.evaluate("e => e.labels.length && e.labels[0].textContent.trim()")
        assert control.evaluate(look) != unfocused
        page.keyboard.press("Tab")
    # Space opens a list; closed, JupyterLab would take the arrows for itself.
    shown = cell.locator("img").first.get_attribute("src")
    controls.first.focus()
    for key in ("Space", "ArrowDown", "Enter"):
        page.keyboard.press(key)
        page.wait_for_timeout(300)
    page.wait_for_function(
        "([cell, before]) => [...cell.querySelectorAll('img')].some(i => i.src !== before)",
        arg=[cell.element_handle(), shown],
        timeout=60_000,
    )


def test_links_and_contents_with_two_lessons_open(lab):
    one, two = lesson("00"), lesson("02")
    lab.open(one)
    lab.open(two, first=False)
    lab.command("toc:show-panel")
    lab.page.wait_for_timeout(1500)
    shown = lab.page.locator(".jp-TableOfContents-content .jp-tocItem-content").all_inner_texts()
    cells = json.loads(two.read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    headings = re.findall(r"^#{1,6} (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"\[!\[.*|[`*]", "", heading).strip() for heading in headings]
    assert [name.strip() for name in shown] == plain
    lab.picture("contents")
    # A link of one lesson opens the other, at its heading.
    target = re.search(r"\]\(((?!02)\d\d_\w+\.ipynb)", text)[1]
    lab.page.evaluate("() => window.jupyterapp.shell.currentWidget.content.scrollToItem(0)")
    lab.page.wait_for_timeout(1000)
    lab.page.locator(f".jp-Notebook:visible a[href*='{target}']").first.click()
    shown = "p => window.jupyterapp.shell.currentWidget.context.path === p"
    lab.page.wait_for_function(shown, arg=f"notebooks/{target}")
    lab.picture("link")
