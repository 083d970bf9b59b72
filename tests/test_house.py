"""The shape of the house: who may import whom, how long a function is, what `make` runs."""

import ast
import io
import tokenize
from pathlib import Path

import pytest

from tools.shared import table

ROOT = Path(__file__).resolve().parents[1]
# A package may import those after it and no other, wherever in a file it does.
PACKAGES = ("tools", "evidence", "planner", "helpers", "fake_cuda")
THERE = [name for name in PACKAGES if (ROOT / name).is_dir()]
FILES = [path for name in THERE for path in sorted((ROOT / name).rglob("*.py"))]
# Inside of helpers: what a module may import. Each stands below what it imports.
HELPERS = {
    "hardware": set(),
    "runs": {"hardware"},
    "memory": {"hardware"},
    "kernels": set(),
    "settings": {"hardware", "kernels"},
    "models": {"hardware"},
    "tiny": {"hardware"},
    "tasks": {"hardware"},
    "samples": set(),
    "trainers": {"hardware"},
    "own_data": {"models", "tiny"},
    "workload": {"hardware", "samples", "tasks", "tiny", "trainers"},
    "workloads": {"models", "own_data", "samples", "tasks", "tiny", "workload"},
    "host": {"hardware"},
    "prediction": {"hardware", "host", "kernels", "memory", "runs", "settings", "workload"},
    "training": {
        "hardware",
        "kernels",
        "memory",
        "prediction",
        "runs",
        "settings",
        "workload",
        "workloads",
    },
    "show": {"hardware", "runs"},
}
MODULE = {"helpers": 250}  # lines; 300 in the other packages
FUNCTION = 45  # lines of code, which is one screen


def modules_imported(source: str, module: str) -> set[str]:
    """The dotted names that the source of a module imports, wherever in the file it does.

    For `from a import b` both `a` and `a.b` are named, because b may be a module.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            origin = ".".join([*above, *filter(None, [node.module])])
            found |= {origin, *(f"{origin}.{alias.name}" for alias in node.names)}
    return found


def name_of(path: Path) -> str:
    """The dotted name of a module; that of a package ends with `__init__`."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imported(path: Path) -> set[str]:
    return modules_imported(path.read_text(encoding="utf-8"), name_of(path))


def test_imports_are_found_however_they_are_written():
    source = "from . import a\nfrom .b import x\nimport p.c\ndef f():\n from p import d\n"
    found = modules_imported(source + "from .. import e\nfrom ..r import s\n", "p.q.m")
    assert {"p.q.a", "p.q.b", "p.c", "p.d", "p.e", "p.r"} <= found
    assert {"p.q.b", "p.q.b.x"} <= modules_imported("from .b import x", "p.q.__init__")


@pytest.mark.parametrize("package", THERE)
def test_packages_import_one_way(package):
    above = PACKAGES[: PACKAGES.index(package)]
    for path in (ROOT / package).rglob("*.py"):
        wrong = {name for name in imported(path) if name.split(".")[0] in above}
        assert not wrong, f"{path.relative_to(ROOT)} imports {min(wrong)}, which stands above it"


def reached(start: str, arrows: dict[str, set[str]]) -> set[str]:
    """The modules that one imports, and those that these import, and so on."""
    found, left = set(), [start]
    while left:
        new = arrows.get(left.pop(), set()) - found
        found |= new
        left += new
    return found


def test_what_is_imported_by_what_is_imported_is_seen():
    assert reached("a", {"a": {"b"}, "b": {"c", "a"}, "d": {"e"}}) == {"a", "b", "c"}


def test_lessons_and_sources_do_not_know_each_other():
    files = {name_of(path).removesuffix(".__init__"): path for path in FILES}
    arrows = {name: imported(path) & files.keys() for name, path in files.items()}
    for one, other in (("lessons", "sources"), ("sources", "lessons")):
        for name in (name for name in files if name.startswith(f"evidence.{one}.")):
            wrong = {n for n in reached(name, arrows) if n.startswith(f"evidence.{other}.")}
            assert not wrong, f"{name} leads to {min(wrong)}"


@pytest.mark.parametrize("path", sorted((ROOT / "helpers").glob("[!_]*.py")), ids=lambda p: p.stem)
def test_arrows_inside_of_helpers_are_those_that_are_drawn(path):
    inside = {n.split(".")[1] for n in imported(path) if n.startswith("helpers.")}
    assert inside <= HELPERS[path.stem]


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """The modules that import each other in a circle, if there is one: none can be put first."""
    left = {name: set(below) for name, below in arrows.items()}
    while free := [name for name, below in left.items() if not below & left.keys()]:
        for name in free:
            del left[name]
    return sorted(left)


