"""Fine-tuning with LitGPT on one A10G: the table of config_hub/finetune/README.md, run again.

LitGPT's loop and loss; its model is in `evidence/litgpt_model.py`. What is behind each choice, in
the versions that the table was made with (litgpt of April to September 2024, lightning
2.3 and 2.4, bitsandbytes 0.42):

- Every sample is cut to 512 tokens and the longest of Alpaca2k reaches them (the log in
  tutorials/0_to_litgpt.md says so), so each epoch has a batch of 512.
- The norm reads 32-bit floats; the rotary tables are 32-bit, and so are its products (model.py).
- The head runs over pieces of 128 tokens (lora.py); Fabric turns what a model returns into 32 bits
  (plugins/precision/half.py); the loss is taken piece by piece (utils.py).
- Quantized: every linear layer, the head too, in 4 bits of blocks of 64 with 32-bit scales, made
  from 16-bit floats (`half`), which is therefore what it is expanded to before it becomes bfloat16
  (plugins/precision/bitsandbytes.py). bitsandbytes 0.42 keeps the input of each quantized product
  (autograd/_functions.py); newer ones do not.

And the table of October 2023 (tutorials/resource-tables.md, commit 8641822b, lightning at 71aed751,
bitsandbytes 0.41.1) on an A100, where the first batch has the longest sample of Alpaca, uncut:

- The norm is taken in 32 bits, its product too (rmsnorm.py since pull request 606 of 24 October,
  which the table must have been made with: the commit it names, a week older, kept less).
- The rotary tables are made again, in 32 bits, for the longest sample (`max_seq_length` in
  model.py, set outside of Fabric's context).
- "nf4-dq" keeps the scales in 8 bits, with a 32-bit scale for each 256 of them.
- Attention is torch 2.1.0's own. Until pull request 668 of 24 October the code took the package
  flash-attn 2 wherever that was installed, and the table does not say whether it was: of a single
  text both leave the result by heads, so its copy by tokens is kept too, and of several texts only
  rows in 16 bits are in the table, whose frozen layers keep no input.
- The peak is the first batch's: no later one is that long, and AdamW's states are small.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from evidence.cards import card
from evidence.litgpt_model import PIECE, Model, Shape
from fake_cuda import Simulation, simulate


def loss(logits, targets):
    """`chunked_cross_entropy`: piece by piece, in the pieces of the head where it had some."""
    if isinstance(logits, list):
        targets = [t.reshape(-1) for t in targets.split(PIECE, dim=1)]
        logits = [piece.reshape(-1, piece.shape[-1]) for piece in logits]
    else:
        logits = logits.reshape(-1, logits.shape[-1]).split(PIECE)
        targets = targets.reshape(-1).split(PIECE)
    pairs = zip(logits, targets, strict=True)
    return torch.cat([F.cross_entropy(x, t, reduction="none") for x, t in pairs]).sum()


class Paged(torch.optim.Optimizer):
    """bitsandbytes' AdamW as the card sees it: 32-bit states, those of parameters of 100,000
    values and more on the host (optim/optimizer.py: get_state_buffer)."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            if parameter.numel() < 100_000 and not self.state[parameter]:
                for name in ("state1", "state2"):
                    self.state[parameter][name] = torch.zeros_like(parameter, dtype=torch.float32)


def handed_out(model: Model, ids, pieces: bool):
    """What Fabric makes of the logits, while those of the last batch, and with them its graph and
    the inputs that quantized products kept, still stand."""
    logits = model(ids, pieces)
    return [piece.float() for piece in logits] if pieces else logits.float()


def train(shape: Shape, name: str = "A10G", batches: int = 3) -> Simulation:
    """Batches of equal length, and a step after the first and the last, or after each."""

    def run():
        model = Model(shape)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora" in name or not shape.rank)
        kind = Paged if shape.quantized else torch.optim.AdamW
        optimizer = kind([p for p in model.parameters() if p.requires_grad])
        for batch in range(batches):
            ids = torch.ones(shape.batch, shape.length, dtype=torch.long)
            targets = torch.ones_like(ids)[..., 1:]
            logits = handed_out(model, ids, pieces=bool(shape.rank))
            if shape.rank:
                logits[-1] = logits[-1][..., :-1, :]
            else:
                logits = logits[..., :-1, :]
            (loss(logits, targets) / 4).backward()
            if batch != 1 or not shape.accumulates:
                optimizer.step()
                optimizer.zero_grad()

    return simulate(run, card=card(name))


