"""What cannot be simulated, and why, in words.

Where we find it ourselves we raise `NotSimulated`, in the place of torch's own error where a
function of torch's finds it. `MESSAGES` is for what torch's C++ says, which has no type of its own:
it is recognised by its text, and has to follow it. A test provokes each.
"""


class NotSimulated(ValueError):
    """A run that cannot be simulated. Its text is one sentence: what the run does, what to do.

    `what` is what it uses that a simulation has not, where it is that.
    """

    what = ""

    @classmethod
    def uses(cls, what: str) -> "NotSimulated":
        """The run uses something that a simulation has not."""
        refused = cls(USES.format(what))
        refused.what = what
        return refused


USES = "the run uses {}"
GPU = "a GPU: leave the model on the CPU, the simulation stands in"
OUTSIDE = "a tensor or model made outside of it: build them inside"
FLEX = "flex attention, which a CPU cannot train: take another kernel"
FLEX_EAGER = (
    "flex attention that is not compiled, which makes the scores of all pairs: call what "
    "torch.compile(flex_attention) returns"
)
FLEX_LEARNED = (
    "flex attention whose score_mod reads what is trained, compiled by itself: compile the "
    "function or the model that calls it"
)
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
# A part of what torch says where the run uses a GPU: RuntimeErrors of its C++, and torch.cuda's
# AssertionError, which stays what it is, for libraries catch it that look whether there is a card.
MESSAGES = (
    "linked with support for cuda",  # a build for the CPU, asked for a tensor on CUDA
    "Torch not compiled with CUDA",  # the same, asked to move one
    "Found no NVIDIA driver",  # a build for CUDA, where there is none
    USES.format(GPU),  # of an error that has come through another process only our text is left
)


def what_it_uses(error: BaseException) -> str:
    """What an error says that a run uses and a simulation has not; "" where it is none of those."""
    if isinstance(error, NotSimulated):
        return error.what
    text = str(error)
    return GPU if any(words in text for words in MESSAGES) else ""
