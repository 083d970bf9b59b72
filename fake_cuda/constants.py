"""The numbers behind a predicted time, each with its status and its source.

A group's fields are plain numbers: `CONSTANTS.products.reached`. `listed` tells of each its name in
data/speed_constants.csv, its status and its source, and `CONSTANTS.with_value` changes one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from .constant import ASSUMED, CALIBRATED, SOURCED, Constant
from .constant import assumed as _assumed
from .constant import calibrated as _calibrated
from .constant import sourced as _sourced

__all__ = ["ASSUMED", "CALIBRATED", "CONSTANTS", "SOURCED", "Constants", "listed"]
GEMM = "ai-dynamo/aiconfigurator @095f58a5, gemm_perf: bf16 products of vLLM by shape"
NEUSIGHT = "sitar-lab/NeuSight @6945927, measured kernels of fp32"
FA2 = "FlashAttention-2 (arXiv 2307.08691), section 4.1: A100, causal and not, share of 312 TFLOPS"
FA3 = "FlashAttention-3 (arXiv 2407.08608), section 4.1: FlashAttention-2 on an H100"
MMA = "its MMA is Ampere's (Dao-AILab/flash-attention kernel_traits.h @0a4755ed)"
GUIDE = "CUDA C++ Programming Guide, arithmetic instructions by compute capability"
SPLITS = "split-k of CUTLASS's default kernels"
SOFTMAX = "ATen/native/cuda/SoftMax.cu"
OURS = "measurements/kernels_h100.csv, rows that calibrate"
PCIE = "PCI Express {}, 16 lanes, one way"
FIRST_ROWS = "the first 70 judged rows of data/speeds.csv, so that nine of ten lie inside"
REACTS = "pytorch/pytorch pull 108234: FSDP after a wait; that it counts was chosen by rows"
ELEVEN_HOSTS = (
    "eleven machines, told by the first row of each set of data/speeds.csv that waits for its "
    "host: 5.6, 15.7, 16.4, 17.7, 18.0, 22.3, 23.4, 25.0, 33.9, 34.9 and 35.3 us"
)


@dataclass(frozen=True)
class Products:
    """Matrix products: shares of the peak rate, seconds, and how they are split."""

    reached: float = _sourced(
        "products",
        0.80,
        "median of the 60 `_reached_` rates of data/gpus.csv, which are 0.45 to 1.17",
    )
    unaligned: float = _calibrated(
        "unaligned products", 0.33, "llms-from-scratch, compiled: 50,257 words or 50,304"
    )
    wave: float = _calibrated(
        "seconds of a wave", 3e-6, f"{GEMM}: A100 and L40S; {NEUSIGHT}: five cards, 2 to 8"
    )
    overlapping_wave: float = _calibrated(
        "seconds of a wave, 9.0", 0.5e-6, f"{GEMM}: H100 and B200, whose waves overlap"
    )
    most_splits: float = _assumed("most splits of a product", 16, SPLITS)
    least_depth: float = _assumed("least depth of a split", 256, SPLITS)
    int8: float = _sourced(
        "int8 products", 2, "architecture whitepapers since Turing: rate of 16 bits"
    )

    def pause(self, capability: tuple[int, int], tensor_cores: bool) -> float:
        """Seconds between two waves, which overlap on Hopper and the Blackwell of data centres."""
        overlap = tensor_cores and capability[0] in (9, 10)
        return self.overlapping_wave if overlap else self.wave


@dataclass(frozen=True)
class Traffic:
    """All that moves bytes: shares of the bandwidth by generation, seconds, and counts."""

    other_stream: float = _sourced(
        "stream", 0.77, f"{NEUSIGHT}: add, mul, div on L4, T4, P100, 0.73 to 0.79; others like them"
    )
    volta_stream: float = _sourced("stream, 7.0", 0.91, f"{NEUSIGHT}: add, mul and div on a V100")
    a100_stream: float = _sourced("stream, 8.0", 0.87, f"{NEUSIGHT}: add, mul and div on two A100")
    hopper_stream: float = _calibrated(
        "stream, 9.0", 0.90, f"{OURS}: fill, copy, cast, add, mul and gelu of 0.1 GB and more"
    )
    blackwell_stream: float = _assumed("stream, 10.0", 0.87, "like an A100")
    scatter: float = _sourced(
        "scatter",
        7.3,
        "pytorch/pytorch pull 195542: bytes a clock of a multiprocessor, bf16 to float32, A100; "
        "that it goes by clocks and not by bandwidth was chosen by rows",
    )
    log_softmax: float = _sourced(
        "passes of log-softmax", 2, f"{SOFTMAX}: rows of many words are read three times"
    )
    log_softmax_backward: float = _sourced(
        "passes of log-softmax, backward", 4 / 3, f"{SOFTMAX}: the gradient is read twice"
    )
    loss_backward: float = _sourced(
        "bytes of a loss, backward", 0.5, "ATen/native/cuda/Loss.cu: its input is not read"
    )
    norms: float = _sourced(
        "norms", 0.45, "pytorch/pytorch pull 87445: [8192, 1024] on an A100, 0.37 to 0.51"
    )
    kernel: float = _assumed(
        "seconds of a kernel",
        2.5e-6,
        "start and end of a kernel in a full queue; nobody's measurement",
    )
    kernel_in_a_graph: float = _calibrated(
        "seconds of a kernel in a graph", 1.4e-6, f"{OURS}: 16,384 values, median"
    )
    listed_tensors: float = _sourced(
        "tensors of a list kernel",
        128,
        "MultiTensorApply.cuh, depth_to_max_tensors before CUDA 13: two lists of 64, and 110 to "
        "150 tensors in lists of other depths; since CUDA 13 seven times as many",
    )
    most_lanes: float = _sourced("lanes", 128, GUIDE)
    few_lanes: float = _sourced("lanes, 6.0 7.0 7.5 8.0", 64, GUIDE)

    def stream(self, capability: tuple[int, int]) -> float:
        """The share of the bandwidth that a plain copy reaches."""
        if capability[0] == 10:
            return self.blackwell_stream
        own = {(7, 0): self.volta_stream, (8, 0): self.a100_stream, (9, 0): self.hopper_stream}
        return own.get(capability, self.other_stream)

    def lanes(self, capability: tuple[int, int]) -> float:
        """How many numbers of fp32 a multiprocessor computes at a time."""
        few = ((6, 0), (7, 0), (7, 5), (8, 0))
        return self.few_lanes if capability in few else self.most_lanes


@dataclass(frozen=True)
class Attention:
    """Fused attention: shares of the peak rate, forward and backward.

    By clock: operations a clock of a multiprocessor. Of FlashAttention-2 35 and 30 % of an H100's
    989.4 TFLOPS, of efficient attention its shares of an A100's 312.
    """

    flash: float = _sourced("attention", 0.60, FA2)
    flash_backward: float = _sourced("attention, backward", 0.50, FA2)
    by_clock: float = _sourced("attention by clock", 0.35 * 989.4 / 66.9 * 256, f"{FA3}; {MMA}")
    by_clock_backward: float = _assumed(
        "attention by clock, backward",
        0.30 * 989.4 / 66.9 * 256,
        f"below forward, as on an A100; {MMA}",
    )
    cudnn: float = _sourced("attention by cuDNN", 0.55, f"{FA3}: cuDNN, forward")
    cudnn_backward: float = _assumed(
        "attention by cuDNN, backward", 0.495, "a tenth less than forward"
    )
    efficient: float = _sourced(
        "efficient attention",
        0.30,
        "xformers issue 712: A100, median of six rows of kernels.csv, 0.26 to 0.33",
    )
    efficient_backward: float = _sourced(
        "efficient attention, backward",
        0.24,
        "NVIDIA/cutlass pull 992: A100, median of nine rows of kernels.csv",
    )
    efficient_by_clock: float = _sourced(
        "efficient attention by clock", 0.30 * 312 / 19.5 * 128, "on an A100, by its instructions"
    )
    efficient_by_clock_backward: float = _sourced(
        "efficient attention by clock, backward", 0.24 * 312 / 19.5 * 128, "as forward"
    )
    tf32_passes: float = _sourced(
        "tf32 passes of fp32 attention", 3, "OpMultiplyAddFastF32 in PyTorch's mem_eff_attention"
    )

    def share(self, kernel: str, backward: bool) -> float:
        """The share of the peak rate that a kernel ("flash", "cudnn" or "efficient") reaches."""
        if backward:
            shares = self.flash_backward, self.cudnn_backward, self.efficient_backward
        else:
            shares = self.flash, self.cudnn, self.efficient
        return dict(zip(("flash", "cudnn", "efficient"), shares, strict=True))[kernel]

    def clocked(self, kernel: str, backward: bool) -> float:
        """Operations a clock of a multiprocessor with Ampere's instructions, which limit it too."""
        if kernel == "efficient":
            return self.efficient_by_clock_backward if backward else self.efficient_by_clock
        return self.by_clock_backward if backward else self.by_clock


