"""Flex attention as torch.compile makes it for a card: a kernel that leaves out blocks of its mask.

Its buffers are those of torch/_inductor/kernel/flex/flex_attention.py: forward the result, and of
each row in fp32 the sum and the largest score; backward three gradients and a number of each row.
Saved are queries, keys, values, result, sums, and the mask's blocks (AOTAutograd keeps what its
backward reads). How many blocks there are is known where the mask's values are.
"""

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from unittest.mock import patch

import torch
from torch.nn.attention import flex_attention as flex
from torch.utils._python_dispatch import _disable_current_modes

from ..products import TYPES, Attention, size
from ..refusals import FLEX, FLEX_EAGER, FLEX_LEARNED, NotSimulated
from ..trace import Trace
from ..values import known

MOST = 2**28  # pairs of a query and a key of which it is asked whether the mask lets them through
ALL_BLOCKS = (
    "Which blocks a mask of flex attention leaves out is not known: all are timed, as without it."
)
PARTS = ("full_kv_num_blocks", "full_kv_indices", "full_q_num_blocks", "full_q_indices")
# Where a kernel's arguments have the blocks of its mask: how many in part, which, how many in full.
FORWARD, BACKWARD = (5, 6, 7), (8, 9, 12)
PLANNED = dict.fromkeys(("flex_attention", "flex_decoding"), FORWARD)
PLANNED["flex_attention_backward"] = BACKWARD
RATE = "Flex attention is timed as FlashAttention-2, which is somewhat faster."


class FlexOnCPU(NotSimulated, NotImplementedError):
    """What flex attention's own check would raise, too."""


class Fused(torch.autograd.Function):
    """The kernel, forward and backward: `timed(moved, wide, back, ...)` notes its time."""

    @staticmethod
    def forward(ctx, timed, query, key, value, *blocks):
        like = torch.empty_like(query) if query.shape == value.shape else None
        shape = (*query.shape[:3], value.shape[-1])
        out = query.new_empty(shape) if like is None else like
        sums = query.new_empty(query.shape[:3], dtype=torch.float32)
        largest = torch.empty_like(sums)
        ctx.timed = timed
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(largest)
        ctx.save_for_backward(query, key, value, out, sums, *blocks)
        timed(query, key, value, False)
        return out, sums, largest

    @staticmethod
    def backward(ctx, grad_out, grad_sums, _):
        query, key, value, _, sums, *blocks = ctx.saved_tensors  # once: then they are gone
        of_rows = torch.empty_like(sums)
        grads = [torch.empty_like(query), *(_expanded(t, query) for t in (key, value))]
        ctx.timed(query, key, value, True)
        del of_rows
        if len(key) < len(query):
            grads[1:] = (grad.sum(0, keepdim=True) for grad in grads[1:])
        return None, *grads, *[None] * len(blocks)


def _expanded(tensor, query):
    """A gradient of keys or values: of one that all samples share, each has its own first."""
    return torch.empty_like(tensor.expand(len(query), *tensor.shape[1:]).contiguous())


def share(partial, indices, full) -> float | None:
    """The share of a mask's blocks that are computed; None if nobody knows it."""
    counts = [known(t) for t in (partial, full) if t is not None]
    if any(count is None for count in counts):
        return None
    with _disable_current_modes():
        return sum(count.double().mean().item() for count in counts) / indices.shape[-1]


def _kernel(trace: Trace, blocks: tuple) -> Callable:
    """What notes the time of a call with these blocks."""
    computed = share(*blocks[2:5])
    forward = trace.work.issued(trace)  # before autograd switches gradients off around its forward

    def timed(query, key, value, back: bool) -> None:
        issued = trace.work.issued(trace) if back else forward
        _note(trace, (query, key, value), computed, back, issued)

    return timed


def planned(trace: Trace, name: str, args: tuple) -> None:
    """A call in a graph that is compiled as a whole: its buffers are those of the plan.

    Args:
        trace: the run.
        name: of the kernel, in `PLANNED`.
        args: of the kernel, as torch/_inductor/kernel/flex lists its `input_nodes`.
    """
    partial, indices, full = (args[place] for place in PLANNED[name])
    computed = 1.0  # of one block, which stands for no mask
    if indices.numel() > 1:
        computed = share(partial, indices, full if full.numel() else None)
    back = PLANNED[name] is BACKWARD
    _note(trace, args[:3], computed, back, trace.work.issued(trace))


def _note(trace: Trace, given: tuple, computed: float | None, back: bool, issued: str) -> None:
    """Note the time of a kernel: two products forward and five backward of each pair."""
    query, key, value = given
    trace.work.note(RATE, trace)
    if computed is None:
        trace.work.note(ALL_BLOCKS, trace)
    wide = query.shape[-1] * (3 if back else 1) + value.shape[-1] * (2 if back else 1)
    pairs = query.numel() // query.shape[-1] * key.shape[-2]
    flops = 2.0 * pairs * wide * (1.0 if computed is None else computed)
    moved = (2 + back) * sum(map(size, given))
    work = Attention(flops, "flash", back, TYPES.get(query.dtype, "fp32"))
    again = issued == "forward" and trace.phases[-1] == "backward"
    trace.work.add(trace, issued, "attention", work, moved, 0, flops, again)


