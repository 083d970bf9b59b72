"""Write `data/calculators.csv`: what the usual calculators say of runs that others measured.

    python -m evidence calculators

The runs are those of `data/real_cards.csv` that were judged, whose peak of tensors is known, and
that train all weights with AdamW, or 16-bit weights with LoRA. What each calculator is given:

- `accelerate estimate-memory`: its own functions, on the model without its head, as it builds it;
  the column "float16" for runs with 16-bit products. It asks for nothing else.
- DeepSpeed's `estimate_zero2_model_states_mem_needs` of one card without offloading: 2 bytes a
  weight in 16 bits and 18 of gradients, copies and averages, of all weights, trained or not
  (deepspeed/runtime/zero/stage_1_and_2.py of 0.19.8). It knows no activations, and says so.
- 16 bytes a parameter: weight, gradient, two averages and a copy; frozen ones take their format's.
- The formula: Korthikanti and others, "Reducing Activation Recomputation in Large Transformer
  Models" (arXiv 2205.05198), sections 4 and 5. A layer keeps s b h (34 + 5 a s / h) bytes in 16
  bits, without the second term where attention keeps no scores, and 2 s b h with checkpointing;
  last norm, output layer and logits in 32 bits add 4 s b h (1 + v / h). Left out: the mask of a
  dropout behind the embedding, s b h in all. NVIDIA's own program has the same terms, with an inner
  width f: s b h (18 + 4 f / h), which is 34 for f = 4 h, and 4 s b h (1 + v / h)
  (megatron/training/theoretical_memory_usage.py of NVIDIA/Megatron-LM @00caa53a).
  In 32 bits all but the masks are twice as large: that is our extension. To that come the bytes of
  weights, gradients and averages in the formats of the run.

Peers that were put beside them in November 2026; what each is given was fixed here before its code
was written:

- torch-kitsune 0.7.0: its own `predict_memory` on the model with its adapters, as it is trained,
  the batch, the length and the type of the products; all of its total, 15 % of overhead included.
- PyTorch's `MemTracker` (torch.distributed._tools.mem_tracker): the peak of the source's own code
  on fake tensors of a CPU, by its total; without a card it can have no other. An autocast for CUDA
  is one for CPUs there.
- Five of the web, by the formulas that they print, in `web_calculators`: Hugging Face's anatomy of
  a model's memory (18 bytes of every parameter in mixed precision, 16 in 32 bits), the guide of the
  NAIRR pilot (40 bytes), vram.asmirnov.xyz (furiousteabag/vram-calculator), EleutherAI's
  calc_transformer_mem.py, and LLM System Requirements (manuelescobar-dev). Where one has a switch
  for mixed precision, runs with 16-bit products have it on. What they add for CUDA's context is
  left out, which the rows do not hold; what they say of frozen weights is what their code says,
  and that is nothing but for the last. Models whose MLP is gated have three matrices in it.
- The estimator inside of Inductor (torch._inductor.fx_passes.memory_estimator) takes a compiler's
  graphs of a forward and a backward pass, and knows no optimizer: it is no row of this table.

Some of these runs showed us a missing rule of the prediction: so the predictions had seen the runs,
and the calculators had not.
"""

import copy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from unittest.mock import patch

import pandas as pd
import torch
from accelerate.commands.estimate import estimate_training_usage
from accelerate.utils import calculate_maximum_sizes
from transformers import AutoModel

from evidence import mem_tracker, web_calculators
from evidence.decoder import WORDS, Decoder
from evidence.litgpt_model import Model
from evidence.sources import course, fms, litgpt, torchtune_packed
from evidence.tables import DATA, ROOT, replace_file
from helpers.tasks import MODELS

QUANTITIES = ("allocated", "active")  # of tensors; others count the driver's part too
GUESSES = ("accelerate", "deepspeed", "sixteen_bytes", "formula")
# python -m pip install --no-deps --target build/kitsune torch-kitsune==0.7.0
KITSUNE = ROOT / "build" / "kitsune"  # without it, what was recorded of it stands


@dataclass(frozen=True)
class Case:
    """What the calculators ask of a run. `width` is the model's, `bits` those of its products."""

    model: torch.nn.Module  # without data, trained weights marked
    known: torch.nn.Module  # what accelerate would build
    batch: int
    length: int
    width: int
    layers: int
    heads: int
    vocabulary: int
    bits: int = 16
    scores: bool = False  # attention keeps them
    checkpointed: bool = False
    groups: int = 0  # heads of keys and values
    inner: int = 0  # width of the MLP
    matrices: int = 3  # of the MLP, of which a gated one has three

    def bytes_of(self, trained: bool) -> int:
        sizes = (p for p in self.model.parameters() if p.requires_grad == trained)
        return sum(p.numel() * p.element_size() for p in sizes)

    def accelerate(self) -> float:
        """The largest number of the row "Training using Adam"; it counts in 32 bits."""
        size = calculate_maximum_sizes(self.known.to(torch.float32))[0]
        return max(estimate_training_usage(size, f"float{self.bits}").values())

    def deepspeed(self) -> float:
        return (2 + 18) * sum(p.numel() for p in self.model.parameters())

    def sixteen_bytes(self) -> float:
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        return 16 * trained + self.bytes_of(trained=False)

    def formula(self) -> float:
        one = self.batch * self.length * self.width  # s b h
        wide = self.bits // 16
        if self.checkpointed:
            layer = 2 * wide * one
        else:
            scores = (4 * wide + 1) * self.heads * self.length / self.width if self.scores else 0
            layer = one * (32 * wide + 2 + scores)
        ends = 4 * one * (1 + self.vocabulary / self.width)
        weights = self.bytes_of(trained=False) + 4 * self.bytes_of(trained=True)
        return weights + self.layers * layer + ends

    def for_the_web(self) -> web_calculators.Run:
        sizes = [(p.numel(), p.requires_grad) for p in self.model.parameters()]
        return web_calculators.Run(
            parameters=sum(n for n, _ in sizes),
            trained=sum(n for n, is_trained in sizes if is_trained),
            batch=self.batch,
            length=self.length,
            width=self.width,
            layers=self.layers,
            heads=self.heads,
            groups=self.groups,
            inner=self.inner,
            matrices=self.matrices,
            vocabulary=self.vocabulary,
            bits=self.bits,
            checkpointed=self.checkpointed,
        )

    def kitsune(self) -> float:
        """By its own code, of which build/kitsune has a copy (see `KITSUNE`)."""
        with patch.object(sys, "path", [*sys.path, str(KITSUNE)]):
            from kitsune.predict import predict_memory

        kind = "bfloat16" if self.bits == 16 else "float32"
        shape = (self.length,)  # one sample's
        return predict_memory(self.model, shape, self.batch, kind, optimizer="adamw").total_bytes


