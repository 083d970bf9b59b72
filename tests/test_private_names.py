"""The canary: private names of libraries that the packages lean on, and whether they are there.

They are collected from the source, so that none is forgotten: what is imported, what is replaced
(`patch.object(owner, "name", ...)` and the rows (owner, "name", function) of a table), and every
attribute that begins with an underscore. When a new version moves one, its test names it. The
packages themselves are not imported, so that it can speak when they no longer can be.
"""

import ast
import ctypes
import importlib
import importlib.util
import re
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PACKAGES = ("fake_cuda", "helpers", "planner")
LIBRARIES = ("torch", "transformers", "accelerate", "bitsandbytes", "safetensors", "peft")
LIBRARIES += ("huggingface_hub", "datasets", "tokenizers", "multiprocessing", "os", "sys")
LIBRARIES += tuple(name for name in ("triton", "liger_kernel") if importlib.util.find_spec(name))
# Private attributes of values, whose kind the source does not say: something that has them.
OWNERS = {
    "_buffers _forward_hooks _forward_pre_hooks _parameters": lambda: torch.nn.Linear(1, 1),
    "_can_decompose _schema": lambda: torch.ops.aten.mm.default,
    "_cdata": lambda: torch.ones(1).untyped_storage(),
    "_allow_unsafe_data_ptr_access _output_from_cache_entry": lambda: find(
        "torch._subclasses.fake_tensor.FakeTensorMode"
    )(),
    "_auto_collation _base_seed _collate_fn _dataset _dataset_kind _drop_last": lambda: iter(
        torch.utils.data.DataLoader([1])
    ),
    "_destroy": lambda: torch.library.Library,
    "_enabled": lambda: torch.autocast("cpu"),
    "_has_symbolic_sizes_strides _is_view _use_count": lambda: torch.ones(1),
    "_PyEval_EvalFrameDefault _PyInterpreterState_GetEvalFrameFunc "
    "_PyInterpreterState_SetEvalFrameFunc": lambda: ctypes.pythonapi,
    "_quantize": lambda: find("bitsandbytes.nn.Params4bit"),
    "_replace": lambda: namedtuple("One", "part")(1),
    "_untyped_storage": lambda: torch.ones(1).storage(),
}
# Asked for before it is used: a build for CUDA has it.
OPTIONAL = {"torch._C._cuda_clearCublasWorkspaces", "torch._C._cuda_getCurrentRawStream"}
# What replaces whatever it is told to: those who tell it are seen.
PASSED_ON = {
    ("fake_cuda/here.py", "owner"),
    ("fake_cuda/compiled_card.py", "owner"),
    ("fake_cuda/scripts/compiling.py", "owner"),
}


def find(path: str):
    """The object of a dotted path: the longest part that is a module, then its attributes."""
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ImportError(path)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


