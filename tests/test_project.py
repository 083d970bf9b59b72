"""What surrounds the course: how it is cited, and how its readers report."""

import ast
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pandas as pd
import pytest
import yaml
from packaging.requirements import Requirement

import notebook_rules
from tools.shared import look_up

ROOT = Path(__file__).resolve().parents[1]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "data/README.md",
    "docs/look_up.md",
    "docs/teaching.md",
]
KINDS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}
# Imported, not declared: each comes with a package that is.
COMES_WITH = {"ipython": "ipywidgets", "huggingface-hub": "transformers", "pyarrow": "datasets"}
COMES_WITH["jinja2"] = "torch"


def test_the_citation_says_what_the_project_file_says():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["repository-code"] == project["urls"]["Repository"]
    assert (cited["version"], cited["license"]) == (project["version"], project["license"])
    assert cited["cff-version"] == "1.2.0" and cited["title"] and cited["authors"]


def canonical(requirement: str) -> str:
    return re.sub("[-_.]+", "-", Requirement(requirement).name).lower()


def imported(folder: str) -> set[str]:
    """The names of other projects' modules that a package of the course imports anywhere."""
    names = set()
    for path in (ROOT / folder).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names) - {"planner", "helpers", "fake_cuda"}


@pytest.mark.parametrize("folder", ["planner", "helpers", "fake_cuda"])
def test_what_is_imported_is_declared(folder):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = set(map(canonical, project["dependencies"]))
    optional = set(map(canonical, project["optional-dependencies"]["liger"]))
    owners = importlib.metadata.packages_distributions()
    for module in imported(folder):
        if canonical(module) in optional:  # asked for first: may be missing
            continue
        name = canonical(owners[module][0])
        giver = COMES_WITH.get(name)
        if giver in declared:
            assert name in map(canonical, importlib.metadata.requires(giver)), name
        else:
            assert name in declared, f"{folder} imports {module}: declare {name} in pyproject.toml"


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_an_installation_that_fails_ends_with_one_sentence(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    python = tmp_path / "python"  # makes an environment whose pip fails, as without a network
    broken = (
        'mkdir -p .venv/bin && cp "$0" .venv/bin/python && sed -i s/true/false/ .venv/bin/python'
    )
    python.write_text(f'#!/bin/sh\n[ "$2" != venv ] || {{ {broken}; exit; }}\ntrue\n')
    python.chmod(0o755)
    command = ["make", "--no-print-directory", "install", f"SYSTEM_PYTHON={python}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    last = done.stdout.splitlines()[-1]
    assert done.returncode and "Without a network" in last and "docs/teaching.md" in last
    assert not (tmp_path / ".venv" / "installed").exists()


def test_the_changelog_begins_with_this_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    headings = [
        line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")
    ]
    assert headings[0].startswith(f"## {version}")


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_is_one(path):
    form = yaml.safe_load(path.read_text())
    if path.stem == "config":
        assert form["blank_issues_enabled"] is True
        return
    assert form["name"] and form["description"]
    names = [item["id"] for item in form["body"] if item["type"] != "markdown"]
    assert len(set(names)) == len(names)
    for item in form["body"]:
        assert item["type"] in KINDS and item["attributes"]
        assert item["type"] != "dropdown" or item["attributes"]["options"]


def test_the_forms_ask_for_commands_that_exist():
    makefile = (ROOT / "Makefile").read_text()
    for path in FORMS:
        for word in ("doctor", "check-rows", "gpu"):
            if f"make {word}" in path.read_text():
                assert f"\n{word}:" in makefile, word


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.stem)
def test_a_page_links_what_exists(path):
    for link in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        file, _, cell = link.partition("#cell-id=")
        if not re.match("[a-z]+:", file):
            assert (path.parent / file).exists(), link
        if cell:
            cells = json.loads((path.parent / file).read_text())["cells"]
            assert cell in [found["id"] for found in cells], link


def test_the_page_to_look_things_up_is_up_to_date():
    assert look_up.PAGE.read_text() == look_up.page(), "run make outputs"
    lessons = {path.stem for path in (ROOT / "notebooks").glob("[0-9]*.ipynb")}
    rows = pd.read_csv(ROOT / "data" / "techniques.csv")
    assert set(rows["lesson"]) <= lessons and rows["technique"].is_unique
    assert not rows.isna().any().any()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_one_title_and_skips_no_level_of_headings(name):
    text = notebook_rules.without_fences((ROOT / name).read_text(encoding="utf-8"))
    levels = [len(marks) for marks in re.findall(r"^(#+) ", text, re.MULTILINE)]
    assert levels[:1] == [1] and levels.count(1) == 1
    assert all(below <= above + 1 for above, below in zip(levels, levels[1:], strict=False))
