"""Seconds of a kernel on a card: tiles of products, shares of peaks, bytes."""

import math

from .card import Card
from .constants import CONSTANTS, Constants
from .operations import Operation
from .products import Attention, Product

# Shapes of tiles, no rates: those of CUTLASS's default kernels for Tensor Cores (assumed).
TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))


class Missing(ValueError):
    """A rate that nobody stated for a card."""


class Kernels:
    """Seconds of kernels on a card. Raises `Missing` where it lacks what they are computed from."""

    def __init__(self, card: Card, constants: Constants = CONSTANTS):
        self.card, self.constants, traffic = card, constants, constants.traffic
        for what, value in (("number of multiprocessors", card.sms), ("bandwidth", card.bandwidth)):
            if not value:
                raise Missing(what)
        self.lanes = traffic.lanes(card.capability)
        # Each lane of a multiprocessor does two operations a clock: so many clocks a second.
        self.clocks = self.rate("fp32") / (2 * self.lanes) if card.rates.get("fp32") else math.inf
        stream = card.stream or traffic.stream(card.capability) * card.bandwidth
        # Loads of single values are as many as multiprocessors can issue, whatever the bandwidth.
        self.rates = {
            "stream": stream,
            "norms": traffic.norms * card.bandwidth,
            "scatter": min(stream, traffic.scatter * self.clocks),
        }
        # How often what counts as read and written is: a loss reads a number of each row.
        self.passes = {
            "_log_softmax": traffic.log_softmax,
            "_log_softmax_backward_data": traffic.log_softmax_backward,
            "nll_loss_forward": 0,
            "nll_loss_backward": traffic.loss_backward,
        }

    def type(self, kind: str) -> str:
        """The type in which this card runs a product: tf32 where that is wanted and known."""
        if kind == "tf32" or kind == "fp32" and self.card.tf32:
            return "tf32" if self.card.rates.get("tf32") else "fp32"
        return kind

    def tensor_cores(self, kind: str) -> bool:
        """Whether products of a type run on Tensor Cores."""
        return self.card.capability >= (7, 0) and self.type(kind) != "fp32"

    def rate(self, kind: str) -> float:
        """Peak operations a second of a type of product: data sheet, without sparsity."""
        rates, kind = self.card.rates, self.type(kind)
        if kind == "int8":
            return self.constants.products.int8 * self.rate("fp16")
        if not rates.get(kind):
            raise Missing(f"rate of {kind} products")
        return rates[kind]

    def product(self, batch, m, n, k, kind, aligned) -> float:
        """Seconds of a batch of products [m, k] x [k, n], without reading the matrices.

        The best of some shapes of tiles and splits of the inner side, wave by wave: all
        multiprocessors compute a tile at the rate that large products reach on this card; then the
        wave ends. Reading the matrices may take longer: `seconds` counts their bytes.

        Args:
            batch, m, n, k: how many products, and their sides.
            kind: of the numbers, such as fp16 or tf32.
            aligned: whether all sides suit tensor cores.

        Raises:
            Missing: the card's rate for this kind is not known.
        """
        if 1 in (m, n):  # a matrix times a vector: each value is read once
            return 0.0
        known = self.constants.products
        rate, tensor_cores = self.reached(kind), self.tensor_cores(kind)
        rate *= 1 if aligned or not tensor_cores else known.unaligned
        pause = known.pause(self.card.capability, tensor_cores)
        best = math.inf
        for high, wide in TILES:
            tiles = batch * math.ceil(m / high) * math.ceil(n / wide)
            wave = 2 * high * wide * k * self.card.sms / rate
            split = 1
            while split <= known.most_splits:
                if split > 1 and k / split < known.least_depth:
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
            return self.constants.products.int8 * self.reached("fp16")
        kind = self.type(kind)
        like = kind if rates.get(f"{kind}_reached") or kind not in ("bf16", "tf32") else "fp16"
        measured = rates.get(f"{like}_reached")
        return peak * (measured / rates[like] if measured else self.constants.products.reached)

    def attention(self, work: Attention) -> float:
        """Seconds of a fused attention's operations."""
        known, peak = self.constants.attention, self.rate(work.type)
        if work.type == "fp32" and self.card.rates.get("tf32"):
            peak = self.rate("tf32") / known.tf32_passes
        rate = peak * known.share(work.kernel, work.backward)
        if work.kernel != "cudnn":  # with Ampere's instructions: on later cards it goes by clocks
            clocked = known.clocked(work.kernel, work.backward) * self.clocks
            # Those of tf32 are half as fast as those of 16 bits.
            rate = min(rate, clocked / (2 * known.tf32_passes) if work.type == "fp32" else clocked)
        return work.flops / rate

    def bus(self, moved: int) -> float:
        """Seconds of bytes that go to the host's memory or come from there."""
        bus = self.constants.bus
        return moved / bus.stated(self.card.capability) / bus.reached

    def turned(self, products: tuple[Product, ...]) -> int:
        """Bytes that change places: cuDNN puts channels last for Tensor Cores, and back (NVIDIA,
        Convolutional Layers User's Guide, "Tensor Layouts In Memory")."""
        return sum(product.turned for product in products if self.tensor_cores(product.type))

    def seconds(self, op: Operation) -> tuple[str, float]:
        """The kind of limit, of `cost.KINDS`, and the seconds on the card."""
        if op.kind == "bus":
            return "copies", self.bus(op.moved)
        rate = self.rates.get(op.kind, self.rates["stream"])
        bytes_only = op.moved * self.passes.get(op.name, 1) / rate
        kind, needed, turned, kernels = "memory traffic", 0.0, 0, 1
        if op.kind == "product":
            kind, needed = "matrix products", sum(self.product(*shape[:6]) for shape in op.work)
            turned, kernels = self.turned(op.work), len(op.work)
        elif op.kind == "attention":
            kind, needed = "attention", self.attention(op.work)
        traffic = self.constants.traffic
        kernels = max(1, op.tensors // traffic.listed_tensors, kernels)
        needed = max(bytes_only, needed) + turned / self.rates["stream"]
        return kind, needed + kernels * traffic.kernel
