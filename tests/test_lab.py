"""What JupyterLab saves when `make lab` started it."""

import copy
import os
from pathlib import Path

from tools import lab

VIEW = {lab.WIDGET: {"model_id": "1"}}
PICTURE = {"output_type": "display_data", "data": {"image/png": "x", "text/plain": "<Figure>"}}
TEXT = {"output_type": "stream", "name": "stdout", "text": "It fits."}


def view(text) -> dict:
    return {"output_type": "display_data", "metadata": {}, "data": {**VIEW, "text/plain": text}}


def saved(*outputs) -> list[dict]:
    cells = [{"cell_type": "markdown", "source": "x"}, {"cell_type": "code", "outputs": [*outputs]}]
    model = {"type": "notebook", "content": {"cells": copy.deepcopy(cells)}}
    lab.without_widgets(model=model, path="a.ipynb", contents_manager=None)
    assert model["content"]["cells"][0] == cells[0]
    return model["content"]["cells"][1]["outputs"]


def test_a_panel_is_saved_as_a_sentence_and_nothing_else_changes():
    for text in ("interactive(children=(Dropdown(", ["interactive(", "children"]):
        first, panel, last = saved(TEXT, view(text), PICTURE)
        assert (first, last) == (TEXT, PICTURE)
        assert panel == view(text) | {"data": {"text/plain": lab.SENTENCE}}


def test_a_progress_bar_is_not_saved():
    assert saved(view("  0%|          | 0/3 [00:00<?, ?it/s]"), TEXT) == [TEXT]


def test_the_state_of_widgets_is_not_saved():
    content = {"metadata": {"widgets": {"state": {}}, "kernelspec": {}}, "cells": []}
    lab.without_widgets(model={"type": "notebook", "content": content})
    assert content["metadata"] == {"kernelspec": {}}


def test_other_files_are_left_alone():
    for model in ({"type": "file", "content": "x"}, {"type": "directory", "content": None}):
        before = copy.deepcopy(model)
        lab.without_widgets(model=model)
        assert model == before


def test_every_way_to_start_jupyterlab_names_the_settings():
    root = Path(lab.__file__).parents[1]
    for name in ("Makefile", "README.md"):
        text = (root / name).read_text(encoding="utf-8")
        assert text.count("-m jupyterlab") == text.count("-m jupyterlab --config tools/lab.py") == 1


def test_jupyterlab_opens_the_first_lesson_and_asks_nothing(monkeypatch):
    """The file as JupyterLab reads it, and names that this JupyterLab still knows."""
    from jupyterlab.labapp import LabApp
    from traitlets.config import PyFileConfigLoader

    path = Path(lab.__file__)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # to be put back
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    read = PyFileConfigLoader(path.name, path=str(path.parent)).load_config()
    assert (path.parents[1] / read.LabApp.default_url.removeprefix("/lab/tree/")).is_file()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    assert read.LabApp.news_url is None and read.ContentsManager.pre_save_hook
    assert {"default_url", "news_url"} <= set(LabApp.class_trait_names())


def test_the_installation_shows_that_it_goes_on():
    makefile = (Path(lab.__file__).parents[1] / "Makefile").read_text(encoding="utf-8")
    install = [line for line in makefile.splitlines() if "-e '.[lab,test" in line]
    assert install and not any("--quiet" in line or "-q " in line for line in install)
