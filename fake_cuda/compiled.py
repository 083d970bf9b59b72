"""torch.compile in a simulation: the compiler plans as it would, and its plan is run.

TorchDynamo and AOTAutograd take graphs out of the code as always: where they break, what is saved
for backward, what is computed again. In Inductor's place stands `compiled_plan`, whose functions
run on the simulation's fake tensors. Nothing is imported before the first call of compiled code.
"""

import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.nn.modules import module as modules
from torch.utils._python_dispatch import _disable_current_modes

from .choices import flex
from .mode import OneMode
from .operations import in_backward
from .refusals import NotSimulated
from .scratch import PRODUCTS
from .trace import Trace

MODE = "torch.compile's {}, whose memory is not known here: take its default mode"
FAILED = "code that torch.compile does not take for a card that is not there ({})"
TIME = (
    "Of compiled code's time the host's part of a call is not known, which counts in steps of "
    "about a millisecond and less; products that it pads are not padded."
)
FLEX = "torch.nn.attention.flex_attention"  # its kernel is one of its own: choices/flex
FLEX_ITSELF = "_flex_attention_hop_wrapper"  # which it compiles where nobody asks for it
COUNTS = "set_fullgraph_compiled_frame_count"  # since torch 2.13
aten = torch.ops.aten
NAMES = {"bias_addmm": "addmm"}  # of Inductor's products, as ATen calls them


