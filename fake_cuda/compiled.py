"""torch.compile in a simulation: the compiler plans as it would, and its plan is run.

TorchDynamo and AOTAutograd take graphs out of the code as always: where they break, what is saved
for backward, what is computed again. In Inductor's place stands `compiled_plan`, whose functions
run on the simulation's fake tensors. Nothing is imported before the first call of compiled code.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.nn.modules import module as modules
from torch.utils._python_dispatch import _disable_current_modes

from .operations import in_backward
from .refusals import NotSimulated
from .scratch import PRODUCTS
from .trace import Trace

MODE = "torch.compile's {}, whose memory is not known here: take its default mode"
FAILED = "code that torch.compile does not take for a card that is not there ({})"
BACKEND = "torch.compile with the backend {!r}: only inductor's plan is known"
TIME = "The time of compiled code is held to no measurement; products that it pads are not padded."
aten = torch.ops.aten
NAMES = {"bias_addmm": "addmm"}  # of Inductor's products, as ATen calls them


class Compiler:
    """Compiles for the card of a trace, and runs what was planned."""

    def __init__(self, trace: Trace):
        self.trace = trace
        self.codes: set = set()  # code that was compiled
        self.attention = F.scaled_dot_product_attention  # as the card chooses it

    def callback(self, original: Callable):
        """In the place of TorchDynamo's `_callback_from_stance`, which names what compiles a call.

        A hack: where TorchDynamo no longer asks there, compiled code runs as eager code, or fails.
        """
        if original in (False, None):
            return original

        def convert(frame, *given, **options):
            ours = frame.f_globals.get("__name__", "").startswith("fake_cuda.")
            if ours or self.trace.refused:
                return _skipped()
            self.codes.add(frame.f_code)
            self.trust(original)
            try:
                with self.alone():
                    return original(frame, *given, **options)
            except Exception as error:  # noqa: BLE001
                # Raised with the next operation: raised here, it would leave TorchDynamo's
                # evaluation of frames switched on for the rest of the process.
                self.trace.refused = self.in_words(error)
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
        hooks.guard_filter_fn = lambda guards: [id(guard.value) not in known for guard in guards]

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
        hooks = dict(modules._global_forward_pre_hooks)
        modules._global_forward_pre_hooks.clear()
        try:
            with _disable_current_modes(), self.trace.here.originals():
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
        for node in module.graph.nodes:
            if node.target is F.scaled_dot_product_attention and self.trace.cuda:
                node.target = self.attention
            if node.target is torch.amp.autocast_mode._enter_autocast and node.args[0] == "cuda":
                node.args = ("cpu", *node.args[1:])
        module.recompile()

    def inner(self, module: torch.fx.GraphModule, inputs, **options) -> Callable:
        """`compile_fx_inner`: a graph of ATen's operations becomes a function of a list."""
        from torch._inductor import config

        from .compiled_plan import Graph, planned, runnable

        if config.max_autotune or config.max_autotune_gemm:
            raise NotSimulated.uses(MODE.format("autotuning (mode='max-autotune')"))
        if config.triton.cudagraphs:
            raise NotSimulated.uses(MODE.format("CUDA graphs (mode='reduce-overhead')"))
        backward = bool(options.get("is_backward"))
        graph = Graph(module, list(inputs), backward, bool(options.get("is_inference")))
        with _disable_current_modes(), self.trace.here.originals():
            plan = planned(graph, self.trace.card)
        context = torch._guards.TracingContext.try_get()
        if context is not None and context.output_strides is not None:
            context.output_strides.extend(plan.strides)
        planned_call = runnable(plan, self.kernel, self.extern)

        def call(args: list):
            if not in_backward():
                self.trace.phase("forward")
            before, self.trace.work.compiled = self.trace.work.compiled, True
            try:
                with torch._C._AutoDispatchBelowAutograd():  # its views are none of autograd's
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
        """A product in a library, whose result was allocated beforehand."""
        operation = getattr(aten, NAMES.get(name, name)).default
        if operation not in PRODUCTS:
            raise NotSimulated.uses(FAILED.format(f"it calls {name}"))
        if self.trace.cuda:
            self.trace.work.see(operation, args, {}, [out], self.trace)
            self.trace.inside(operation, args)


def _skipped():
    """This frame, and all that it calls, is left to Python; next time it is asked for anew."""
    from torch._dynamo.types import ConvertFrameReturn, FrameAction, FrameExecStrategy

    return ConvertFrameReturn(
        frame_exec_strategy=FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP),
        apply_to_code=False,
    )


@contextmanager
def compiled(trace: Trace) -> Iterator[None]:
    """Compiled code is planned for the card of a trace; the process is left without its traces."""
    from torch._dynamo import eval_frame

    compiler = Compiler(trace)
    stance = eval_frame._callback_from_stance
    with ExitStack() as stack:
        prepared = False

        def callback(original):
            nonlocal prepared
            if original not in (False, None) and not prepared:
                stack.enter_context(_prepared(compiler))
                prepared = True
            return compiler.callback(stance(original))

        with trace.here.replaced((eval_frame, "_callback_from_stance", callback)):
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
    from torch._inductor import compile_fx, config

    # Not by `here.replaced`, whose originals the compiler finds.
    instead = compiler.trace.here.instead(
        compile_fx.compile_fx, compiler.compile_fx(compile_fx.compile_fx)
    )
    with (
        patch.object(pgo, "_CODE_STATE", defaultdict(pgo.CodeState)),
        config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        functorch.patch(enable_autograd_cache=False),
        patch.object(compile_fx, "compile_fx", instead),
    ):
        try:
            yield
        finally:
            for code in compiler.codes:
                reset_code(code)
