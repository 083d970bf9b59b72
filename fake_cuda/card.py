"""A card, as a simulation knows it."""

from dataclasses import dataclass, field

A100_SMS = 108  # the multiprocessors that are taken for granted where only a capability is told


@dataclass(frozen=True)
class Card:
    """What is known of a card; 0 or missing where nobody states it.

    Without its rates bytes are simulated, and no time.

    Args:
        name: as people call it.
        capability: its compute capability, (8, 0) for an A100.
        sms: its number of multiprocessors.
        bandwidth: of its memory, in bytes a second.
        rates: operations a second by type of a product: "fp32", "tf32", "fp16" and "bf16" by its
            data sheet, "fp16_reached" and the like as they were measured.
        tf32: whether products of fp32 run as tf32.
        stream: bytes a second that a copy reached on such a card, where it was measured.
        memory: in bytes.
        context: bytes of it that the driver takes, of which a script cannot make use.
    """

    name: str
    capability: tuple[int, int]
    sms: int
    bandwidth: float = 0.0
    rates: dict[str, float] = field(default_factory=dict)
    tf32: bool = False
    stream: float = 0.0
    memory: int = 0
    context: int = 0

    @classmethod
    def of(
        cls,
        name: str,
        capability: tuple[int, int],
        facts: dict,
        tf32: bool = False,
        memory: int = 0,
    ) -> "Card":
        """From the facts of a data sheet: `sms`, `bandwidth_gb_s`, `fp16_tflops` and the like."""
        rates = {k[: -len("_tflops")]: 1e12 * v for k, v in facts.items() if v and "flops" in k}
        bandwidth = 1e9 * (facts.get("bandwidth_gb_s") or 0)
        stream = 1e9 * (facts.get("bandwidth_reached_gb_s") or 0)
        sms = int(facts.get("sms") or 0)
        return cls(name, capability, sms, bandwidth, rates, tf32, stream, memory)

    @classmethod
    def like(cls, capability: tuple[int, int], sms: int = A100_SMS) -> "Card":
        """A card of which no rates are known: its bytes can be simulated, and not its time."""
        return cls("a card", tuple(capability), sms)
