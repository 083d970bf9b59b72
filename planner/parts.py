"""Where a model's layers are, the same model with few of them, and how cards share products."""

import copy
import dataclasses
import warnings

import peft
import torch
import transformers

from fake_cuda.depth import SHALLOW
from helpers.workload import Workload

from .layers import DEEP, layers_are_alike, take_layers

STYLES = {  # those of transformers' plans that torch's own say as well
    "colwise": "ColwiseParallel()",
    "rowwise": "RowwiseParallel()",
}
SUMMED = "replicated_with_grad_allreduce"  # there: whole weights, used on a part of the heads


def skeleton(workload: Workload) -> torch.nn.Module:
    """The model without its weights."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(copy.deepcopy(workload.config))


def tensors_of(
    workload: Workload, dtype: torch.dtype, lora: int
) -> tuple[list[tuple[int, torch.dtype]], list[int]]:
    """Bytes and type of each parameter and then of each buffer, and how many values each weight
    has that is trained; with adapters of that rank, which are in float32."""
    own = copy.deepcopy(workload.config)  # into which the type is written
    with torch.device("meta"), warnings.catch_warnings(action="ignore", category=FutureWarning):
        model = transformers.AutoModelForCausalLM.from_config(own, dtype=dtype)
        if lora:  # peft asks by a name that transformers has replaced
            kind = peft.LoraConfig(r=lora, target_modules="all-linear", task_type="CAUSAL_LM")
            model = peft.get_peft_model(model, kind)
    tensors = [*model.parameters(), *model.buffers()]
    trained = [p.numel() for p in model.parameters() if p.requires_grad]
    return [(t.numel() * t.element_size(), t.dtype) for t in tensors], trained


def layers_of(model: torch.nn.Module) -> str:
    """Where its layers are: the list with as many parts as the configuration counts layers."""
    count = model.config.get_text_config().num_hidden_layers
    lists = (n for n, m in model.named_modules() if isinstance(m, torch.nn.ModuleList))
    found = next((name for name in lists if len(model.get_submodule(name)) == count), None)
    if found is None:
        raise ValueError(f"no list of layers was found in a {type(model).__name__}: use --script")
    return found


def plan_of(model: torch.nn.Module, tensor: int) -> dict[str, str]:
    """How the parts of a layer are shared, by the plan that the model brings, in its words.

    Heads, embeddings and norms beside the layers stay whole.
    """
    kind, config = type(model).__name__, model.config.get_text_config()
    given = getattr(config, "base_model_tp_plan", None) or {}
    inside = {name[len("layers.*.") :]: s for name, s in given.items() if name.startswith("layers")}
    if other := sorted(set(inside.values()) - STYLES.keys() - {SUMMED}):
        raise ValueError(f"the plan of {kind} to share products needs {other[0]}: use --script")
    if not inside:
        raise ValueError(f"{kind} brings no plan to share its products: leave out --tensor")
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        count = getattr(config, name, None) or tensor
        if count % tensor:
            raise ValueError(f"{name} of {kind} is {count}, which tensor={tensor} does not divide")
    return inside


def few_layers(workload: Workload) -> list[Workload]:
    """The same with `SHALLOW` layers, where these may tell what many do; else none."""
    config = workload.config.get_text_config()
    if config.num_hidden_layers < DEEP or not layers_are_alike(skeleton(workload)):
        return []
    kind = (getattr(config, "layer_types", None) or ["any"])[0]
    few = [type(workload.config).from_dict(workload.config.to_dict()) for _ in SHALLOW]
    try:
        for n, own in zip(SHALLOW, few, strict=True):
            take_layers(own, (kind,) * n)
        found = [dataclasses.replace(workload, config=own) for own in few]
        lists = {layers_of(skeleton(one)) for one in (workload, *found)}
    except (AttributeError, NotImplementedError, ValueError):  # the number may be of other layers
        return []
    return found if len(lists) == 1 else []
