"""The planner's modules: who imports whom, what is public, and that its command starts at once."""

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import planner
from test_house import imported

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "planner"
# A module may import those in its row and no other: arrows run one way, without circles.
ARROWS = {
    "changes": set(),
    "techniques": {"changes"},
    "layers": set(),
    "question": {"changes", "techniques", "layers"},
    "facts": set(),
    "cache": {"facts"},
    "workers": set(),
    "predictions": {"techniques", "layers", "question", "facts", "cache", "workers"},
    "script": {"changes", "techniques", "question"},
    "answer": {"techniques", "question", "facts"},
    "atlas": set(),
    "recorded": {"answer", "atlas", "facts"},
    "lengths": {"techniques", "predictions", "answer"},
    "candidates": {"techniques", "question", "predictions"},
    "search": {
        "techniques",
        "question",
        "predictions",
        "candidates",
        "script",
        "answer",
        "lengths",
    },
    "report": set(),
    "parts": {"layers"},
    "ranks": {"parts"},
    "several": {"techniques", "question", "facts"},
    "micro_batches": {"several"},
    "rank_recipes": set("question facts predictions cache ranks several".split()),
    "search_several": set("predictions several micro_batches rank_recipes workers".split()),
    "prices": set(),
    "calibration": set(),
    "terminal": set(),
    "doctor": {"terminal"},
    "options": {"terminal"},
    "finding": set("answer several recorded search search_several workers terminal".split()),
    "command": set("finding report ranks prices calibration doctor terminal options".split()),
    "__main__": {"command"},
}
HEAVY = {"torch", "transformers", "datasets", "matplotlib", "pandas", "numpy", "helpers"}


@pytest.mark.parametrize("module", ARROWS)
def test_arrows_run_one_way(module):
    found = {name.split(".")[1] for name in imported(FOLDER / f"{module}.py") if "planner." in name}
    assert found & ARROWS.keys() <= ARROWS[module]
    order = list(ARROWS)
    assert ARROWS[module] <= set(order[: order.index(module)])


def test_every_module_is_drawn():
    assert {path.stem for path in FOLDER.glob("*.py")} == ARROWS.keys() | {"__init__"}


def test_public_names_are_there_and_say_what_they_do():
    for name in planner.__all__:
        assert inspect.getdoc(getattr(planner, name)), name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        planner.nothing  # noqa: B018


@pytest.mark.parametrize("module", [name for name in ARROWS if name != "__main__"])
def test_public_functions_and_classes_say_what_they_do(module):
    tree = ast.parse((FOLDER / f"{module}.py").read_text("utf-8"))
    kinds = ast.FunctionDef | ast.ClassDef
    public = [n for n in ast.walk(tree) if isinstance(n, kinds) and not n.name.startswith("_")]
    inner = {n for f in public if isinstance(f, ast.FunctionDef) for n in ast.walk(f) if n is not f}
    silent = [n.name for n in public if n not in inner and not ast.get_docstring(n)]
    assert ast.get_docstring(tree) and not silent, f"{module}: without a docstring: {silent}"


def test_the_command_answers_before_anything_large_is_imported():
    code = "import sys, planner.command as c; status = c.main(sys.argv[1:]); print(*sys.modules)"
    bad = [sys.executable, "-c", code, "predict", "--script", "train.py", "--batch", "8"]
    done = subprocess.run(bad, capture_output=True, text=True, cwd=ROOT)
    assert "'--batch': a script's arguments stand after --" in done.stderr
    assert "planner.command" in done.stdout and not HEAVY & set(done.stdout.split())


def test_what_the_command_lists_are_the_tasks_of_the_helpers_and_the_orders_of_fit():
    options, tasks = map(importlib.import_module, ("planner.options", "helpers.tasks"))
    assert set(options.TASKS) == set(tasks.MODELS)
    assert options.ORDERS == tuple(importlib.import_module("planner.answer").ORDERS)