@dataclass(frozen=True)
class Bus:
    """The way to the host's memory: bytes a second by generation, and the share reached."""

    reached: float = _sourced(
        "bus", 0.80, "pinned memory, four cards, 0.76 to 0.84: measurements/kernels.csv"
    )
    pascal: float = _sourced("bus, bytes a second, 6", 16e9, PCIE.format(3))
    turing: float = _sourced("bus, bytes a second, 7", 16e9, PCIE.format(3))  # and Volta
    ampere: float = _sourced("bus, bytes a second, 8", 32e9, PCIE.format(4))  # and Ada
    hopper: float = _sourced("bus, bytes a second, 9", 64e9, PCIE.format(5))
    blackwell: float = _sourced("bus, bytes a second, 10", 64e9, PCIE.format(5))
    newest: float = _sourced("bus, bytes a second, 12", 64e9, PCIE.format(5))

    def stated(self, capability: tuple[int, int]) -> float:
        """Bytes a second, one way, by its standard; a card that is not known has the newest."""
        by_major = {6: self.pascal, 7: self.turing, 8: self.ampere}
        by_major |= {9: self.hopper, 10: self.blackwell}
        return by_major.get(capability[0], self.newest)


@dataclass(frozen=True)
class Host:
    """What issuing costs: seconds of an operation, shares of them for others, waits."""

    # Seconds of an operation in a forward pass that keeps a graph.
    operation: float = _calibrated("host", 22e-6, f"the median of {ELEVEN_HOSTS}")
    # A B300's trace (AMD-AGI/TraceLens) has elementwise operations of 6.6 to 7.6 us, too.
    fast: float = _calibrated("a fast host", 6e-6, f"the fastest of {ELEVEN_HOSTS}")
    typical: float = _calibrated("a typical host", 22e-6, f"the median of {ELEVEN_HOSTS}")
    slow: float = _calibrated("a slow host", 35e-6, f"the slowest of {ELEVEN_HOSTS}")
    no_gradients: float = _assumed(
        "host, no gradients",
        0.60,
        "one forward pass of book-b200, which also tells that machine's host",
    )
    backward: float = _assumed("host, backward", 0.75, "below forward, as C++ walks the graph")
    update: float = _assumed(
        "host, update",
        0.75,
        "below forward; steps of t5-base, which also tell their machines' hosts",
    )
    bitsandbytes: float = _calibrated(
        "host, bitsandbytes",
        3.3,
        "guide-2022, 8-bit Adam's call of a parameter, when 18 us were assumed of its host",
    )
    view: float = _assumed("host, view", 0.30, "no kernel is launched")
    listed_tensor: float = _assumed(
        "host, tensor of a list", 0.05, "about 0.6 us of a list operation's tensor"
    )
    wait: float = _assumed(
        "seconds of a wait", 8e-6, "from the end of a kernel to the host and back"
    )
    idle_start: float = _assumed(
        "start of an idle card", 0.5, "of a wait: from the host to the card"
    )
    reaction: float = _sourced("seconds of a reaction", 235e-6, REACTS)  # what is reserved alone

    def shares(self) -> dict[str, float]:
        """By what the host pays for (`Operation.issued`), how much of an operation's seconds."""
        launched_by_python = self.no_gradients  # nobody's measurement
        return {
            "forward": 1.0,  # one that keeps a graph is the measure
            "no gradients": self.no_gradients,
            "backward": self.backward,
            "update": self.update,
            "bitsandbytes": self.bitsandbytes,
            "compiled": launched_by_python,
        }


