"""JupyterLab with the settings of this course: `make lab` names this file.

A widget lives in its kernel. Stored in a notebook it is an error text once the kernel is gone, and
GitHub refuses the page. So a notebook is saved without progress bars, and a panel of controls is
saved as a sentence; the picture beside it stays. JupyterLab opens lesson 00 (its launcher would cut
the names of the files) and does not ask whether it may show news, on top of a lesson's outputs. Of
several cards the kernels see the first, unless CUDA_VISIBLE_DEVICES names others: the Trainer that
a lesson builds by hand would use every card.

Writes: notebooks/, as you save them
"""

import os

WIDGET = "application/vnd.jupyter.widget-view+json"
FIRST = "/lab/tree/notebooks/00_start_here.ipynb"
SENTENCE = "The controls were here. Run this cell, and those above it, to have them back."


def without_widgets(model: dict, **_) -> None:
    """Take the widgets out of a notebook that is about to be saved."""
    content = model.get("content")
    if model.get("type") != "notebook" or not isinstance(content, dict):
        return
    content.get("metadata", {}).pop("widgets", None)
    for cell in content.get("cells", []):
        kept = []
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if WIDGET in data and "".join(data.get("text/plain", "")).startswith("interactive("):
                output["data"] = {"text/plain": SENTENCE}
            if WIDGET not in output.get("data", {}):
                kept.append(output)
        if "outputs" in cell:
            cell["outputs"] = kept


if "get_config" in globals():  # Jupyter reads this file; a test imports it
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    settings = get_config()  # noqa: F821
    settings.ContentsManager.pre_save_hook = without_widgets
    settings.LabApp.default_url = FIRST
    settings.LabApp.news_url = None
