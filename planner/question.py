"""What the planner is asked: a model with its task, a card, and the samples of a step."""

import copy
import functools
import json
import re
from dataclasses import dataclass, replace

import torch
import transformers

from fake_cuda.units import TEXTS_AND_PICTURES, TOKENS
from helpers import hardware, own_data, workloads
from helpers.hardware import GIB, GPU, data_file, gib, supports
from helpers.kernels import why_no_liger
from helpers.prediction import CONTEXT
from helpers.runs import load
from helpers.tasks import MODELS
from helpers.workload import Workload

from .changes import stacks
from .layers import layers_are_alike
from .techniques import CHUNKED_LOSS, LIGER, WAYS, Plan, Way

# Logits below this share of the card's memory are not worth chunks: they save less than that, and
# cost a second product with the head. Our choice.
SMALL_LOGITS = 1 / 50
# A head does more than a product where the configuration has one of these.
ODD_HEADS = (
    "final_logit_softcapping",
    "logits_scaling",
    "logit_scale",
    "lm_head_multiplier",
    "output_router_logits",
)
# Published in so few bits that nothing trains them: what transformers unpacks them with.
UNPACKED = {"mxfp4": "Mxfp4Config"}


@dataclass(frozen=True)
class Question:
    """A model, its task and its card.

    Args:
        workload: the model, and samples of so many tokens.
        card: its memory, in bytes, may be one that was asked for.
        batch: samples of an optimizer step.
        margin: how much more than predicted a run may need, as a share.
        hub_id: what `from_pretrained` takes.
        unpacked: the configuration with which its file is unpacked into 16 bits; "" for most.
    """

    workload: Workload
    card: GPU
    batch: int
    margin: float
    hub_id: str
    unpacked: str = ""

    @property
    def precision(self) -> str:
        """The type of 16 bits that the card computes in."""
        return "bf16" if supports("bf16", self.card) else "fp16"

    def need(self, reserved: float, card: GPU | None = None) -> int:
        """Bytes that a card must hold: what is reserved, the margin for errors, the context."""
        context = (card or self.card).context or CONTEXT
        return int(reserved * (1 + self.margin)) + context

    @functools.cached_property
    def skeleton(self) -> torch.nn.Module:
        """The model without its weights."""
        with torch.device("meta"):
            auto = MODELS[self.workload.task]
            return auto.from_config(copy.deepcopy(self.workload.config))

    @functools.cached_property
    def parameters(self) -> int:
        """How many the model has."""
        return self.skeleton.num_parameters()

    def with_batch(self, batch: int) -> "Question":
        """The same for so many samples of a step; a model that is built already serves both."""
        found = replace(self, batch=batch)
        for name in {"skeleton", "parameters"} & vars(self).keys():
            vars(found)[name] = getattr(self, name)  # where `cached_property` keeps it
        return found

    @functools.cached_property
    def mixture(self) -> bool:
        """Whether the model is a mixture whose experts are one parameter in each layer."""
        return bool(stacks(self.skeleton))

    @functools.cached_property
    def alike(self) -> bool:
        """Whether all layers of the model are alike."""
        return layers_are_alike(self.skeleton)

    @functools.cached_property
    def _grouped_products(self) -> bool:
        """Whether experts are multiplied in groups, by a kernel that autocast does not know."""
        return self.mixture and self.skeleton.get_experts_implementation()[""] == "grouped_mm"

    def price(self, plan: Plan) -> str:
        """What a plan costs in quality or trouble, in words."""
        said = [plan.price(self.mixture)]
        if self._grouped_products and plan.autocasts(self.precision) and not plan.half:
            said = [text for text in said if text != "nothing"]
            said += ["autocast passes the experts by, which compute in 32 bits"]
        return "; ".join(said)

    def ways(self) -> list[Way]:
        """How memory may be saved: logits by Liger's kernels, or by chunks where it has none.

        By neither where logits are small, or the head is odd.
        """
        offered = set()
        if self._logits_can_be_spared:
            offered = {CHUNKED_LOSS if self.without_liger else LIGER}
        return [way for way in WAYS if {CHUNKED_LOSS, LIGER} & set(way.techniques) <= offered]

    @functools.cached_property
    def without_liger(self) -> str:
        """Why Liger's kernels are not tried where they could spare the logits; "" if they are."""
        if not self._logits_can_be_spared:
            return ""
        if self.precision not in LIGER.precisions:
            capability = "{}.{}".format(*self.card.capability)
            return f"Triton begins with compute capability 8.0, and this card has {capability}"
        return why_no_liger(self.workload.config.model_type)

    @functools.cached_property
    def _logits_can_be_spared(self) -> bool:
        return self._has_large_logits() and self._head_is_a_product()

    def _has_large_logits(self) -> bool:
        if self.workload.task not in (TOKENS, TEXTS_AND_PICTURES):
            return False
        vocabulary = self.workload.config.get_text_config().vocab_size
        logits = 4 * self.workload.length * self.batch * vocabulary  # float32
        return logits >= SMALL_LOGITS * self.card.memory

    def _head_is_a_product(self) -> bool:
        """Whether the loss is that of one product with the last hidden states."""
        if any(getattr(self.workload.config.get_text_config(), name, None) for name in ODD_HEADS):
            return False
        return self.skeleton.get_output_embeddings() in self.skeleton.children()

    def settings(self, plan: Plan, micro_batch: int) -> dict[str, object]:
        """The keywords of TrainingArguments."""
        found: dict[str, object] = {
            "per_device_train_batch_size": micro_batch,
            "gradient_accumulation_steps": max(1, self.batch // micro_batch),
        }
        if plan.autocasts(self.precision):
            found[self.precision] = True
        return found | plan.settings()

    def dtype(self, plan: Plan) -> torch.dtype:
        """The type in which the model is loaded."""
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}[self.precision]
        return half if plan.half else torch.float32

    def changed(self, plan: Plan, workload: Workload | None = None) -> Workload:
        """The workload, or another one in its place, with the model that a plan trains."""
        found = workload or self.workload
        for change in plan.model_changes(self.mixture):
            found = found.with_model(change)
        return found