@dataclass(frozen=True)
class Ranges:
    """How far the card's and the host's times may be off, as factors."""

    card_fastest: float = _calibrated("card, fastest", 0.75, FIRST_ROWS)
    card_slowest: float = _calibrated("card, slowest", 1.6, FIRST_ROWS)
    host_fastest: float = _calibrated("host, fastest", 0.25, f"the fastest of {ELEVEN_HOSTS}")
    host_slowest: float = _calibrated("host, slowest", 1.6, f"the slowest of {ELEVEN_HOSTS}")


@dataclass(frozen=True)
class Constants:
    """All of them, by what they speak of."""

    products: Products = Products()
    traffic: Traffic = Traffic()
    attention: Attention = Attention()
    bus: Bus = Bus()
    host: Host = Host()
    ranges: Ranges = Ranges()

    def with_value(self, name: str, value: float) -> Constants:
        """The same, but for the one that tables call `name`."""
        group, key = next(w for w in _places(self) if _told(self, *w).name == name)
        return replace(self, **{group: replace(getattr(self, group), **{key: value})})


def listed(constants: Constants) -> list[Constant]:
    """Each of them, in the order in which they are written down."""
    return [_told(constants, *where) for where in _places(constants)]


def _places(constants: Constants) -> Iterator[tuple[str, str]]:
    for group in fields(constants):
        for one in fields(getattr(constants, group.name)):
            yield group.name, one.name


def _told(constants: Constants, group: str, key: str) -> Constant:
    own = getattr(constants, group)
    about = type(own).__dataclass_fields__[key].metadata
    return Constant(about["name"], getattr(own, key), about["status"], about["source"])


CONSTANTS = Constants()
# A step that waits for its host takes as much longer as that is slower than this.
HOST_SECONDS = CONSTANTS.host.operation
