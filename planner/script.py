"""The script that `fit` hands out: it runs as it is, on samples that the reader replaces."""

import functools
import inspect
import json

import jinja2

from fake_cuda.files import example_file
from fake_cuda.units import CLASSIFY, PICTURES, SPEECH, TEXTS_AND_PICTURES
from helpers.hardware import versions
from helpers.models import INSIDE
from helpers.samples import patches_of, shape_of, sound_of, together, tokens_of_picture
from helpers.tasks import MODELS, loss_of_step
from helpers.workload import Workload

from .changes import PEFT_TASKS, beside_experts, head_name, learn_whole, stack_names, stacks
from .question import Question
from .techniques import Plan

TEMPLATE = "recipe.jinja"  # in examples/
COLLATORS = {  # which pad labels, too, with -100
    "language_modelling": "DataCollatorForSeq2Seq",
    "text_classification": "DataCollatorWithPadding",
}


def script(question: Question, plan: Plan, micro_batch: int) -> str:
    """A whole script for a plan, from `examples/recipe.jinja`."""
    template = _template(example_file(TEMPLATE).read_text("utf-8"))
    return template.render(**_values(question, plan, micro_batch)).rstrip()


@functools.cache
def _template(text: str) -> jinja2.Template:
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(text)


def _values(question: Question, plan: Plan, micro_batch: int) -> dict[str, object]:
    """What the template asks for, by name."""
    workload = question.workload
    classifies, pictures = workload.task in CLASSIFY, workload.task == PICTURES
    settings = question.settings(plan, micro_batch).items()
    return {
        "torch": versions()["torch"].partition("+")[0],
        "packages": _packages(plan, workload.task),
        "techniques": {technique.name for technique in plan.techniques},
        "functions": _functions(plan, question.mixture, workload.task),
        "unpacked": question.unpacked,
        "mixture": question.mixture,
        "stacks": _stacks(question),
        "stack_names": json.dumps(stack_names(question.skeleton)),
        "targets": json.dumps(beside_experts(question.skeleton)),
        "auto_model": MODELS[workload.task].__name__,
        "inside": INSIDE.get(workload.config.model_type),
        "model": json.dumps(question.hub_id),
        "dtype": question.dtype(plan),
        "head": json.dumps(head_name(question.skeleton)),
        "peft_task": json.dumps(PEFT_TASKS.get(workload.task)),
        "classifies": classifies,
        "learn_whole": json.dumps(learn_whole(question.skeleton)),
        "pictures": pictures,
        "speech": workload.task == SPEECH,
        "sees": _sees(workload),
        "shape": _shape(workload),
        "pad_token": getattr(workload.config, "pad_token_id", None),
        "length": workload.length,
        "label": 0 if classifies else f"[2] * {workload.length}",
        "samples": 2 * question.batch,
        "settings": [f"{name}={value!r}".replace("'", '"') for name, value in settings],
        "collator": COLLATORS.get(workload.task),
    }


def _packages(plan: Plan, task: str) -> list[str]:
    """What pip is to install, with the versions that were predicted; torch is there."""
    names = ["transformers", "accelerate"]
    names += ["torchvision", "pillow"] if task == TEXTS_AND_PICTURES else []  # its processor's
    names += [package for technique in plan.techniques for package in technique.packages]
    known = versions()  # one for Linux alone may be missing here
    return [f"{name}=={known[name]}" if name in known else name for name in dict.fromkeys(names)]


def _stacks(question: Question) -> str:
    """What peft is told to adapt a mixture's experts."""
    found = stacks(question.skeleton).items()
    ends = [f"{name.rpartition('.')[2]}.{key}" for name, keys in found for key in keys]
    return json.dumps(list(dict.fromkeys(ends)))


def _shape(workload: Workload) -> str:
    """Of the tensor that a sample is, beside its labels."""
    of = {PICTURES: shape_of, SPEECH: sound_of}.get(workload.task)
    return ", ".join(map(str, of(workload.config))) if of else ""


def _sees(workload: Workload) -> dict[str, int]:
    """The picture in front of a text, in numbers; nothing where there is none."""
    if workload.task != TEXTS_AND_PICTURES:
        return {}
    config, size = workload.config, workload.image_size
    tokens = tokens_of_picture(config, size)
    patches, numbers = patches_of(config, size)
    return {
        "size": size,
        "first": tokens[0],
        "inside": tokens[1],
        "last": tokens[-1],
        "tokens": len(tokens) - 2,
        "patches": patches,
        "numbers": numbers,
        "rows": size // config.vision_config.patch_size,
    }


def _functions(plan: Plan, mixture: bool, task: str) -> list[str]:
    """The source of what is pasted in front: what changes the model first, then its optimizer."""
    ordered = sorted(plan.techniques, key=lambda technique: technique.model is None)
    both = [t.functions + (t.mixture_functions if mixture else ()) for t in ordered]
    first = {SPEECH: [(loss_of_step,)], TEXTS_AND_PICTURES: [(together,)]}.get(task, [])
    return [inspect.getsource(function) for functions in first + both for function in functions]
