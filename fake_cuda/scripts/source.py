"""The code of a script, a module or a notebook."""

import importlib.util
import json
import linecache
import types
from collections.abc import Iterator
from pathlib import Path

MAGIC = ("%", "!", "?")
KEEPS = ("%%time", "%%timeit", "%%capture", "%%prun")  # cell magics whose cell is Python


def cells_or_code(path: str, module: bool, main: types.ModuleType) -> Iterator[types.CodeType]:
    """Code objects to run one after another in `main`, whose attributes are set.

    A module is found as by `python -m`. Of a notebook, lines for IPython itself are left out.
    """
    main.__dict__["__builtins__"] = __builtins__
    if module:
        spec = importlib.util.find_spec(path)
        if spec and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{path}.__main__")
        if spec is None:
            raise ModuleNotFoundError(f"No module named {path!r}", name=path)
        main.__dict__.update(__file__=spec.origin, __spec__=spec, __package__=spec.parent)
        yield spec.loader.get_code(spec.name)
        return
    main.__file__ = path
    text = Path(path).read_bytes()
    if not path.endswith(".ipynb"):
        yield compile(text, path, "exec")
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


def _plain(line: str) -> str:
    """The line, or one that does nothing in the place of one for IPython."""
    bare = line.lstrip()
    indent = line[: len(line) - len(bare)]
    return f"{indent}pass\n" if bare.startswith(MAGIC) or bare.rstrip().endswith("?") else line
