"""The numbers behind a predicted time, each with its status and its source."""

from typing import NamedTuple

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


class Passes(NamedTuple):
    """The names of a kernel's constants, by the pass that it runs in."""

    forward: str
    backward: str

    def name(self, back: bool) -> str:
        return self.backward if back else self.forward


# Which constant counts where. Kernels by the names of `operations`, cards by capability.
ATTENTION = {
    "flash": Passes("attention", "attention, backward"),
    "cudnn": Passes("attention by cuDNN", "attention by cuDNN, backward"),
    "efficient": Passes("efficient attention", "efficient attention, backward"),
}
FLASH_BY_CLOCK = Passes("attention by clock", "attention by clock, backward")
STREAM = {
    (7, 0): "stream, 7.0",
    (8, 0): "stream, 8.0",
    (9, 0): "stream, 9.0",
    (10, 0): "stream, 10.0",
    (10, 1): "stream, 10.0",
    (10, 3): "stream, 10.0",
}
OTHER_STREAM = "stream"
FEW_LANES = ((6, 0), (7, 0), (7, 5), (8, 0))
WAVES_OVERLAP = (9, 10)  # major capabilities of Hopper and of the Blackwell of data centres
BUSES = {  # by major capability
    6: "bus, bytes a second, 6",
    7: "bus, bytes a second, 7",
    8: "bus, bytes a second, 8",
    9: "bus, bytes a second, 9",
    10: "bus, bytes a second, 10",
    12: "bus, bytes a second, 12",
}
NEWEST_BUS = BUSES[12]
BUS = {major: VALUES[name] for major, name in BUSES.items()}
ISSUED = {  # by what the host pays for; a forward pass that keeps a graph is the measure
    "no gradients": "host, no gradients",
    "backward": "host, backward",
    "update": "host, update",
    "bitsandbytes": "host, bitsandbytes",
    "compiled": "host, no gradients",  # a launch from Python; nobody's measurement
}