def test_a_circle_is_seen():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]
    assert circle({"a": {"b", "elsewhere"}, "b": set()}) == []


@pytest.mark.parametrize("package", THERE)
def test_modules_of_a_package_import_no_circle(package):
    files = {name_of(path).removesuffix(".__init__"): path for path in FILES}
    files = {name: path for name, path in files.items() if name.split(".")[0] == package}
    arrows = {name: imported(path) & files.keys() - {name} for name, path in files.items()}
    # A package's __init__ gathers its modules, and a module that it gathers may import a sibling.
    gathering = {name for name, path in files.items() if path.stem == "__init__"}
    arrows = {name: below - gathering for name, below in arrows.items()}
    assert circle(arrows) == []


# ---------------------------------------------------------------------------------------- the sizes
def code_lines(source: str) -> set[int]:
    """The lines that hold code: no comments, no docstrings, no empty ones."""
    quiet = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    kept = set()
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    skipped |= {tokenize.ENDMARKER}  # it stands below the last line
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped:
            kept |= set(range(token.start[0], token.end[0] + 1))
    return kept - quiet


def long_functions(source: str) -> list[tuple[str, int]]:
    """Functions with more lines of code than fit on a screen, and how many they have."""
    code, found = code_lines(source), []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = sum(node.lineno <= line <= node.end_lineno for line in code)
            found += [(node.name, lines)] if lines > FUNCTION else []
    return found


def test_a_long_function_is_seen_and_what_it_says_is_not_counted():
    body = "\n".join(f"    x = {n}" for n in range(FUNCTION - 1))
    said = '    """One\n    two\n    three."""\n    # four\n\n'
    assert long_functions(f"def f():\n{said}{body}\n") == []
    assert long_functions(f"def f():\n{said}{body}\n    y = 1\n") == [("f", FUNCTION + 1)]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_function_fits_on_a_screen_and_a_module_is_read_in_one_go(path):
    source, most = path.read_text(encoding="utf-8"), MODULE.get(name_of(path).split(".")[0], 300)
    lines, long = source.count("\n"), long_functions(source)
    assert lines <= most, f"{path.relative_to(ROOT)} has more than {most} lines"
    assert not long


# -------------------------------------------------------------------------------------- what is run
def test_the_table_of_targets_is_that_of_the_makefile_and_the_files():
    old = table.PAGE.read_text(encoding="utf-8")
    assert old == table.page(old), "run make outputs: tools/README.md is out of date"


@pytest.fixture
def house(tmp_path):
    """A Makefile of two targets with their files."""
    (tmp_path / "tools" / "shared").mkdir(parents=True)
    (tmp_path / "Makefile").write_text(
        ".PHONY: run \\\n\tcheck-rows\nrun:\n\tpython -m tools.run\n"
    )
    (tmp_path / "tools" / "run.py").write_text('"""Run it.\n\nWrites: a,\nb\n"""\n')
    (tmp_path / "tools" / "check_rows.py").write_text('"""Check them.\n\nWrites: nothing\n"""\n')
    return tmp_path


def test_a_target_has_a_file_and_a_file_a_target(house):
    first, second = table.rows(house)
    assert first == ("run", "tools/run.py", "Run it.", "a, b") and second.name == "check-rows"
    (house / "tools" / "lost.py").write_text('"""Lost.\n\nWrites: nothing\n"""\n')
    with pytest.raises(LookupError, match="tools/lost.py has no target"):
        table.rows(house)
    (house / "tools" / "lost.py").unlink()
    (house / "tools" / "run.py").unlink()
    with pytest.raises(LookupError, match="make run has no file: tools/run.py"):
        table.rows(house)


def test_a_target_may_be_the_command_of_a_package(house):
    (house / "tools" / "run.py").unlink()
    (house / "run").mkdir()
    (house / "run" / "__main__.py").write_text('"""Run all.\n\nWrites: c\n"""\n')
    assert table.rows(house)[0].file == "run/__main__.py"


def test_a_file_says_what_it_writes(house):
    (house / "tools" / "run.py").write_text('"""Run it."""\n')
    with pytest.raises(LookupError, match="tools/run.py does not end with what it writes"):
        table.rows(house)
