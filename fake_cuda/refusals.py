"""What cannot be simulated, and why, in words.

Where we find it ourselves we raise `NotSimulated`. `MESSAGES` is for what only torch can find: it
recognises torch's own errors by their text, and has to follow it. A test provokes each.
"""


class NotSimulated(ValueError):
    """A run that cannot be simulated. Its text is one sentence: what the run does, what to do."""

    @classmethod
    def uses(cls, what: str) -> "NotSimulated":
        """The run uses something that a simulation has not."""
        return cls(USES.format(what))


USES = "the run uses {}"
GPU = "a GPU: leave the model on the CPU, the simulation stands in"
OUTSIDE = "a tensor or model made outside of it: build them inside"
FLEX = "flex attention, which a CPU cannot train: take another kernel"
NO_VALUES = (
    "the run picks by tensors' values, and fake tensors have none: take a fixed number, "
    "of a mixture's experts the grouped products"
)
READS_KERNEL = (
    "values that the Triton kernel {} computes, by which its wrapper chooses sizes: without a card "
    "there are none"
)
TRITON_ON_CPU = "Triton kernels, which a CPU cannot run: predict it for a card"
NO_TRITON = (
    "Triton kernels, and {} is not installed here: on Linux, python -m pip install "
    "-c constraints.txt -e '.[liger]' does it"
)
MESSAGES = {  # a part of what torch says: what the run uses
    "convert all Tensors to FakeTensors": OUTSIDE,
    "linked with support for cuda": GPU,  # a build for the CPU, asked for a tensor on CUDA
    "Torch not compiled with CUDA": GPU,  # the same, asked to move one
    "Found no NVIDIA driver": GPU,  # a build for CUDA, where there is none
    "FlexAttention does not": FLEX,
}
# Of an error that has come a long way only the text is left: our own sentences, too.
MISTAKES = MESSAGES | {USES.format(what): what for what in (GPU,)}


def understood(error: BaseException) -> NotSimulated | None:
    """What an error of torch's means; None where it is not one of those."""
    text = str(error)
    what = next((what for words, what in MESSAGES.items() if words in text), None)
    return what and NotSimulated.uses(what)