class Compiler:
    """Compiles for the card of a trace, and runs what was planned.

    `scripts.compiling` has one for scripts, which does otherwise what stands here first.
    """

    finding = planning = running = staticmethod(nullcontext)  # around what they are named for

    def skips(self, frame) -> "tuple[bool, bool]":
        """Whether a frame is not compiled, and whether what it calls is asked for all the same."""
        ours = frame.f_globals.get("__name__", "").startswith(("fake_cuda.", FLEX))
        return ours or self.trace.refused is not None, False

    def fails(self, frame, error: Exception) -> None:
        """A frame cannot be compiled.

        Raised with the next operation: raised here, it would leave TorchDynamo's evaluation of
        frames switched on for the rest of the process.
        """
        self.trace.refused = self.in_words(error)

    def plainly(self, graph: torch.fx.GraphModule, args: list) -> tuple | None:
        """What a graph returns that is not compiled for the card; None of what is."""

    def refuses(self, mode: str) -> None:
        """A mode is asked for whose memory is not known."""
        raise NotSimulated.uses(MODE.format(mode))

    def __init__(self, trace: Trace):
        self.trace = trace
        self.codes: set = set()  # code that was compiled
        self.attention: Callable = F.scaled_dot_product_attention

    def callback(self, original: Callable):
        """In the place of TorchDynamo's `_callback_from_stance`, which names what compiles a call.

        A hack: where TorchDynamo no longer asks there, compiled code runs as eager code, or fails.
        """
        if original in (False, None):
            return original

        def convert(frame, *given, **options):
            self.trace.work.compiles |= frame.f_code.co_name != FLEX_ITSELF
            skipped, alone = self.skips(frame)
            if skipped:
                return _skipped(alone)
            self.codes.add(frame.f_code)
            self.trust(original)
            try:
                with self.alone():
                    return original(frame, *given, **options)
            except Exception as error:  # noqa: BLE001
                self.fails(frame, error)
                return _skipped()

        convert._torchdynamo_orig_backend = original  # by which it finds what was compiled before
        return convert

    def trust(self, original) -> None:
        """Compiled code asks at each call whether what it was compiled from is still there. Of
        functions that a simulation replaces it is not, and that is of no concern."""
        hooks = original.hooks
        if getattr(hooks, "guard_filter_fn", None) is not None:
            return
        functions = [before for _, _, before in self.trace.here.before]
        parts = [getattr(f, "__code__", None) for f in functions]
        known = {id(part) for part in functions + parts if part is not None}
        hooks.guard_filter_fn = lambda guards: [
            id(guard.value) not in known and guard.guard_type != "TORCH_FUNCTION_STATE"
            for guard in guards
        ]

    def in_words(self, error: Exception) -> Exception:
        cause = error
        while cause is not None:
            if isinstance(cause, NotSimulated):
                return cause
            cause = cause.__cause__ or cause.__context__
        from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError, Unsupported

        if isinstance(error, Unsupported | BackendCompilerFailed | InternalTorchDynamoError):
            first = str(error).strip().splitlines()
            text = next((x for x in first[1:] if x.strip()), first[0]) if first else type(error)
            return NotSimulated.uses(FAILED.format(str(text).strip()[:200]))
        return error

    @contextmanager
    def alone(self) -> Iterator[None]:
        """The compiler works on what it would find without a simulation around it."""
        from torch._dynamo.variables import optimizer

        hooks = dict(modules._global_forward_pre_hooks)
        modules._global_forward_pre_hooks.clear()
        # It asks what only a build for CUDA has; without CUDA graphs the answer is of no concern.
        static = patch.object(optimizer, "_is_static_for_cudagraphs", lambda _: True)
        placed = flex.on_card(self.trace.cuda)
        try:
            with _disable_current_modes(), self.trace.here.originals(), static, placed:
                with self.finding():
                    yield
        finally:
            modules._global_forward_pre_hooks.update(hooks)

    def compile_fx(self, original: Callable) -> Callable:
        """`torch._inductor.compile_fx.compile_fx`, whose last step is ours."""

        def compile_fx(module, inputs, inner_compile=None, **options):
            if inner_compile is None:
                self.as_the_card(module)
                inner_compile = self.inner
            return original(module, inputs, inner_compile=inner_compile, **options)

        return compile_fx

    def as_the_card(self, module: torch.fx.GraphModule) -> None:
        """Attention takes the card's kernel, and autocast for CUDA is one for fake tensors."""
        enter = torch.amp.autocast_mode._enter_autocast
        parts = [part for part in module.modules() if isinstance(part, torch.fx.GraphModule)]
        for part in parts:  # a checkpointed layer is one of its own
            for node in part.graph.nodes:
                if node.target is F.scaled_dot_product_attention and self.trace.cuda:
                    node.target = self.attention
                if node.target is enter and node.args[0] == "cuda":
                    node.args = ("cpu", *node.args[1:])
            part.recompile()

    def inner(self, module: torch.fx.GraphModule, inputs, **options) -> Callable:
        """`compile_fx_inner`: a graph of ATen's operations becomes a function of a list."""
        from torch._inductor import config

        from .compiled_plan import Graph, copy_of, planned, runnable

        if config.max_autotune or config.max_autotune_gemm:
            self.refuses("autotuning (mode='max-autotune')")
        if config.triton.cudagraphs:
            self.refuses("CUDA graphs (mode='reduce-overhead')")
        backward = bool(options.get("is_backward"))
        whole = copy_of(module)
        graph = Graph(module, list(inputs), backward, bool(options.get("is_inference")))
        with _disable_current_modes(), self.trace.here.originals(), self.planning():
            plan = planned(graph, self.trace.card)
        context = torch._guards.TracingContext.try_get()
        if context is not None and context.output_strides is not None:
            context.output_strides.extend(plan.strides)
        planned_call = runnable(plan, self.kernel, self.extern)

        def call(args: list):
            if (out := self.plainly(whole, args)) is not None:
                return out
            if not in_backward():
                self.trace.phase("forward")
            before, self.trace.work.compiled = self.trace.work.compiled, True
            try:
                # Its views are none of autograd's.
                with torch._C._AutoDispatchBelowAutograd(), self.running():
                    return planned_call(args)
            finally:
                self.trace.work.compiled = before

        call._boxed_call = True  # it empties its list, so that arguments can die
        return call

    def kernel(self, moved: int) -> None:
        """A fused kernel: its bytes."""
        if self.trace.cuda:
            self.trace.work.note(TIME, self.trace)
            self.trace.work.add(self.trace, "compiled", "stream", (), moved)

    def extern(self, name: str, args: tuple, out: torch.Tensor) -> None:
        """A product in a library, or flex attention, whose result was allocated beforehand."""
        if name in flex.PLANNED:
            return flex.planned(self.trace, name, args)
        operation = getattr(aten, NAMES.get(name, name)).default
        if operation not in PRODUCTS:
            raise NotSimulated.uses(FAILED.format(f"it calls {name}"))
        if self.trace.cuda:
            self.trace.work.see(operation, args, {}, [out], self.trace)
            self.trace.inside(operation, args)


