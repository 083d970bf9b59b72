"""How long a step takes on a card: its kernels one after another, and the host that issues them.

A matrix product is cut into tiles that the multiprocessors take wave by wave, fused attention has
shares of the peak of its own, a copy waits for the bus, and all else moves bytes. The host issues
operation after operation into a queue: the slower of the two sets the pace, and both meet wherever
the run asks for a value (`.item()`). Compiled code and Triton kernels are not seen, nor are an
optimizer's pages, which travel only where memory is short, and what stays in the L2 cache.

The ranges were chosen on 70 rows of data/speeds.csv, so that nine of ten lay inside. Then 136
others were predicted blind (data/blind_speeds.csv): 79% of them lay inside. Since then layouts
of convolutions and FlashAttention on newer cards have been put in, and the ranges stayed:
97% of the judged rows lie in their ranges today, and 83% of those that wait for their host,
whose speed has to be told.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from .operations import Operation

KINDS = ("host", "matrix products", "attention", "memory traffic", "copies")
SOURCED, CALIBRATED, ASSUMED = "sourced", "calibrated", "assumed"


class Constant(NamedTuple):
    """A number of the model of time.

    `status`: *sourced*, somebody measured or documented it; *calibrated*, chosen so that the named
    rows come out; *assumed*, neither. `source` names the measurement, the rows, or what is known.
    """

    value: float
    status: str
    source: str


GEMM = "ai-dynamo/aiconfigurator @095f58a5, gemm_perf: bf16 products of vLLM by shape"
NEUSIGHT = "sitar-lab/NeuSight @6945927, measured kernels of fp32"
FA2 = "FlashAttention-2 (arXiv 2307.08691), section 4.1: A100, causal and not, share of 312 TFLOPS"
FA3 = "FlashAttention-3 (arXiv 2407.08608), section 4.1: FlashAttention-2 on an H100"
MMA = "its MMA is Ampere's (Dao-AILab/flash-attention kernel_traits.h @0a4755ed)"
GUIDE = "CUDA C++ Programming Guide, arithmetic instructions by compute capability"
FIRST_ROWS = "the first 70 judged rows of data/speeds.csv, so that nine of ten lie inside"
CONSTANTS = {
    # products
    "products": Constant(
        0.80, SOURCED, "median of the 60 `_reached_` rates of data/gpus.csv, which are 0.45 to 1.17"
    ),
    "unaligned products": Constant(
        0.33, CALIBRATED, "llms-from-scratch, compiled: 50,257 words or 50,304"
    ),
    "seconds of a wave": Constant(
        3e-6, CALIBRATED, f"{GEMM}: A100 and L40S; {NEUSIGHT}: five cards, 2 to 8"
    ),
    "seconds of a wave, 9.0": Constant(
        0.5e-6, CALIBRATED, f"{GEMM}: H100 and B200, whose waves overlap"
    ),
    "most splits of a product": Constant(16, ASSUMED, "split-k of CUTLASS's default kernels"),
    "least depth of a split": Constant(256, ASSUMED, "split-k of CUTLASS's default kernels"),
    "int8 products": Constant(2, SOURCED, "architecture whitepapers since Turing: rate of 16 bits"),
    # all that moves bytes
    "stream": Constant(
        0.77, SOURCED, f"{NEUSIGHT}: add, mul, div on L4, T4, P100, 0.73 to 0.79; others like them"
    ),
    "stream, 7.0": Constant(0.91, SOURCED, f"{NEUSIGHT}: add, mul and div on a V100"),
    "stream, 8.0": Constant(0.87, SOURCED, f"{NEUSIGHT}: add, mul and div on two A100"),
    "stream, 9.0": Constant(0.87, ASSUMED, "like an A100"),
    "stream, 10.0": Constant(0.87, ASSUMED, "like an A100"),
    "scatter": Constant(
        7.3,
        SOURCED,
        "pytorch/pytorch pull 195542: bytes a clock of a multiprocessor, bf16 to float32, A100; "
        "that it goes by clocks and not by bandwidth was chosen by rows",
    ),
    "norms": Constant(
        0.45, SOURCED, "pytorch/pytorch pull 87445: [8192, 1024] on an A100, 0.37 to 0.51"
    ),
    "seconds of a kernel": Constant(
        2.5e-6, ASSUMED, "start and end of a kernel in a full queue; nobody's measurement"
    ),
    "tensors of a list kernel": Constant(
        128,
        SOURCED,
        "MultiTensorApply.cuh, depth_to_max_tensors before CUDA 13: two lists of 64, and 110 to "
        "150 tensors in lists of other depths; since CUDA 13 seven times as many",
    ),
    "lanes": Constant(128, SOURCED, GUIDE),
    "lanes, 6.0 7.0 7.5 8.0": Constant(64, SOURCED, GUIDE),
    # attention
    "attention": Constant(0.60, SOURCED, FA2),
    "attention, backward": Constant(0.50, SOURCED, FA2),
    # Operations a clock of a multiprocessor: 35 and 30 % of an H100's 989.4 TFLOPS.
    "attention by clock": Constant(0.35 * 989.4 / 66.9 * 256, SOURCED, f"{FA3}; {MMA}"),
    "attention by clock, backward": Constant(
        0.30 * 989.4 / 66.9 * 256, ASSUMED, f"below forward, as on an A100; {MMA}"
    ),
    "attention by cuDNN": Constant(0.55, SOURCED, f"{FA3}: cuDNN, forward"),
    "attention by cuDNN, backward": Constant(0.495, ASSUMED, "a tenth less than forward"),
    "efficient attention": Constant(
        0.30, SOURCED, "xformers issue 712: A100, median of six rows of kernels.csv, 0.26 to 0.33"
    ),
    "efficient attention, backward": Constant(
        0.24, SOURCED, "NVIDIA/cutlass pull 992: A100, median of nine rows of kernels.csv"
    ),
    "tf32 passes of fp32 attention": Constant(
        3, SOURCED, "OpMultiplyAddFastF32 in PyTorch's mem_eff_attention"
    ),
    # the bus
    "bus": Constant(
        0.80, SOURCED, "pinned memory, four cards, 0.76 to 0.84: measurements/kernels.csv"
    ),
    "bus, bytes a second, 6": Constant(16e9, SOURCED, "PCI Express 3, 16 lanes, one way"),
    "bus, bytes a second, 7": Constant(16e9, SOURCED, "PCI Express 3, 16 lanes, one way"),
    "bus, bytes a second, 8": Constant(32e9, SOURCED, "PCI Express 4, 16 lanes, one way"),
    "bus, bytes a second, 9": Constant(64e9, SOURCED, "PCI Express 5, 16 lanes, one way"),
    "bus, bytes a second, 10": Constant(64e9, SOURCED, "PCI Express 5, 16 lanes, one way"),
    "bus, bytes a second, 12": Constant(64e9, SOURCED, "PCI Express 5, 16 lanes, one way"),
    # the host
    "host": Constant(
        12e-6,
        ASSUMED,
        "seconds of an operation in a forward pass that keeps a graph; machines on which a step "
        "told it lie from 6 to 25 us (column host of data/speeds.csv)",
    ),
    "host, no gradients": Constant(
        0.60, ASSUMED, "one forward pass of book-b200, which also tells that machine's host"
    ),
    "host, backward": Constant(0.75, ASSUMED, "below forward, as C++ walks the graph"),
    "host, update": Constant(
        0.75, ASSUMED, "below forward; steps of t5-base, which also tell their machines' hosts"
    ),
    "host, bitsandbytes": Constant(
        3.3,
        CALIBRATED,
        "guide-2022, 8-bit Adam's call of a parameter, when 18 us were assumed of its host",
    ),
    "host, view": Constant(0.30, ASSUMED, "no kernel is launched"),
    "host, tensor of a list": Constant(0.05, ASSUMED, "about 0.6 us of a list operation's tensor"),
    "seconds of a wait": Constant(8e-6, ASSUMED, "from the end of a kernel to the host and back"),
    "start of an idle card": Constant(0.5, ASSUMED, "of a wait: from the host to the card"),
    # how far the card's and the host's times may be off
    "card, fastest": Constant(0.75, CALIBRATED, FIRST_ROWS),
    "card, slowest": Constant(1.6, CALIBRATED, FIRST_ROWS),
    "host, fastest": Constant(0.4, CALIBRATED, FIRST_ROWS),
    "host, slowest": Constant(2.1, CALIBRATED, FIRST_ROWS),
}
VALUES = {name: constant.value for name, constant in CONSTANTS.items()}
# A step that waits for its host takes as much longer as that is slower than this:
# notebooks/measure_your_card.ipynb.
HOST_SECONDS = VALUES["host"]
CARD_RANGE = VALUES["card, fastest"], VALUES["card, slowest"]
HOST_RANGE = VALUES["host, fastest"], VALUES["host, slowest"]
BUS = {  # by generation of card
    int(name.split(", ")[2]): value for name, value in VALUES.items() if name.startswith("bus, ")
}
ATTENTION = {  # kernels by the names of `operations`
    "flash": "attention",
    "cudnn": "attention by cuDNN",
    "efficient": "efficient attention",
}
# Shapes of tiles, no rates: those of CUTLASS's default kernels for Tensor Cores (assumed).
TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))


@dataclass(frozen=True)
class Card:
    """A card's rates: `rates` in operations a second by type of a product, "fp32", "tf32", "fp16"
    and "bf16", `bandwidth` in bytes a second; 0 or missing where nobody states it."""

    name: str
    capability: tuple[int, int]
    sms: int
    bandwidth: float = 0.0
    rates: dict[str, float] = field(default_factory=dict)
    tf32: bool = False  # whether products of fp32 run as tf32
    stream: float = 0.0  # bytes a second that a copy reached on such a card, where it was measured

    @classmethod
    def of(cls, name: str, capability: tuple[int, int], facts: dict, tf32: bool = False) -> "Card":
        """From the facts of a data sheet: `sms`, `bandwidth_gb_s`, `fp16_tflops` and the like."""
        rates = {k[: -len("_tflops")]: 1e12 * v for k, v in facts.items() if v and "flops" in k}
        sms, bandwidth = facts.get("sms") or 0, facts.get("bandwidth_gb_s") or 0
        stream = facts.get("bandwidth_reached_gb_s") or 0
        return cls(name, capability, int(sms), bandwidth * 1e9, rates, tf32, stream * 1e9)


class Estimate(float):
    """A number, and the range `low` to `high` in which it should lie."""

    def __new__(cls, value: float, low: float, high: float):
        self = super().__new__(cls, value)
        self.low, self.high = low, high
        return self

    def __str__(self) -> str:
        return f"{self:.3g} ({self.low:.3g} to {self.high:.3g})"


@dataclass(frozen=True)
class Time:
    """A step's time in seconds, and the range that the comparisons with real cards justify.

    `shares` splits it by `KINDS` (host: the card stands idle) and `phases` by phase. `limited_by`
    is "host" where a slower host would cost more than a slower card: the step then takes as long
    on a faster card, though this one may be busy; else the largest of the card's shares. `flops`
    are those of all products, `model_flops` without recomputation; `ideal_seconds` is what they
    would take at the data sheet's rates. `fused_seconds` is a lower bound of what a compiler could
    reach with the same kernels: products, attention, copies and the update as they are, all other
    traffic and the host for nothing. `ends` is when the card is done with each operation of a pass.
    `launches` and `moved` count, by phase, the operations that the card is given and their bytes.
    `note` says what is not timed or only assumed; without `step_seconds`, what is missing. `what`
    is "step", or "pass" of a run without a step.
    """

    step_seconds: float | None = None
    low: float | None = None
    high: float | None = None
    limited_by: str = ""
    shares: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    flops: float = 0.0
    model_flops: float = 0.0
    ideal_seconds: float = 0.0
    fused_seconds: float | None = None
    launches: dict[str, int] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)
    note: str = ""
    ends: list[float] = field(default_factory=list, repr=False)
    what: str = "step"

    def __str__(self) -> str:
        if not self.step_seconds:
            return self.note
        seconds = Estimate(self.step_seconds, self.low, self.high)
        return f"{seconds} s a {self.what}, limited by {self.limited_by}"

    def per_second(self, n: int | None) -> Estimate | None:
        """The rate of what a step has `n` of; None if that or the time is not known."""
        known = n and self.step_seconds
        return Estimate(n / self.step_seconds, n / self.high, n / self.low) if known else None

    @property
    def model_flops_utilisation(self) -> float | None:
        """The share of the data sheet's rates that the model's own operations reach."""
        return self.ideal_seconds / self.step_seconds if self.step_seconds else None


class Missing(ValueError):
    """A rate that nobody stated for a card."""


class Kernels:
    """Seconds of kernels on a card."""

    def __init__(self, card: Card):
        self.card, major = card, card.capability[0]
        for what, value in (("number of multiprocessors", card.sms), ("bandwidth", card.bandwidth)):
            if not value:
                raise Missing(what)
        few = card.capability in ((6, 0), (7, 0), (7, 5), (8, 0))
        self.lanes = VALUES["lanes, 6.0 7.0 7.5 8.0" if few else "lanes"]
        # Each lane of a multiprocessor does two operations a clock: so many clocks a second.
        self.clocks = self.rate("fp32") / (2 * self.lanes) if card.rates.get("fp32") else math.inf
        minor = 0 if major in (9, 10) else card.capability[1]
        shares = VALUES | {"stream": VALUES.get(f"stream, {major}.{minor}", VALUES["stream"])}
        self.rates = {k: shares[k] * card.bandwidth for k in ("stream", "norms")}
        self.rates["stream"] = card.stream or self.rates["stream"]
        # Loads of single values are as many as multiprocessors can issue, whatever the bandwidth.
        self.rates["scatter"] = min(self.rates["stream"], VALUES["scatter"] * self.clocks)

    def type(self, kind: str) -> str:
        """The type in which this card runs a product: tf32 where that is wanted and known."""
        if kind == "tf32" or kind == "fp32" and self.card.tf32:
            return "tf32" if self.card.rates.get("tf32") else "fp32"
        return kind

    def tensor_cores(self, kind: str) -> bool:
        return self.card.capability >= (7, 0) and self.type(kind) != "fp32"

    def rate(self, kind: str) -> float:
        """Peak operations a second of a type of product: data sheet, without sparsity."""
        rates, kind = self.card.rates, self.type(kind)
        if kind == "int8":
            return VALUES["int8 products"] * self.rate("fp16")
        if not rates.get(kind):
            raise Missing(f"rate of {kind} products")
        return rates[kind]

    def product(self, batch, m, n, k, kind, aligned) -> float:
        """The best of some shapes of tiles and splits of the inner side, wave by wave.

        All multiprocessors compute a tile at the rate that large products reach on this card; then
        the wave ends. Never less than the time of its bytes.
        """
        if 1 in (m, n):  # a matrix times a vector: each value is read once
            return 0.0
        rate, tensor_cores = self.reached(kind), self.tensor_cores(kind)
        rate *= 1 if aligned or not tensor_cores else VALUES["unaligned products"]
        new = ", 9.0" if self.card.capability[0] in (9, 10) and tensor_cores else ""
        pause, best = VALUES["seconds of a wave" + new], math.inf
        for high, wide in TILES:
            tiles = batch * math.ceil(m / high) * math.ceil(n / wide)
            wave = 2 * high * wide * k * self.card.sms / rate
            split = 1
            while split <= VALUES["most splits of a product"]:
                if split > 1 and k / split < VALUES["least depth of a split"]:
                    break
                best = min(best, math.ceil(tiles * split / self.card.sms) * (wave / split + pause))
                split *= 2
        return best

    def reached(self, kind: str) -> float:
        """Operations a second of large products, as measured on such a card, or by their share.

        Where only another type was measured on Tensor Cores, its share of the peak counts.
        """
        rates, peak = self.card.rates, self.rate(kind)
        if kind == "int8":
            return VALUES["int8 products"] * self.reached("fp16")
        kind = self.type(kind)
        like = kind if rates.get(f"{kind}_reached") or kind not in ("bf16", "tf32") else "fp16"
        measured = rates.get(f"{like}_reached")
        return peak * (measured / rates[like] if measured else VALUES["products"])

    def attention(self, flops, which, back, kind) -> float:
        peak = self.rate(kind)
        if kind == "fp32" and self.card.rates.get("tf32"):
            peak = self.rate("tf32") / VALUES["tf32 passes of fp32 attention"]
        way = ", backward" if back else ""
        rate = peak * VALUES[ATTENTION[which] + way]
        if which == "flash":  # with Ampere's instructions: on later cards their rate goes by clocks
            rate = min(rate, VALUES["attention by clock" + way] * self.clocks)
        return flops / rate

    def seconds(self, op: Operation) -> tuple[str, float]:
        """The kind of limit, of `KINDS`, and the seconds on the card."""
        if op.kind == "bus":
            newest = VALUES["bus, bytes a second, 12"]
            bus = VALUES.get(f"bus, bytes a second, {self.card.capability[0]}", newest)
            return "copies", op.moved / bus / VALUES["bus"]
        bytes_only = op.moved / self.rates.get(op.kind, self.rates["stream"])
        kind, needed, turned = "memory traffic", 0.0, 0
        if op.kind == "product":
            kind, needed = "matrix products", sum(self.product(*shape[:6]) for shape in op.work)
            # cuDNN puts channels last for Tensor Cores, and back (NVIDIA, Convolutional Layers
            # User's Guide, "Tensor Layouts In Memory").
            turned = sum(sum(shape[6:]) for shape in op.work if self.tensor_cores(shape[4]))
        elif op.kind == "attention":
            kind, needed = "attention", self.attention(*op.work)
        kernels = max(
            1,
            op.tensors // VALUES["tensors of a list kernel"],
            len(op.work) if op.kind == "product" else 1,
        )
        needed = max(bytes_only, needed) + turned / self.rates["stream"]
        return kind, needed + kernels * VALUES["seconds of a kernel"]


def _run(rows: list[tuple], card: float, host: float) -> tuple[dict, list[float]]:
    """Seconds by (phase, kind) of a step among others like it, and when the card has done each row
    of it; both factors stretch a side."""
    now = queue = 0.0  # the host's clock; when the card will have done what it was given
    latency = VALUES["seconds of a wait"]
    start_up = latency * VALUES["start of an idle card"]
    spent: dict[tuple[str, str], float] = {}
    ends: list[float] = []
    for _ in range(2):  # the host runs ahead into the next step: the second one counts
        spent, ends, began = {}, [], queue
        for phase, kind, seconds, issue in rows:
            if kind == "wait":
                now = max(now, queue) + latency
            else:
                now += issue * host
            if kind in ("", "wait"):  # nothing for the card
                ends.append(queue - began)
                continue
            start = max(queue, now + start_up)
            key = phase, "host"
            spent[key] = spent.get(key, 0.0) + start - queue
            queue = start + seconds * card
            key = phase, kind
            spent[key] = spent.get(key, 0.0) + seconds * card
            ends.append(queue - began)
        if now > queue and rows:  # what the host still does when the card is done
            key = rows[-1][0], "host"
            spent[key] = spent.get(key, 0.0) + now - queue
            queue = now
    return spent, ends


def step_time(
    operations: list[Operation],
    phases: list[str],
    card: Card,
    *,
    host: float = HOST_SECONDS,
    repeat: float = 1,
) -> Time:
    """The time of a step of these operations, whose `phase` counts in `phases`.

    `host` is the host's seconds for one operation; `repeat` says how many times the forward and
    backward passes are done, where few micro-batches stand for many. A rate that the card lacks is
    named in `note`.
    """
    flops = sum(op.flops for op in operations)
    try:
        kernels = Kernels(card)
        known: dict[tuple, tuple[str, float]] = {}
        rows, ideal = [], 0.0
        for op in operations:
            issue = host * VALUES.get(f"host, {op.issued}", 1.0)
            if op.kind in ("view", "wait"):
                issue *= VALUES["host, view"]
                rows.append((phases[op.phase], "wait" if op.kind == "wait" else "", 0.0, issue))
                continue
            key = op.kind, op.work, op.moved, op.tensors
            if key not in known:
                known[key] = kernels.seconds(op)
            issue += host * op.tensors * VALUES["host, tensor of a list"]
            rows.append((phases[op.phase], *known[key], issue))
            if op.flops and not op.again:
                types = {shape[4] for shape in op.work} if op.kind == "product" else {op.work[3]}
                ideal += op.flops / min(kernels.rate(kind) for kind in types)
    except Missing as missing:
        note = f"No time is predicted: the {missing} of {card.name} is not known."
        return Time(flops=flops, note=note)
    again = {"forward": repeat, "backward": repeat}

    def total(card: float, host: float) -> dict[tuple[str, str], float]:
        spent, _ = _run(rows, card, host)
        return {key: n * again.get(key[0], 1) for key, n in spent.items()}

    spent = total(1, 1)
    seconds = sum(spent.values())
    slow_card, slow_host = (sum(total(*slow).values()) for slow in ((1.1, 1), (1, 1.1)))
    split = [{}, {}]
    for key, n in spent.items():
        for part, name in zip(split, key, strict=True):
            part[name] = part.get(name, 0.0) + n / (seconds or 1)
    shares = {kind: split[1].get(kind, 0.0) for kind in KINDS}
    times = [op.flops * again.get(phases[op.phase], 1) for op in operations]
    launches, moved = Counter(), Counter()
    for op in operations:
        if op.kind not in ("view", "wait"):
            launches[phases[op.phase]] += 1
            moved[phases[op.phase]] += op.moved
    return Time(
        step_seconds=seconds,
        low=sum(total(CARD_RANGE[0], HOST_RANGE[0]).values()),
        high=sum(total(CARD_RANGE[1], HOST_RANGE[1]).values()),
        limited_by="host" if slow_host > slow_card else max(KINDS[1:], key=shares.get),
        shares=shares,
        phases=split[0],
        flops=sum(times),
        model_flops=sum(n for n, op in zip(times, operations, strict=True) if not op.again),
        ideal_seconds=ideal * repeat,
        fused_seconds=sum(
            seconds * again.get(phase, 1)
            for phase, kind, seconds, _ in rows
            if kind in ("matrix products", "attention", "copies") or phase == "optimizer step"
        ),
        launches={name: round(n * again.get(name, 1)) for name, n in launches.items()},
        moved={name: round(n * again.get(name, 1)) for name, n in moved.items()},
        ends=_run(rows, 1, 1)[1],
    )