def _values(what):
    """A function with the values of the tensors that it knows; LookupError if nobody has them."""
    if isinstance(what, torch.Tensor):
        if known(what) is None:
            raise LookupError
        return known(what)
    if isinstance(what, list | tuple):
        return type(what)(map(_values, what))
    if isinstance(what, functools.partial):
        return functools.partial(_values(what.func), *_values(what.args), **what.keywords)
    if not isinstance(what, types.FunctionType) or not what.__closure__:
        return what
    cells = tuple(types.CellType(_values(cell.cell_contents)) for cell in what.__closure__)
    return types.FunctionType(
        what.__code__, what.__globals__, what.__name__, what.__defaults__, cells
    )


def learns(score_mod: Callable, query) -> bool:
    """Whether a gradient flows to what a function of scores reads, wherever it has that from: it
    is asked, unseen by the trace, for one score that needs no gradient itself."""
    if not torch.is_grad_enabled():
        return False
    with _disable_current_modes(), query.fake_mode:
        score, place = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
        ask = getattr(score_mod, "forward", score_mod)  # of a module, without hooks
        changed = ask(score, *[place] * 4)
    return isinstance(changed, torch.Tensor) and changed.requires_grad


def counted(mask_mod: Callable, sizes: tuple, block: tuple[int, int], apart: bool) -> list | None:
    """How many blocks of each row of blocks are masked in part, and how many not at all."""
    batch, heads, queries, keys = sizes
    if batch * heads * queries * keys > MOST:
        return None
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    rows, row = [], functools.partial(torch.arange, device="cpu")
    with _disable_current_modes(), suppress(Exception), TransformGetItemToIndex():
        ask = flex._vmap_for_bhqkv(_values(mask_mod), prefix=())
        for first in range(0, queries, block[0]):
            some = row(first, min(first + block[0], queries))
            mask = ask(row(batch), row(heads), some, row(keys))
            both = flex._convert_mask_to_block_mask(mask, *block, apart)
            rows.append([None if part is None else part.sum(-1) for part in both])
        parts = [[row[k] for row in rows] for k in range(1 + apart)]
        return [torch.cat(part, -1).int() for part in parts]
    return None


def block_mask_of(trace: Trace, original: Callable) -> Callable:
    """`create_block_mask` as it is compiled: without the mask of single pairs."""

    def create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device=None, *given, **options):
        if not (trace.work.compiles or options.get("_compile")):
            return original(mask_mod, B, H, Q_LEN, KV_LEN, device, *given, **options)
        names = ("BLOCK_SIZE", "_compile", "separate_full_blocks")
        options = dict(zip(names, given, strict=False)) | options
        block, apart = options.get("BLOCK_SIZE", 128), options.get("separate_full_blocks", True)
        block = (block, block) if isinstance(block, int) else tuple(block)
        made = functools.partial(
            torch.zeros,
            dtype=torch.int32,
            device=device or torch.accelerator.current_accelerator() or "cpu",
        )
        both, rows, columns = (B or 1, H or 1), -(-Q_LEN // block[0]), -(-KV_LEN // block[1])
        counts = counted(mask_mod, (*both, Q_LEN, KV_LEN), block, apart) or [None, None]
        parts = dict.fromkeys(PARTS)
        for kind, count in zip(("", "full_")[: 1 + apart], counts, strict=False):
            for of, (n, m) in dict(kv=(rows, columns), q=(columns, rows)).items():
                parts[f"{kind}{of}_num_blocks"] = made((*both, n))
                parts[f"{kind}{of}_indices"] = made((*both, n, m))
            parts[f"{kind}kv_num_blocks"]._known = count
        mask = flex.BlockMask((Q_LEN, KV_LEN), **parts, BLOCK_SIZE=block, mask_mod=mask_mod)
        return mask

    return create_block_mask


def attention_of(trace: Trace) -> Callable:
    """The operator `flex_attention` on the card of `trace`."""

    def attention(query, key, value, score_mod, block_mask, *_):
        if not trace.work.compiles:
            raise NotSimulated.uses(FLEX_EAGER)
        if learns(score_mod, query):
            raise NotSimulated.uses(FLEX_LEARNED)
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value = (t.to(dtype) for t in (query, key, value))
        blocks = [t for t in block_mask if isinstance(t, torch.Tensor)]
        return Fused.apply(_kernel(trace, block_mask), query, key, value, *blocks)

    return attention


def on_card(cuda: bool):
    """Code that is compiled for a card has no check that its tensors, which are a CPU's, lie on
    one that trains."""
    return patch.object(flex, "_validate_device", lambda *_: None) if cuda else nullcontext()


@contextmanager
def flex_attention(trace: Trace) -> Iterator[None]:
    """Flex attention takes fake tensors. On a simulated CPU its check of the device refuses in our
    words to train, as it does in its own on a real one."""
    check = flex._validate_device

    def checked(query, key, value) -> None:
        try:
            trace.cuda or check(query, key, value)
        except NotImplementedError as error:
            raise FlexOnCPU.uses(FLEX) from error

    card = ()
    if trace.cuda:
        masks = block_mask_of(trace, flex.create_block_mask)
        card = (
            (flex, "create_block_mask", masks),
            (flex, "flex_attention_hop", attention_of(trace)),
        )
    with trace.here.replaced((flex, "_validate_device", checked), *card):
        yield