def _skipped(alone: bool = False):
    """This frame and, if not `alone`, all that it calls is left to Python; next time it is asked
    for anew."""
    from torch._dynamo.types import ConvertFrameReturn, FrameAction, FrameExecStrategy

    inside = FrameAction.DEFAULT if alone else FrameAction.SKIP
    return ConvertFrameReturn(
        frame_exec_strategy=FrameExecStrategy(FrameAction.SKIP, inside), apply_to_code=False
    )


def _never(code: types.CodeType) -> None:
    """This code and all that it calls is left to Python. Torch would put a guard around each
    dispatch instead, which takes longer than a small operation (utils/_python_dispatch.py)."""
    from torch._dynamo.eval_frame import set_code_exec_strategy
    from torch._dynamo.types import FrameAction, FrameExecStrategy

    set_code_exec_strategy(code, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))


@contextmanager
def compiled(trace: Trace, compiler: Compiler) -> Iterator[None]:
    """Compiled code is planned for the card of a trace; the process is left without its traces."""
    from torch._dynamo import eval_frame

    for mode in (OneMode, Trace):
        _never(mode.__torch_dispatch__.__code__)
    stance = eval_frame._callback_from_stance
    compiler.attention = F.scaled_dot_product_attention  # by now as the card chooses it
    with ExitStack() as stack:
        prepared = False

        def callback(original):
            nonlocal prepared
            if original not in (False, None) and not prepared:
                stack.enter_context(_prepared(compiler))
                prepared = True
            return compiler.callback(stance(original))

        counts = ()
        if hasattr(eval_frame, COUNTS):  # it says no error where all of a full graph was skipped
            counts = ((eval_frame, COUNTS, lambda _: 0),)
        with trace.here.replaced((eval_frame, "_callback_from_stance", callback), *counts):
            yield


@contextmanager
def _prepared(compiler: Compiler) -> Iterator[None]:
    """What is set before the first compilation and forgotten after the last.

    What the compiler keeps by code is the whole process's. What it learned of changing sizes is
    kept apart; of code that was compiled in a simulation everything is forgotten, so that a model
    of the caller's with the same code is compiled once more.
    """
    import torch._functorch.config as functorch
    from torch._dynamo import pgo, reset_code
    from torch._dynamo.backends.cudagraphs import CudagraphsBackend
    from torch._inductor import compile_fx, config

    def in_graphs(module, inputs, **_):  # else this backend finds a CPU, and runs it as it is
        compiler.refuses("CUDA graphs (backend='cudagraphs')")
        return compile_fx.compile_fx(module, inputs)

    # Not by `here.replaced`, whose originals the compiler finds.
    instead = compiler.trace.here.instead(
        compile_fx.compile_fx, compiler.compile_fx(compile_fx.compile_fx)
    )
    with (
        patch.object(pgo, "_CODE_STATE", defaultdict(pgo.CodeState)),
        config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        functorch.patch(enable_autograd_cache=False),
        patch.object(compile_fx, "compile_fx", instead),
        patch.object(CudagraphsBackend, "__call__", staticmethod(in_graphs)),
    ):
        try:
            yield
        finally:
            for code in compiler.codes:
                reset_code(code)
