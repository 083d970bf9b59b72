"""torch.compile in a script: planned for its card where the compiler takes it, else run eager."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch.overrides import _pop_mode, _push_mode
from torch.utils._pytree import tree_map_only

from ..compiled import Compiler
from ..refusals import USES
from ..trace import Trace
from .host import CPU, CUDA, Where
from .moves import is_card

EAGER = "torch.compile was run as eager code{}: compiled code plans its own memory and time."
PLANNED = "{} was planned as torch.compile's default mode: what it takes besides is not counted."
# What modes switch on, which takes memory that no plan tells.
OFF = {"max_autotune": False, "max_autotune_gemm": False, "triton.cudagraphs": False}


class ScriptCompiler(Compiler):
    """Compiles what a script asks for. What cannot be compiled is run as it is, and said."""

    def __init__(self, trace: Trace, run):
        super().__init__(trace)
        self.run = run
        self.left: set = set()  # code that cannot be compiled
        self.calls_modules = None  # code of ours that calls the script's

    def begin(self, where: Where, card: list[tuple], before: list[tuple]) -> None:
        """The changes of a `Run` stand.

        Args:
            where: says what is on the card.
            card: (owner, name, what stood there) of what tells of the card: code may ask for it
                while it is compiled, but Inductor has a card of its own.
            before: the same of all else that was changed, of which the compiler finds nothing.
        """
        self.where, self.card = where, card
        self.trace.here.before += before
        self.calls_modules = torch.nn.Module._call_impl.__code__
        if not self.run.attempt.compiles:
            self.run.note(EAGER.format(""))

    def skips(self, frame) -> tuple[bool, bool]:
        code = frame.f_code
        if not self.run.attempt.compiles or code in self.left:
            return True, False
        return super().skips(frame)[0], code is self.calls_modules

    def fails(self, frame, error: Exception) -> None:
        code = frame.f_code
        self.left.add(code)
        why = str(self.in_words(error)).removeprefix(USES.format(""))
        self.run.note(EAGER.format(f" in {code.co_qualname} ({why})"))

    def plainly(self, graph: torch.fx.GraphModule, args: list) -> tuple | None:
        """What the host computes is computed."""
        if self.where.on_card(args):
            return None
        given, args[:] = list(args), []
        return graph(*given)

    def refuses(self, mode: str) -> None:
        self.run.note(PLANNED.format(mode[0].upper() + mode[1:]))

    def running(self):
        return self.where.to(True)

    @contextmanager
    def finding(self) -> Iterator[None]:
        with _without_functions(), _on_the_card():
            yield

    @contextmanager
    def planning(self) -> Iterator[None]:
        from torch._inductor import config

        with ExitStack() as stack:
            for owner, name, original in reversed(self.card):
                stack.enter_context(patch.object(owner, name, original))
            stack.enter_context(config.patch(OFF))
            yield


@contextmanager
def _without_functions() -> Iterator[None]:
    """No mode for functions is on: the compiler would take it for a part of the code."""
    modes = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


@contextmanager
def _on_the_card() -> Iterator[None]:
    """Code that is compiled is told that its tensors lie on the card; in graphs it is the CPU."""
    from torch._dynamo.output_graph import SubgraphTracer
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.tensor import TensorVariable

    make = SubgraphTracer.create_proxy

    def moved(value):
        return tree_map_only((str, torch.device), lambda v: CPU if is_card(v) else v, value)

    def create_proxy(tracer, kind, target, args, kwargs, *rest, **options):
        if target is not torch.amp.autocast_mode._enter_autocast:
            args, kwargs = moved(args), moved(kwargs)
        return make(tracer, kind, target, args, kwargs, *rest, **options)

    with (
        patch.object(SubgraphTracer, "create_proxy", create_proxy),
        patch.object(
            TensorVariable, "method_attr_device", lambda _, tx: VariableTracker.build(tx, CUDA)
        ),
        patch.object(
            TensorVariable, "method_attr_is_cuda", lambda _, tx: VariableTracker.build(tx, True)
        ),
    ):
        yield
