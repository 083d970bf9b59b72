"""The code of a script, a module or a notebook."""

import ast
import importlib.util
import json
import linecache
import shlex
import types
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from .watch import trained
from .words import STARTS, Stop, in_line

MAGIC = ("%", "!", "?")
KEEPS = ("%%time", "%%timeit", "%%capture", "%%prun")  # cell magics whose cell is Python

NO_PYTHON = "is no Python: it cannot be read{} ({})"
ONLY_SAYS = "is no script of Python: it states values, and neither imports nor calls anything"
EMPTY = "has no line of code"
SAYS = (ast.Assign, ast.AnnAssign, ast.Expr, ast.Pass)
TRIED = 200  # lines before a mistake, of which the last ones may be half of a statement


def cells_or_code(path: str, module: bool, main: types.ModuleType) -> Iterator[types.CodeType]:
    """Code objects to run one after another in `main`, whose attributes are set.

    A module is found as by `python -m`. Of a notebook, lines for IPython itself are left out.
    """
    main.__dict__["__builtins__"] = __builtins__
    if module:
        spec = importlib.util.find_spec(path)
        if spec and spec.submodule_search_locations is not None:
            path = f"{path}.__main__"
            spec = importlib.util.find_spec(path)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {path!r}", name=path)
        main.__dict__.update(__file__=spec.origin, __spec__=spec, __package__=spec.parent)
        yield spec.loader.get_code(spec.name)
        return
    main.__file__ = path
    text = Path(path).read_bytes()
    if not path.endswith(".ipynb"):
        yield _compiled(text, path)
        return
    main.__dict__.update(display=print)
    cells = [c for c in json.loads(text)["cells"] if c["cell_type"] == "code"]
    for number, cell in enumerate(cells, start=1):
        lines, name = "".join(cell["source"]).splitlines(keepends=True), f"{path}, cell {number}"
        if lines and lines[0].startswith("%%") and not lines[0].startswith(KEEPS):
            continue
        kept = [_plain(line) for line in lines]
        linecache.cache[name] = (len(kept), None, kept, name)
        yield compile("".join(kept), name, "exec")


def _compiled(text: bytes, path: str) -> types.CodeType:
    """`Stop` if it is the text of something else: a list of settings, or a mistake of which nothing
    that a script of Python has stands before."""
    try:
        code = compile(text, path, "exec")
    except SyntaxError as error:
        lines, at = text.splitlines(keepends=True), (error.lineno or 1) - 1
        if error.filename == path and not _acts(lines[:at]):
            while at and lines[at - 1].rstrip(b"\r\n").endswith(b"\\"):  # of the same line
                at -= 1
            words = trained(b"".join(lines[at:]))  # of a shell's script
            said = NO_PYTHON.format(in_line(error), error.msg)
            raise Stop(STARTS.format(shlex.join(words)) if words else said) from None
        raise
    tree = ast.parse(text)
    if not tree.body:
        raise Stop(EMPTY)
    if any(map(_setting, tree.body)) and all(isinstance(part, SAYS) for part in tree.body):
        if not _calls(tree):
            raise Stop(ONLY_SAYS)
    return code


def _setting(part: ast.AST) -> bool:
    """Whether it is a `name: value` without more, as in YAML, or the whole of a file of JSON."""
    if isinstance(part, ast.AnnAssign):
        return part.value is None
    return isinstance(part, ast.Expr) and isinstance(part.value, ast.Dict | ast.List)


def _acts(lines: list[bytes]) -> bool:
    """Whether the longest beginning of these lines that is Python calls or imports something."""
    for count in range(len(lines), max(-1, len(lines) - TRIED), -1):
        with suppress(SyntaxError, ValueError):
            return _calls(ast.parse(b"".join(lines[:count])))
    return True


def _calls(tree: ast.AST) -> bool:
    return any(isinstance(part, ast.Call | ast.Import | ast.ImportFrom) for part in ast.walk(tree))


def _plain(line: str) -> str:
    """The line, or one that does nothing in the place of one for IPython."""
    bare = line.lstrip()
    indent = line[: len(line) - len(bare)]
    return f"{indent}pass\n" if bare.startswith(MAGIC) or bare.rstrip().endswith("?") else line
