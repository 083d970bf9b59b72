"""What a launch of a Triton kernel moves: read from its arguments and, once, from its source."""

import ast
import functools
import inspect
import math
import textwrap
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from .products import size

# Functions of triton.language that follow a pointer.
ATOMIC = {f"atomic_{name}" for name in "add max min and or xor xchg cas".split()}
READS, WRITES = {"load"} | ATOMIC, {"store"} | ATOMIC


class Pointer(NamedTuple):
    """A tensor that a kernel is given."""

    tensor: torch.Tensor
    moved: int  # bytes
    written: bool


class Passes(NamedTuple):
    """How often a kernel goes over what an argument points to."""

    reads: int = 0
    writes: int = 0


class Count(NamedTuple):
    """Whole numbers that a kernel wrote, and what stands for each of them, if anything does."""

    kernel: str
    value: int | None


class Counts:
    """What kernels counted, by which their wrappers may choose: nobody knows these values."""

    def __init__(self):
        self.by_storage: dict[int, Count] = {}  # by a storage's address

    def wrote(self, pointers: list[Pointer], count: Count) -> None:
        for pointer in pointers:
            tensor = pointer.tensor
            if (
                pointer.written
                and isinstance(tensor, FakeTensor)
                and not tensor.is_floating_point()
            ):
                self.by_storage[tensor.untyped_storage()._cdata] = count
                tensor._known = None

    def follow(self, args, results: list[torch.Tensor]) -> None:
        """What is computed from counts, such as their sums, is known no better."""
        if not self.by_storage:
            return
        counts = (self.of(x) for x in tree_leaves(args) if isinstance(x, FakeTensor))
        if count := next(filter(None, counts), None):
            for result in results:
                if not result.is_floating_point():
                    self.by_storage[result.untyped_storage()._cdata] = count

    def of(self, tensor: torch.Tensor) -> Count | None:
        if not self.by_storage:
            return None
        return self.by_storage.get(tensor.untyped_storage()._cdata)

    def died(self, address: int) -> None:
        self.by_storage.pop(address, None)


def pointers(kernel, given: dict) -> list[Pointer]:
    """The tensors among the arguments of a launch, by name, and what it moves of each."""
    passes, found = _passes(kernel.fn), []
    for name, value in given.items():
        value = getattr(value, "base", value)  # a tensor descriptor's
        if isinstance(value, torch.Tensor):
            reads, writes = passes.get(name, Passes())
            found.append(Pointer(value, size(value) * max(1, reads + writes), writes > 0))
    return found


def programs(grid, given: dict) -> int | None:
    """How many programs are launched; None where the grid follows from what is not known here."""
    try:
        sides = grid(given) if callable(grid) else grid
        return math.prod(int(side) for side in sides)
    except (KeyError, TypeError, ZeroDivisionError):
        return None


@functools.cache
def _passes(function: Callable) -> dict[str, Passes]:
    """By argument, the places in a kernel's source that load or store what it points to.

    A load without a mask is one value, and does not count. Of branches the longer one counts.
    What another function does to a pointer is not seen.
    """
    try:
        kernel = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):  # made by exec: no source
        return {}
    names = [argument.arg for argument in kernel.args.args]
    counts = _Source({name: {name} for name in names}).blocks(kernel.body)
    return {name: Passes(counts[name, False], counts[name, True]) for name in names}


def _called(node: ast.AST) -> str:
    """The name of a function of triton.language that is called."""
    called = node.func if isinstance(node, ast.Call) else None
    return called.attr if isinstance(called, ast.Attribute) else ""


class _Source:
    """A kernel's source, read from above; `held`: a name, and arguments whose pointer it holds."""

    def __init__(self, held: dict[str, set[str]]):
        self.held = held

    def blocks(self, body: list[ast.stmt]) -> Counter:
        """Loads (False) and stores (True) by argument."""
        found: Counter = Counter()
        for statement in body:
            if isinstance(statement, ast.If):
                found += self.blocks(statement.body) | self.blocks(statement.orelse)
            elif isinstance(statement, ast.For | ast.While | ast.With):
                found += self.blocks(statement.body)
            else:
                for node in ast.walk(statement):
                    found += self.touched(node)
                self.assign(statement)
        return found

    def touched(self, node: ast.AST) -> Counter:
        name = _called(node)
        if name not in READS | WRITES or not node.args:
            return Counter()
        pointers = self.pointers(node.args[0])
        found = Counter((pointer, True) for pointer in pointers if name in WRITES)
        if name in READS and any(word.arg == "mask" for word in node.keywords):
            found += Counter((pointer, False) for pointer in pointers)
        return found

    def pointers(self, node: ast.AST) -> set[str]:
        """Arguments whose pointer an expression holds: what is loaded through one is a value."""
        if isinstance(node, ast.Name):
            return self.held.get(node.id, set())
        if _called(node) in READS:
            return set()
        return set().union(*(self.pointers(child) for child in ast.iter_child_nodes(node)))

    def assign(self, statement: ast.stmt) -> None:
        if not isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign):
            return
        value = self.pointers(statement.value) if statement.value else set()
        targets = getattr(statement, "targets", None) or [statement.target]
        for name in (target.id for target in targets if isinstance(target, ast.Name)):
            before = self.held.get(name, set())
            self.held[name] = value | before if isinstance(statement, ast.AugAssign) else value
