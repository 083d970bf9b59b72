"""The exercises of a stored lesson, and the cells that the check of one needs."""

import ast
import linecache
import symtable
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from IPython.core.inputtransformer2 import TransformerManager
from nbformat import NotebookNode

import helpers
import notebook_rules as rules

# In Python 3.11 these are functions of their own, and yet they run at once.
AT_ONCE = {"listcomp", "setcomp", "dictcomp", "genexpr"}


@dataclass(frozen=True)
class Names:
    """The names that a cell binds, reads while it runs, and reads later, inside of functions."""

    bound: frozenset[str]
    now: frozenset[str]
    later: frozenset[str]


def names(source: str) -> Names:
    """Statement by statement: what an earlier one of the same cell binds is not read from above."""
    bound, now, later = set(), set(), set()
    for statement in ast.parse(source).body:
        found = _names(ast.unparse(statement))
        # A loop reads what it binds itself; an assignment reads before it binds.
        own = set() if isinstance(statement, ast.Assign | ast.AugAssign) else found.bound
        now |= found.now - own - bound
        later |= found.later
        bound |= found.bound
    return Names(frozenset(bound), frozenset(now), frozenset(later - bound))


def _names(source: str) -> Names:
    table = symtable.symtable(source, "cell", "exec")
    bound = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}
    now = {s.get_name() for s in table.get_symbols() if s.is_referenced()}
    later = set()

    def look(inner: symtable.SymbolTable, at_once: bool) -> None:
        at_once = at_once and inner.get_name() in AT_ONCE
        found = {s.get_name() for s in inner.get_symbols() if s.is_global() and s.is_referenced()}
        (now if at_once else later).update(found)
        for child in inner.get_children():
            look(child, at_once)

    for child in table.get_children():
        bound |= {child.get_name()} - AT_ONCE - {"lambda"}
        look(child, True)
    return Names(frozenset(bound), frozenset(now), frozenset(later))


def needed(sources: list[str], own: str) -> list[int]:
    """The places of the cells, in order, that code below all of them needs, by its names.

    A name that is read while a cell runs is the one bound last before; a name that a function
    reads is the one bound last before the function is called, so the last of all.
    """
    cells = [names(source) for source in sources]
    found: set[int] = set()
    wanted = [(name, len(cells)) for name in names(own).now | names(own).later]
    while wanted:
        name, before = wanted.pop()
        places = [i for i in range(before) if name in cells[i].bound]
        if places and places[-1] not in found:
            place = places[-1]
            found.add(place)
            wanted += [(name, place) for name in cells[place].now]
            wanted += [(name, len(cells)) for name in cells[place].later]
    return sorted(found)


def python(cell: NotebookNode) -> str:
    return TransformerManager().transform_cell(cell.source)


ANSWERED: dict[tuple, object] = {}


def predict(workload, name=None, *, gpu="here", optimizer=None, **settings):
    """`helpers.predict`, which answers the same question of different checks only once."""
    if optimizer or not isinstance(workload, helpers.Workload) or workload.changes:
        options = {"gpu": gpu, "optimizer": optimizer} if optimizer else {"gpu": gpu}
        return helpers.predict(workload, name, **options, **settings)
    key = workload.title, workload.task, name, gpu, repr(sorted(settings.items()))
    if key not in ANSWERED:
        ANSWERED[key] = helpers.predict(workload, name, gpu=gpu, **settings)
    return ANSWERED[key]


def train(workload, name=None, **settings):
    """`helpers.train`, likewise: the check of each answer trains the same for comparison."""
    if callable(settings.get("optimizer") or settings.get("after")):
        return helpers.train(workload, name, **settings)
    key = id(workload), name, repr(sorted(settings.items()))
    if key not in ANSWERED:  # with the workload, whose id stays its own
        ANSWERED[key] = workload, helpers.train(workload, name, **settings)
    return ANSWERED[key][1]


@dataclass(frozen=True)
class Exercise:
    """The answer cell, the check below it, and the cells that both need."""

    before: tuple[str, ...]
    answer: str
    check: str

    def namespace(self) -> dict:
        """What stands after the cells that the check needs."""
        space = {"__name__": "__main__"}
        with redirect_stdout(StringIO()):
            for source in self.before:
                exec(compile(source, "<cell>", "exec"), space)
                for mine in (predict, train):
                    if space.get(mine.__name__) is getattr(helpers, mine.__name__):
                        space[mine.__name__] = mine
        return space

    def says(self, space: dict, answer: str) -> str:
        """What the check prints of an answer, written below the untouched answer cell."""
        space, printed = dict(space), StringIO()
        with redirect_stdout(printed):
            for source in (self.answer, answer, self.check):
                name = f"<cell {hash(source)}>"  # in a notebook a function has a source as well
                linecache.cache[name] = len(source), None, source.splitlines(True), name
                exec(compile(source, name, "exec"), space)
        return printed.getvalue()


def exercises(path: Path) -> Iterator[Exercise]:
    cells = rules.code(rules.read(path))
    ids = [cell.id for cell in cells]
    for check in (i for i, cell in enumerate(cells) if rules.is_check(cell)):
        answer = ids.index(cells[check].id.replace("check", "answer"))
        sources = [python(cell) for cell in cells]
        sources[0] = ""  # the Colab cell
        earlier = sources[:answer]
        before = needed(earlier, sources[answer] + "\n" + sources[check])
        yield Exercise(tuple(earlier[i] for i in before), sources[answer], sources[check])
