"""A hash of the code that made a recorded row, so that a row made by other code is known.

It covers a source's or lesson's module and every module of this repository that it goes through:
all of `fake_cuda` but what a run has to ask for, as one that is a script does; of
`helpers` and `planner` those that the names it imports lead to. What does nothing has no part in
it: comments, docstrings, layout. The libraries' versions stand in columns of their own.
"""

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from evidence.tables import ROOT

PACKAGES = ("evidence", "fake_cuda", "helpers", "planner")
# What no recorded run goes through, or only one that asks for it (scripts): the words of refusals,
# and the machinery that finds files and runs, and writes tables.
NOT_RUN = ("fake_cuda.scripts", "fake_cuda.refusals", "fake_cuda.files", "evidence.runs")
NOT_RUN += ("evidence.code", "evidence.tables")
# Modules of fake_cuda that a run has to ask for by one of these words, and that do nothing else:
# they count for evidence in whose own modules a word stands.
COMPILED = "compiled compiled_card compiled_plan"
ON_REQUEST = {
    "torch_compile": COMPILED,
    "value=Name(id='torch',ctx=Load()),attr='compile'": COMPILED,  # torch.compile in a syntax tree
    "liger": "launches choices.triton choices.liger",
    "triton": "launches choices.triton",
    "fully_shard": "shards wire",
    "arg='ranks'": "shards wire",  # a script that is one of several processes
}
SCRIPTS = "module='fake_cuda.scripts'"  # in evidence whose runs are scripts
DIGITS = 12  # of the hash, in hexadecimal: enough to tell some hundred states of the code apart


@cache
def code_hash(*modules: str, without: tuple[str, ...] = ()) -> str:
    """The hash of the code behind modules such as `evidence.sources.fms`; `without` some of it."""
    whole = hashlib.sha256()
    for name in sorted(modules_behind(*modules) - set(without)):
        whole.update(f"{name} {_meaning_of(name)}\n".encode())
    return whole.hexdigest()[:DIGITS]


def modules_behind(*modules: str) -> set[str]:
    """The names of the modules that the hash of `modules` covers."""
    found: dict[str, Path] = {}
    for module in modules:
        _follow(module, found)
    asking = [name for name in found if name.startswith(("evidence.", "planner."))]
    words = "\n".join(map(_meaning_of, asking))
    asked = {word for word in ON_REQUEST if word in words}
    scripts = _all_of("fake_cuda/scripts") if SCRIPTS in words else set()

    def homes(words: set[str]) -> set[str]:
        return {f"fake_cuda.{name}" for word in words for name in ON_REQUEST[word].split()}

    return (set(found) - (homes(set(ON_REQUEST)) - homes(asked))) | scripts


def _all_of(folder: str) -> set[str]:
    """The names of the modules in a folder of ours."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / folder).glob("*.py")
    }


def meaning(node: ast.AST | list | object) -> str:
    """A syntax tree as text, without positions, docstrings and what is empty.

    >>> meaning(ast.parse("a = 1  # one")) == meaning(ast.parse("a=1"))
    True

    It is the same for all versions of Python that parse the code alike: `ast.dump` is not.
    """
    if isinstance(node, list):
        return f"[{','.join(map(meaning, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
        fields["body"] = node.body[1:]
    told = (f"{name}={meaning(value)}" for name, value in fields.items() if value not in (None, []))
    return f"{type(node).__name__}({','.join(told)})"


@cache
def _meaning_of(module: str) -> str:
    return meaning(_parsed(_file(module)))


def _follow(module: str, found: dict[str, Path]) -> None:
    """Add a module's file and those behind its imports to `found`."""
    path = _file(module)
    if path is None or module in found or module.startswith(NOT_RUN):
        return
    found[module] = path
    for package, name in _imports(module, path):
        _follow(_home(package, name), found)


def _home(package: str, name: str) -> str:
    """The module that `from package import name` leads to: a submodule, or where a package that
    only collects names has it from (its HOMES: {name: module} or {module: "its names"})."""
    if name and _file(f"{package}.{name}"):
        return f"{package}.{name}"
    homes = _homes(package)
    named = [homes.get(name, ""), *(home for home, names in homes.items() if name in names.split())]
    return next((f"{package}.{home}" for home in named if _file(f"{package}.{home}")), package)


@cache
def _homes(package: str) -> dict[str, str]:
    path = _file(package)
    for node in _parsed(path).body if path else ():
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "HOMES":
            return ast.literal_eval(node.value)
    return {}


def _imports(module: str, path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of each name of ours that a file imports, wherever in it; "" for a module."""
    inside = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(_parsed(path)):
        if isinstance(node, ast.Import):
            names = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = inside[: len(inside) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            names = [(base, alias.name) for alias in node.names]
        else:
            continue
        yield from (pair for pair in names if pair[0].split(".")[0] in PACKAGES)


def _file(module: str) -> Path | None:
    """The file of a module of this repository."""
    if module.endswith("."):
        return None
    path = ROOT.joinpath(*module.split("."))
    ways = (path.with_suffix(".py"), path / "__init__.py")
    return next((way for way in ways if way.is_file()), None)


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))