LLAMA_2 = Shape(32, 4096, 32, 32, 11008, 32000, batch=2, head_size=128)
MISTRAL = replace(LLAMA_2, groups=8, inner=14336)
LLAMA_3 = replace(MISTRAL, vocabulary=128256, batch=1)
LLAMA_3_1 = replace(LLAMA_3, newer=True)
LLAMA_3_2_1B = replace(LLAMA_3_1, layers=16, width=2048, inner=8192, head_size=64)
LLAMA_3_2_3B = replace(LLAMA_3_1, layers=28, width=3072, inner=8192, heads=24)
TINY = replace(MISTRAL, layers=22, width=2048, groups=4, inner=5632, head_size=64)
TINY_LORA = replace(TINY, batch=8, everywhere=True, accumulates=False)
FALCON = Shape(32, 4544, 71, 1, 4 * 4544, 65024, "plain", head_size=64, layer_norm=True)
FALCON = replace(FALCON, parallel=True, shared_norm=True)
STABLELM = Shape(16, 4096, 32, 32, 4 * 4096, 50688, "plain", head_size=128, layer_norm=True)
STABLELM = replace(STABLELM, rotary=0.25, bias=True, parallel=True)
PHI_2 = Shape(32, 2560, 32, 32, 4 * 2560, 51200, "plain", head_size=80, layer_norm=True)
PHI_2 = replace(PHI_2, rotary=0.4, bias=True, head_bias=True, parallel=True, shared_norm=True)
PHI_2 = replace(PHI_2, batch=4, rank=8, everywhere=True)
PHI_3 = replace(LLAMA_2, width=3072, inner=8192, vocabulary=32064, head_size=96, batch=4, rank=8)
PHI_3 = replace(PHI_3, everywhere=True)
GEMMA = Shape(18, 2048, 8, 1, 16384, 256000, "gelu gated", head_size=256, scaled=True)
GEMMA = replace(GEMMA, batch=2, rank=8, dropout=0.1, everywhere=True)
GEMMA_7B = replace(GEMMA, layers=28, width=3072, heads=16, groups=16, inner=24576, batch=1)


def in_4_bits(shape: Shape, **changes) -> Shape:
    return replace(shape, quantized=True, **changes)


RUNS = {
    "falcon-7b lora": FALCON,
    "falcon-7b qlora": in_4_bits(FALCON),
    "gemma-2b lora": GEMMA,
    "gemma-2b qlora": in_4_bits(GEMMA, rank=16),
    "gemma-7b qlora": in_4_bits(GEMMA_7B, rank=16),
    "llama-2-7b lora": LLAMA_2,
    "llama-2-7b qlora": in_4_bits(LLAMA_2),
    "llama-3-8b lora": LLAMA_3,
    "llama-3-8b qlora": in_4_bits(LLAMA_3, batch=2),
    "llama-3.1-8b lora": LLAMA_3_1,
    "llama-3.1-8b qlora": in_4_bits(LLAMA_3_1, batch=2),
    "llama-3.2-1b lora": LLAMA_3_2_1B,
    "llama-3.2-1b qlora": in_4_bits(LLAMA_3_2_1B, batch=2),
    "llama-3.2-3b lora": LLAMA_3_2_3B,
    "llama-3.2-3b qlora": in_4_bits(LLAMA_3_2_3B, batch=2),
    "mistral-7b lora": MISTRAL,
    "mistral-7b qlora": in_4_bits(MISTRAL),
    "mistral-7b-v0.2 lora": MISTRAL,
    "mistral-7b-v0.2 qlora": in_4_bits(MISTRAL),
    "phi-2 lora": PHI_2,
    "phi-2 qlora": in_4_bits(PHI_2),
    "phi-3 lora": PHI_3,
    "phi-3 qlora": in_4_bits(PHI_3),
    "stablelm-base-alpha-3b lora": STABLELM,
    "stablelm-base-alpha-3b qlora": in_4_bits(STABLELM),
    "tiny-llama full": replace(TINY, rank=0, batch=4),
    "tiny-llama lora": TINY_LORA,
    "tiny-llama qlora": in_4_bits(TINY_LORA),
}


def in_2023(shape: Shape, length: int, batches: dict[str, tuple[int, ...]]) -> dict[str, Shape]:
    """The lines of one model in the table of October 2023."""
    shape = replace(shape, early=True, length=length, rank=8)
    found = {}
    for kind, sizes in batches.items():
        how = {"quantized": bool(kind), "twice": kind == "nf4-dq"}
        found |= {
            f"{kind}, batch {n}" if kind else f", batch {n}": replace(shape, batch=n, **how)
            for n in sizes
        }
    return found


PHI_1_5 = replace(PHI_2, layers=24, width=2048, inner=8192, rotary=0.5, head_size=64)
PHI_1_5 = replace(PHI_1_5, everywhere=False)
LLAMA_2_13B = replace(LLAMA_2, layers=40, width=5120, heads=40, groups=40, inner=13824)
FOUR_BITS = {"nf4": (1,), "nf4-dq": (1,)}
RUNS_2023 = {
    f"{model}{' ' * (name[0] != ',')}{name}": found
    for model, shape, length, batches in (
        ("phi-1.5", PHI_1_5, 1044, (1, 2, 4)),
        ("stablelm-alpha-3b", STABLELM, 1034, (1, 2, 4)),
        ("llama-2-7b", LLAMA_2, 1304, (1, 2)),
        ("llama-2-13b", LLAMA_2_13B, 1304, (1,)),
    )
    for name, found in in_2023(shape, length, {"": batches} | FOUR_BITS).items()
}


def runs() -> Iterator[tuple[str, Callable]]:
    """Each line of the table that was run on one card and ended, by its file's name."""
    for name, shape in RUNS.items():
        yield name, partial(train, shape)


def runs_2023() -> Iterator[tuple[str, Callable]]:
    for name, shape in RUNS_2023.items():
        yield name, partial(train, shape, "A100-40GB", batches=1)


PEAKS = {"litgpt": runs, "litgpt-2023": runs_2023}