def ask(
    model: str,
    gpu: str = "T4",
    task: str | None = None,
    length: int | None = None,
    batch: int = 8,
    image_size: int | None = None,
) -> Question:
    """The question of `fit`'s arguments; ValueError says what to change."""
    if type(batch) is not int or batch < 1:
        raise ValueError(f"a batch of {batch!r} is impossible: it is a whole number from 1 on")
    workload = workloads.workload(model, task, length=length, image_size=image_size)
    unpacked = ""
    if packed := getattr(workload.config, "quantization_config", None):
        method = packed.get("quant_method", "few bits")
        if method not in UNPACKED:
            raise ValueError(f"{model} is published in {method}: name a copy of it in 16 bits")
        unpacked, config = UNPACKED[method], copy.deepcopy(workload.config)
        del config.quantization_config
        workload = replace(workload, config=config)
    local = data_file("configs", f"{model}.json")
    hub_id = json.loads(local.read_text())["_name_or_path"] if local.is_file() else str(model)
    return Question(workload, find_card(gpu), batch, blind_margin(), hub_id, unpacked)


def known_cards() -> list[GPU]:
    """The cards of `data/gpus.csv`, the smallest first."""
    return sorted(hardware.cards().values(), key=lambda card: card.memory)


def find_card(name: str) -> GPU:
    """A card of `data/gpus.csv`, or so much memory, such as "24GiB".

    Of memory alone the speed is that of another card (`as_fast_as`).
    """
    if size := re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:G|GB|GiB)", str(name), re.IGNORECASE):
        memory = int(float(size[1]) * 2**30)
        near = as_fast_as(memory)
        asked = f"a card of {gib(memory)} as fast as the {near.name}"
        return replace(near, memory=memory, context=None, facts=near.facts | {"asked": asked})
    card = hardware.gpu(name)
    if not supports("fp16", card):
        raise ValueError(f"{card.name} has no hardware for 16 bits: the recipes rest on it")
    return replace(card, facts=card.facts | {"asked": card.name})


def as_fast_as(memory: int) -> GPU:
    """The card whose speed stands for that of a card of which only the memory is known.

    Of those whose rates are known it is the nearest in whole GiB. Of several it is the slowest, so
    that no more is promised than each of them keeps. The atlas takes the same one.
    """
    rates = "bf16_tflops", "bandwidth_gb_s", "sms"
    timed = [card for card in known_cards() if all(card.facts[name] for name in rates)]

    def order(card: GPU) -> tuple:
        away = abs(round(card.memory / GIB) - round(memory / GIB))
        return away, card.facts["bf16_tflops"]

    return min(timed, key=order)


def blind_margin() -> float:
    """By how much 19 of 20 runs needed no more than what was predicted before they were known.

    A share of the prediction, from `data/blind_peaks.csv`.
    """
    keys = ["set", "run", "quantity"]
    blind = load("blind_peaks").merge(load("real_cards")[[*keys, "measured"]], on=keys)
    return float((blind["measured"] / blind["predicted"]).quantile(0.95) - 1)


def token_counts(data: str, hub_id: str) -> list[int]:
    """How many tokens each text of a file or data set has."""
    texts = list(own_data.read_table(str(data), ["text"])["text"])
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(hub_id, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"no tokenizer of {hub_id} is here, so {data} has no length") from error
    return [len(ids) for ids in tokenizer(texts)["input_ids"]]
