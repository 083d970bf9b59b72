"""What techniques do to a model and its optimizer. This code is predicted.

The script that `fit` hands out holds `part`, `chunked_loss` and `in_backward` as they stand here,
and for a mixture what packs it into 4 bits; the others stand for lines of `examples/recipe.jinja`.
"""

import functools

import torch
import torch.nn.functional as F
import transformers
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.checkpoint import checkpoint

FIRST_OF_HEAD = "pre_classifier"  # of two layers
# As peft names them; it has none for models of pictures or of sound alone.
PEFT_TASKS = {
    "language_modelling": "CAUSAL_LM",
    "image_text_to_text": "CAUSAL_LM",
    "text_classification": "SEQ_CLS",
}


def part(head, hidden, targets):
    """The sum of the loss over some tokens; those labelled -100 count nothing."""
    return F.cross_entropy(head(hidden).float(), targets, reduction="sum")


def chunked_loss(model, size=512):
    """The same loss without all logits at once: those of `size` tokens are computed twice."""
    whole = model.forward

    @functools.wraps(whole)  # Trainer reads here which columns the model takes
    def forward(input_ids=None, *, labels=None, num_items_in_batch=None, **others):
        if labels is None:  # the model answers
            return whole(input_ids, **others)
        hidden = model.base_model(input_ids, **others)[0][:, :-1].flatten(0, 1)
        targets, head = labels[:, 1:].flatten(), model.get_output_embeddings()
        total = 0.0
        for h, t in zip(hidden.split(size), targets.split(size), strict=True):
            total = total + checkpoint(part, head, h, t, use_reentrant=False)
        if num_items_in_batch is None:  # Trainer counts the labels of all micro-batches of a step
            num_items_in_batch = (targets != -100).sum()
        return {"loss": total / num_items_in_batch}

    model.forward = forward
    return model


def in_backward(model, args):
    """Adafactor for each parameter when its gradient is ready, which is then dropped."""
    if args.gradient_accumulation_steps > 1:
        raise ValueError("each micro-batch would be a step of its own: do not accumulate")
    learn = [p for p in model.parameters() if p.requires_grad]
    schedule = torch.optim.SGD(learn, args.learning_rate)  # never sees a gradient
    options = {"lr": args.learning_rate, "scale_parameter": False, "relative_step": False}
    each = {p: transformers.Adafactor([p], **options) for p in learn}

    def update(p):
        each[p].param_groups[0]["lr"] = schedule.param_groups[0]["lr"]
        each[p].step()
        p.grad = None

    for p in each:
        p.register_post_accumulate_grad_hook(update)
    return schedule


def in_16_bits(model):
    """Weights in bf16, which also stands for fp16: as many bytes."""
    return model.to(torch.bfloat16)


def adapters(model, targets="all-linear"):
    """LoRA beside every linear layer, or beside those of some names."""
    from peft import LoraConfig, get_peft_model  # takes seconds, and prints

    lora = LoraConfig(r=16, lora_alpha=32, target_modules=targets, **head_of(model))
    model = get_peft_model(model, lora)  # adapters are in float32
    for p in model.parameters():  # and so is a classifier's head, which learns too
        p.data = p.data.float() if p.requires_grad else p.data
    return model


def head_of(model) -> dict:
    """What peft is told, so that a classifier's head learns whole, and that of a decoder not."""
    if "ImageClassification" in type(model).__name__:
        head = [head_name(model)]
        return {"exclude_modules": head, "modules_to_save": head}
    if hasattr(model.config, "num_mel_bins"):  # peft's own class for Whisper's kind wants tokens
        return {}
    classifies = "SequenceClassification" in type(model).__name__
    task = PEFT_TASKS["text_classification" if classifies else "language_modelling"]
    return {"exclude_modules": learn_whole(model), "task_type": task}


def learn_whole(model) -> list[str] | None:
    """Layers that get no adapters, because peft lets them learn whole: it finds a classifier by the
    end of its name, and of DistilBERT's head both layers."""
    return [FIRST_OF_HEAD] if hasattr(model, FIRST_OF_HEAD) else None