class Leaned(ast.NodeVisitor):
    """What a source takes from libraries: `paths` by name, `attributes` of values."""

    def __init__(self):
        self.names: dict[str, set[str]] = {}  # a name here: paths that it may stand for
        self.paths: set[str] = set()
        self.attributes: set[str] = set()
        self.own: set[str] = set()  # names that the source itself gives
        self.unknown: set[str] = set()  # owners in `patch.object` of which no path is known

    def path(self, node) -> set[str]:
        """The paths that an expression may stand for; none of what is not a library's."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, set())
        if isinstance(node, ast.Attribute):
            return {f"{path}.{node.attr}" for path in self.path(node.value)}
        if isinstance(node, ast.Tuple | ast.List):
            return {path for one in node.elts for path in self.path(one)}
        return set()

    def bind(self, target, value) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, other in zip(target.elts, value.elts, strict=False):
                self.bind(one, other)
        elif isinstance(target, ast.Name) and self.path(value):
            self.names[target.id] = self.names.get(target.id, set()) | self.path(value)

    def visit_Import(self, node):
        for alias in node.names:
            if alias.name.split(".")[0] in LIBRARIES:
                self.paths.add(alias.name)
                name = alias.asname or alias.name.split(".")[0]
                self.names.setdefault(name, set()).add(alias.name if alias.asname else name)

    def visit_ImportFrom(self, node):
        if not node.level and node.module.split(".")[0] in LIBRARIES:
            for alias in node.names:
                path = f"{node.module}.{alias.name}"
                self.paths.add(path)
                self.names.setdefault(alias.asname or alias.name, set()).add(path)
        elif node.level:
            self.own |= {alias.asname or alias.name for alias in node.names}

    def visit_Assign(self, node):
        for target in node.targets:
            self.bind(target, node.value)
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            self.own |= {part.attr for part in parts if isinstance(part, ast.Attribute)}
        self.generic_visit(node)

    def visit_For(self, node):
        self.bind(node.target, node.iter)
        self.generic_visit(node)

    def visit_FunctionDef(self, node):
        self.own.add(node.name)
        outside, given = self.names, node.args
        arguments = {a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
        self.names = {name: paths for name, paths in outside.items() if name not in arguments}
        self.generic_visit(node)
        self.names = outside

    def visit_ClassDef(self, node):
        self.own.add(node.name)
        self.generic_visit(node)

    def visit_Attribute(self, node):
        paths = self.path(node)
        self.paths |= paths
        if not paths and is_private(node.attr):
            self.attributes.add(node.attr)
        self.generic_visit(node)

    def visit_Tuple(self, node):
        self.replaced(node.elts)
        self.generic_visit(node)

    def visit_Call(self, node):
        if isinstance(node.func, ast.Attribute) and node.func.attr == "object":  # patch.object
            self.replaced(node.args)
            name = next(n.id for n in ast.walk(node.args[0]) if isinstance(n, ast.Name))
            if not self.path(node.args[0]) and name not in self.own:
                self.unknown.add(ast.unparse(node.args[0]))
        self.generic_visit(node)

    def visit_Constant(self, node):
        text = node.value if isinstance(node.value, str) else ""
        if re.fullmatch(r"torch([.]\w+)+", text) and "._" in text:  # a module, by its name
            self.paths.add(text)

    def replaced(self, row: list) -> None:
        """(owner, "name", ...) names what is replaced."""
        if len(row) > 1 and isinstance(row[1], ast.Constant) and str(row[1].value).isidentifier():
            self.paths |= {f"{path}.{row[1].value}" for path in self.path(row[0])}


def leaned_on(source: str) -> Leaned:
    found, tree = Leaned(), ast.parse(source)
    for _ in range(2):  # functions use names that their module binds below
        found.visit(tree)
    return found


def of_the_packages() -> Iterator[tuple[str, Leaned]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), leaned_on(path.read_text("utf-8"))


FOUND = dict(of_the_packages())


def missing(paths: set[str]) -> list[str]:
    """Those of some paths at which there is nothing."""
    gone = []
    for path in sorted(paths - OPTIONAL):
        try:
            find(path)
        except (AttributeError, ImportError):
            gone.append(path)
    return gone


@pytest.mark.parametrize("file", FOUND)
def test_names_of_libraries_are_still_there(file):
    gone = missing(FOUND[file].paths)
    assert not gone, f"torch {torch.__version__}: {file} leans on what is no longer there: {gone}"


@pytest.mark.parametrize("names", OWNERS)
def test_private_attributes_of_values_are_still_there(names):
    owner = OWNERS[names]()
    gone = [name for name in names.split() if not hasattr(owner, name)]
    assert not gone, f"torch {torch.__version__}: {type(owner).__name__} no longer has {gone}"


def test_of_every_private_attribute_somebody_says_who_has_it():
    ours = set().union(*(found.own for found in FOUND.values()))
    known = {name for names in OWNERS for name in names.split()}
    used = {name for found in FOUND.values() for name in found.attributes} - ours
    assert used == known, f"add to OWNERS {used - known}, take out {known - used}"


def test_of_everything_that_is_replaced_the_owner_is_known():
    unknown = {(file, owner) for file, found in FOUND.items() for owner in found.unknown}
    assert unknown == PASSED_ON


def test_names_are_found_however_they_are_written():
    found = leaned_on("""
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState, PartialState as state
aten, two = torch.ops.aten, 2
def replaced(tensor, torch_like):
    for kind in (AcceleratorState, state):
        with mock.patch.object(kind, "_shared_state", {}), patch.object(tensor, "x", 1):
            yield F, "_gone", None
    graph = torch.autograd.graph
    graph._below(tensor._here, torch_like.x, kernels._ours, "torch._dynamo.frames")
    return aten._kernel.default
def other(torch):
    torch._of_an_argument()
    kernels._ours = 1
""")
    names = {path for path in found.paths if "._" in path}
    assert names == {
        "accelerate.state.AcceleratorState._shared_state",
        "accelerate.state.PartialState._shared_state",
        "torch.nn.functional._gone",
        "torch.autograd.graph._below",
        "torch._dynamo.frames",
        "torch.ops.aten._kernel",
        "torch.ops.aten._kernel.default",
    }
    assert found.attributes - found.own == {"_here", "_of_an_argument"}
    assert found.unknown == {"tensor"}
    gone = ["torch._dynamo.frames", "torch.autograd.graph._below", "torch.nn.functional._gone"]
    assert missing(names - {"torch.ops.aten._kernel", "torch.ops.aten._kernel.default"}) == gone
    assert missing({"torch.ops.aten._kernel"}) == ["torch.ops.aten._kernel"]