Found = Iterator[tuple[str, str, Case]]  # set, run, and what is known of it


def of_fms() -> Found:
    for name, (workload, methods) in fms.MODELS.items():
        config = workload.config
        shape = [4096, config.hidden_size, config.num_hidden_layers]
        shape += [config.num_attention_heads, config.vocab_size]
        mlp = dict(groups=config.num_key_value_heads, inner=config.intermediate_size)
        for method in (name for name in ("LoRA", "full") if name in methods):
            model = MODELS[workload.task].from_config(copy.deepcopy(config))
            model = fms.METHODS[method][0](model)
            known = AutoModel.from_config(copy.deepcopy(config))
            for batch in methods[method]:
                case = Case(model, known, batch, *shape, checkpointed=True, **mlp)
                yield "fms", f"{name} {method}, batch {batch}", case


def of_litgpt() -> Found:
    for name, s in litgpt.RUNS.items():
        if s.quantized:
            continue
        model = Model(s)
        for part, p in model.named_parameters():
            p.requires_grad_("lora" in part or not s.rank)
        known = Model(s)
        del known.head
        for part in known.modules():  # without adapters
            for adapter in ("lora_a", "lora_b"):
                part._parameters.pop(adapter, None)
        shape = s.batch, s.length, s.width, s.layers, s.heads, s.vocabulary
        mlp = dict(groups=s.groups, inner=s.inner, matrices=2 if s.mlp == "plain" else 3)
        yield "litgpt", name, Case(model, known, *shape, **mlp)


def of_torchtune() -> Found:
    t = torchtune_packed
    shape = 2, t.LENGTH, t.WIDTH, t.LAYERS, t.HEADS, t.VOCABULARY
    mlp = dict(groups=t.GROUPS, inner=t.INNER)
    case = Case(t.Model().to(torch.bfloat16), t.Model(), *shape, **mlp)
    yield "torchtune", "Llama-3.2-3B, packed", case


def of_course() -> Found:
    students = {"csdiywithme": course.CSDIYWITHME, "linyun": course.LINYUN}
    students |= {"niuhuang": course.NIUHUANG, "sidsoc12": course.SIDSOC12}
    for student, runs in (students | {"wedsonlin": course.WEDSONLIN}).items():
        for name, s in runs.items():
            if s.stage == "train":
                shape = s.batch, s.length, s.width, s.layers, s.heads, WORDS
                model, bits = Decoder(s), 16 if s.bf16 else 32
                mlp = dict(groups=s.heads, inner=s.inner)
                case = Case(model, Decoder(s), *shape, bits, scores=True, **mlp)
                yield f"course-{student}", name, case


def cases() -> Found:
    """What is known of each run, on models without data."""
    with torch.device("meta"):
        for source in (of_fms, of_litgpt, of_torchtune, of_course):
            yield from source()


def compared() -> pd.DataFrame:
    """One row a run: measured, predicted, and what each calculator says, in bytes."""
    rows = pd.read_csv(DATA / "real_cards.csv").query("role == 'judged'")
    rows = rows[rows["quantity"].isin(QUANTITIES)].set_index(["set", "run"])
    before = pd.read_csv(DATA / "calculators.csv").set_index(["set", "run"])
    found = []
    for name, run, case in list(cases()):  # a generator would leave its device to what follows
        if (name, run) in rows.index:  # some rows of a set calibrate
            known = rows.loc[(name, run)]
            row = {"set": name, "run": run, "model": known["model"]}
            full = all(p.requires_grad for p in case.model.parameters())
            row |= {"kind": "full" if full else "LoRA", "measured": known["measured"]}
            row |= {"predicted": known["predicted"]}
            row |= {guess: int(getattr(case, guess)()) for guess in GUESSES}
            kitsune = case.kitsune() if KITSUNE.is_dir() else before.loc[(name, run), "kitsune"]
            row |= {"kitsune": int(kitsune), "mem_tracker": mem_tracker.peak(name, run)}
            asked = case.for_the_web()
            found.append(row | {way: int(f(asked)) for way, f in web_calculators.WAYS.items()})
    return pd.DataFrame(found)


def write() -> None:
    replace_file(DATA / "calculators.csv", compared())
