"""Compiled code in solutions of an assignment: Stanford's CS336, the second, on several cards.

Students compiled the model of `evidence/decoder.py`, and attention alone, without heads. One
compiles each size in a process of its own. Where a process goes through a grid of sizes,
TorchDynamo makes symbols of them after the first; so those that came before are run here, too, for
bytes. A time is that of one size compiled alone. Sources: the column `source` of
data/measurements/peaks.csv and speeds.csv.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from evidence.cards import card
from evidence.decoder import Decoder, Student, softmax
from evidence.decoder_training import loss_of
from fake_cuda import Card, Simulation, simulate

B200, A800 = card("B200"), card("A100-80GB")
UNKNOWN, HOPPER = Card("a card", (8, 0), 108), Card("a card", (9, 0), 132)
SIZES = {
    "small": dict(width=768, layers=12, heads=12, inner=3072),
    "medium": dict(width=1024, layers=24, heads=16, inner=4096),
    "large": dict(width=1280, layers=36, heads=20, inner=5120),
    "xl": dict(width=2560, layers=32, heads=32, inner=10_240),
    "10B": dict(width=4608, layers=50, heads=36, inner=12_288),
}
WIDTHS, LENGTHS = (16, 32, 64, 128), (256, 1024, 4096, 8192, 16384)
STAGES = {"forward": False, "forward and backward": True}


class Marks(NamedTuple):
    """Bytes of tensors, between the moments at which a run emptied the cache."""

    peaks: list[int]  # of each stretch
    ends: list[int]  # what stands when it ends


def marks(found: Simulation) -> Marks:
    """torch counts each tensor in blocks of 512 bytes."""
    now, peaks, ends = 0, [0], []
    for _, size in found.log:
        if not size:
            ends.append(now)
            peaks.append(now)
        now += int(math.copysign(-(-abs(size) // 512) * 512, size)) if size else 0
        peaks[-1] = max(peaks[-1], now)
    return Marks(peaks, [*ends, now])


# --------------------------------------------------------------------------------------- decoders
def _pass(model, words, back: bool) -> None:
    """csdiywithme's: the logits live until the pass is over."""
    model.zero_grad()
    logits = model(words)
    if back:
        F.cross_entropy(logits.flatten(0, 1).float(), words.flatten()).backward()


def decoder(shape: dict, back: bool) -> Simulation:
    def run():
        model = torch.compile(Decoder(Student(**shape, length=512)))
        words = torch.zeros(4, 512, dtype=torch.long)
        for _ in range(1 + back):  # without backward all passes would count as one
            _pass(model, words, back)
        return model

    return simulate(run, card=B200)


def decoder_of_enzoding(shape: dict) -> Simulation:
    """He waits for each stage; the loss, which he times apart, is 0.6 ms."""

    def run():
        model = torch.compile(Decoder(Student(**shape, length=512)))
        words = torch.zeros(4, 512, dtype=torch.long)
        for _ in range(2):
            model.zero_grad()
            logits = model(words)
            logits.view(-1)[0].item()
            loss = loss_of(logits, words, "every token")
            loss.item()
            loss.backward()
            loss.item()
        return model

    return simulate(run, card=A800)


# -------------------------------------------------------------------------------------- attention
def attend(q, k, v, mask=None):  # (batch, length, width) each, and so is what is returned
    """The assignment's, with a softmax by hand."""
    scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = torch.where(mask, scores, float("-inf"))
    return torch.einsum("...qk,...kd->...qd", softmax(scores), v)


def attend_of_csdiywithme(q, k, v):
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return scores.softmax(-1) @ v


def inputs(width: int, length: int, trained: bool = True) -> list[torch.Tensor]:
    return [torch.empty(8, length, width, requires_grad=trained) for _ in range(3)]


def forget(given: list[torch.Tensor]) -> None:
    for x in given:
        x.grad = None


def sizes_up_to(width: int, length: int) -> Iterator[tuple[int, int]]:
    """The grid, as each of them goes through it."""
    grid = [(w, n) for w in WIDTHS for n in LENGTHS]
    yield from grid[: grid.index((width, length)) + 1]


def attention_of_csdiywithme(width: int, length: int) -> Simulation:
    """Passes forward, then backward through one that is kept, then both."""

    def run():
        attended, given = torch.compile(attend_of_csdiywithme), inputs(width, length)
        slope = torch.empty_like(given[0])
        for _ in range(2):
            attended(*given)
        kept = attended(*given)
        for _ in range(2):
            forget(given)
            kept.backward(slope, retain_graph=True)
        del kept
        torch.cuda.empty_cache()
        for _ in range(2):
            forget(given)
            attended(*given).backward(slope)

    return simulate(run, card=B200)