def linear_layers(model) -> dict[str, torch.nn.Module]:
    """The layers that are one product, by name. GPT-2 writes its own transposed, as Conv1D."""
    kinds = torch.nn.Linear, transformers.pytorch_utils.Conv1D
    return {name: layer for name, layer in model.named_modules() if type(layer) in kinds}


def head_name(model) -> str:
    """The name of the part that turns the last hidden states into answers; it may be two layers."""
    *_, last = linear_layers(model)
    return last.split(".")[0]


def in_4_bits(model, compute=torch.bfloat16):
    """Every linear layer but the head with weights of 4 bits, as BitsAndBytesConfig makes them."""
    import bitsandbytes as bnb  # takes seconds

    head = head_name(model)
    for name, old in linear_layers(model).items():
        if head in name:
            continue
        weights = old.state_dict()
        if not isinstance(old, torch.nn.Linear):  # Conv1D keeps them transposed
            weights["weight"] = weights["weight"].T.contiguous()
        outputs, inputs = weights["weight"].shape
        new = bnb.nn.LinearNF4(inputs, outputs, old.bias is not None, compute)
        new.load_state_dict(weights)
        new.bias = old.bias  # in its own type
        model.set_submodule(name, new.to("cpu"))
    return model


def stacks(model) -> dict[str, list[str]]:
    """The parts of a mixture that hold all experts' weights as one parameter, and its names.

    Such a parameter has three dimensions, and a router stands beside it: a score of each expert.
    One expert is none: so a vision transformer keeps the tokens that it adds.
    Where 4 bits have packed it, it says itself that it was changed.
    """
    found = {}
    for name, part in model.named_modules():
        if isinstance(part, torch.nn.Conv1d):  # its weights have three dimensions, too
            continue
        if is_parametrized(part):
            found[name] = list(part.parametrizations)
            continue
        block = model.get_submodule(name.rpartition(".")[0])
        own = dict(part.named_parameters(recurse=False))
        own = {key: p for key, p in own.items() if p.dim() == 3 and len(p) > 1}
        flat = {p.shape for p in block.parameters() if p.dim() == 2} if own else ()
        if any((p.shape[0], width) in flat for p in own.values() for width in p.shape[1:]):
            found[name] = list(own)
    return found


def stack_names(model) -> list[str]:
    """What the parameters are called that hold all experts of a layer."""
    return sorted({key for keys in stacks(model).values() for key in keys})


def beside_experts(model) -> list[str]:
    """The names of linear layers that stand outside of blocks with experts: the attention's.

    Not those of dense layers among the mixture's: peft takes their names for the experts'.
    """
    blocks = {_place(name.rpartition(".")[0]) + "." for name in stacks(model)}
    kinds = torch.nn.Linear, transformers.pytorch_utils.Conv1D
    linear = [name for name, layer in model.named_modules() if isinstance(layer, kinds)]
    outside = [n for n in linear[:-1] if not _place(n).startswith(tuple(blocks))]
    return list(dict.fromkeys(name.rpartition(".")[2] for name in outside))


def _place(name: str) -> str:
    """The name of a part without the number of its layer."""
    return ".".join("*" if step.isdecimal() else step for step in name.split("."))


def adapters_beside_experts(model):
    """LoRA beside the linear layers of a mixture, none of them in a block with experts."""
    return adapters(model, beside_experts(model))


def experts_in_4_bits(model, names, card="cpu"):
    """Experts packed into 4 bits, which no flag does: in 16 bits to the card, layer by layer."""
    from bitsandbytes.nn.parametrize import replace_parameter_4bit  # takes seconds

    for part in list(model.modules()):
        own = dict(part.named_parameters(recurse=False))
        for name in names:
            if name in own and own[name].dim() == 3:
                replace_parameter_4bit(part.to(card), name, quant_type="nf4")
    return model


def all_in_4_bits(model):
    """A mixture's linear layers and experts with weights of 4 bits."""
    names = stack_names(model)
    return experts_in_4_bits(in_4_bits(model), names)
