"""Five calculators of the web, by the formulas that they print; `calculators.py` asks them.

- Hugging Face, "Anatomy of Model's Memory" (docs/source/en/model_memory_anatomy.md of
  huggingface/transformers @249ef816): bytes for a parameter; "plus activation memory and temp
  memory", for which it has no formula.
- The guide of the NAIRR pilot (docs/source/resource_guides/gpu_estimation.rst of
  NAIRRProgram/nairr @00aec2f8): 40 GB for a billion parameters.
- vram.asmirnov.xyz (app/_lib/index.ts of furiousteabag/vram-calculator @b3675695).
- EleutherAI's calculator (calc/calc_transformer_mem.py of EleutherAI/cookbook @069ae2ef), which
  counts parameters by itself, from the shape.
- LLM System Requirements (llm_tools/utils/memory_utils.py and config/memory_config.py of
  manuelescobar-dev/LLM-System-Requirements @8a44fc45 and @0caa89f9).
"""

from typing import NamedTuple


class Run(NamedTuple):
    """What they ask of a training run with AdamW on one card. `bits` are those of products."""

    parameters: int
    trained: int  # of them
    batch: int
    length: int
    width: int
    layers: int
    heads: int
    groups: int  # heads of keys and values
    inner: int  # width of the MLP
    matrices: int  # in the MLP: three if it is gated
    vocabulary: int
    bits: int
    checkpointed: bool

    @property
    def mixed(self) -> bool:
        return self.bits == 16

    @property
    def sbh(self) -> int:
        return self.length * self.batch * self.width


def anatomy(run: Run) -> float:
    """Weights in 32 bits, with a copy in 16 if mixed; gradients; two averages."""
    return ((6 if run.mixed else 4) + 4 + 8) * run.parameters


def nairr(run: Run) -> float:
    return 40 * run.parameters


def smirnov(run: Run) -> float:
    """The same as the anatomy, and activations and outputs; without its 1,000 MiB for CUDA."""
    wide = 2 if run.mixed else 4
    scores = run.batch * run.heads * run.length**2
    keys = run.sbh * run.groups / run.heads
    attention = wide * (3 * run.sbh + 2 * keys + 2 * scores) + scores + run.sbh
    inside = run.batch * run.length * run.inner
    mlp = wide * (run.sbh + 2 * inside) + run.sbh
    norms = wide * 2 * run.sbh
    outputs = 2 * 4 * run.batch * run.length * run.vocabulary
    return anatomy(run) + run.layers * (attention + mlp + norms) + outputs


def eleuther(run: Run) -> float:
    """With its default of 4 bytes for a gradient; 12 of the optimizer, also in 32 bits."""
    square = run.layers * run.width**2
    known = 2 * run.vocabulary * run.width + run.width * run.length
    known += 8 * run.width * run.layers + 2 * run.width
    known += 2 * (1 + run.groups / run.heads) * square
    known += run.matrices * square * run.inner / run.width
    low = 2  # bytes, in which activations are counted whatever the run's precision
    layer = 16 * low + 2
    if not run.checkpointed:
        layer += (2 * low + 1) * run.heads * run.length / run.width
    return known * ((2 if run.mixed else 4) + 4 + 12) + run.sbh * run.layers * layer


def escobar(run: Run) -> float:
    """The activations of one layer, and a cache of keys and values, which training has not."""
    wide = run.bits // 8
    cache = 2 * run.batch * run.length * run.layers * run.width * wide
    layer = 4 * run.sbh * (34 + 5 * run.length * run.heads / run.width)
    return wide * run.parameters + cache + layer + (8 + 4) * run.trained


WAYS = {"anatomy": anatomy, "nairr": nairr, "smirnov": smirnov}
WAYS |= {"eleuther": eleuther, "escobar": escobar}