def attention_timed(
    attend: Callable, card: Card, width: int, length: int, back: bool, summed: bool
) -> Simulation:
    """One pass or two, as in `decoder`; `summed` is enzoding's, who waits for each stage."""

    def run():
        attended, given = torch.compile(attend), inputs(width, length)
        slope = torch.empty_like(given[0])
        for _ in range(1 + back):
            out = attended(*given)
            if summed:
                out = out.sum()
                out.item()
            if back:
                out.backward(None if summed else slope)
                forget(given)
        return given

    return simulate(run, card=card)


def attention_of_damek(width: int, length: int) -> dict[str, int]:
    """He compiles anew for each size; the emptied cache marks where he resets the peak."""

    def one_size(width: int, length: int) -> None:
        attended = torch.compile(attend)
        torch.cuda.empty_cache()
        given = inputs(width, length)
        out = attended(*given)
        loss = out.sum()
        loss.backward()
        forget(given)
        torch.cuda.empty_cache()
        for _ in range(2):
            attended(*given).sum()
        out = attended(*given)
        loss = out.sum()
        torch.cuda.empty_cache()
        for _ in range(2):
            step(attended, given)
        del out, loss

    def step(attended: Callable, given: list) -> None:
        out = attended(*given)
        loss = out.sum()
        loss.backward()
        forget(given)

    def run():
        for size in sizes_up_to(width, length):
            one_size(*size)

    forward, both = marks(simulate(run, card=UNKNOWN)).peaks[-2:]
    return {"allocated, passes forward": forward, "allocated": both}


def attention_of_markmrli(width: int, length: int) -> dict[str, int]:
    """One compiled function for all sizes; first passes without gradients, then with them."""

    def one_size(attended: Callable, width: int, length: int) -> None:
        with torch.no_grad():
            attended(*inputs(width, length, trained=False))
        given = inputs(width, length)
        for _ in range(2):
            for x in given:
                if x.grad is not None:
                    x.grad.zero_()
            torch.cuda.empty_cache()
            out = attended(*given)
            out = out.sum()
            torch.cuda.empty_cache()
            out.backward()

    def run():
        attended = torch.compile(attend, dynamic=True)
        for size in sizes_up_to(width, length):
            one_size(attended, *size)

    return {"allocated, passes forward": marks(simulate(run, card=HOPPER)).peaks[-2]}


def attention_of_yyin(width: int, length: int) -> dict[str, int]:
    """One compiled function for all sizes, whose backward may run twice. Nobody empties the
    gradients; the results of the last pass stand until the next ones replace them."""
    import torch._functorch.config as functorch

    def run():
        attended = torch.compile(attend)
        for w, n in sizes_up_to(width, length):
            given = inputs(w, n)
            mask = torch.tril(torch.ones(n, n)).bool()
            out = attended(*given, mask)
            loss = out.sum()
            loss.backward()
            for _ in range(2):
                out = attended(*given, mask)
            torch.cuda.empty_cache()  # marks the moment
            out = attended(*given, mask)
            loss = out.sum()
            loss.backward(retain_graph=True)

    with functorch.patch(donated_buffer=False):
        found = simulate(run, card=HOPPER)
    return {"allocated after forward": marks(found).ends[-2]}


# ------------------------------------------------------------------------------------------- runs
def narrow_and_wide(predict: Callable) -> Iterator[tuple[str, Callable]]:
    for width in (WIDTHS[0], WIDTHS[-1]):
        for length in LENGTHS:
            yield f"attention, width {width}, length {length}", partial(predict, width, length)


def decoders() -> Iterator[tuple[str, Callable]]:
    for size, shape in SIZES.items():
        for stage, back in STAGES.items():
            yield f"{size}, {stage}", partial(decoder, shape, back)


def csdiywithme() -> Iterator[tuple[str, Callable]]:
    yield from decoders()
    yield from narrow_and_wide(attention_of_csdiywithme)


def timed_csdiywithme() -> Iterator[tuple[str, Callable]]:
    yield from decoders()
    timed = partial(attention_timed, attend_of_csdiywithme, B200, summed=False)
    for stage, back in STAGES.items():
        for name, predict in narrow_and_wide(partial(timed, back=back)):
            yield f"{name}, {stage}", predict


def timed_enzoding() -> Iterator[tuple[str, Callable]]:
    for size in list(SIZES)[:4]:
        yield f"{size}, forward and backward", partial(decoder_of_enzoding, SIZES[size])
    for length in LENGTHS:
        for stage, back in STAGES.items():
            run = f"attention, width 16, length {length}, {stage}"
            yield run, partial(attention_timed, attend, A800, 16, length, back, summed=True)


PEAKS = {
    "compiled-csdiywithme": csdiywithme,
    "compiled-damek": partial(narrow_and_wide, attention_of_damek),
    "compiled-markmrli": partial(narrow_and_wide, attention_of_markmrli),
    "compiled-yyin": partial(narrow_and_wide, attention_of_yyin),
}
STEPS = {"compiled-csdiywithme": timed_csdiywithme, "compiled-enzoding": timed_enzoding}
