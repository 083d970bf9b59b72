"""One rank of several cards: the script that is predicted, and can be launched with torchrun."""

import dataclasses
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jinja2  # which helpers do not know: so ranks stand here
import torch

from fake_cuda.files import example_file
from fake_cuda.replicas import Weights
from fake_cuda.scripts import Script
from helpers import workloads
from helpers.hardware import data_file, suggest, versions
from helpers.models import INSIDE
from helpers.prediction import Prediction, predict
from helpers.settings import COUNTS, check_settings, todays
from helpers.workload import Workload

from .parts import STYLES, SUMMED, few_layers, layers_of, plan_of, skeleton, tensors_of

CUT = ("fsdp2", "hsdp")  # which cut weights, gradients and states
WHOLE = ("ddp", "zero1")  # of which each rank has all weights
STRATEGIES = WHOLE + CUT
DEEPSPEED = ("zero2", "zero3")
NO_DEEPSPEED = (
    "{} is DeepSpeed's, whose own buffers are not predicted: fsdp2, which cuts weights, gradients "
    "and states over all ranks, is"
)
OPTIMIZERS = {  # settings of `optim` -> the class, and how it works
    "adamw_torch_fused": ("torch.optim.AdamW", "fused=True"),
    "adamw_torch": ("torch.optim.AdamW", "foreach=True"),
    "sgd": ("torch.optim.SGD", "fused=True"),
}
OWN = dict(lora=0, sync_each_batch=False)  # settings that TrainingArguments has not
OWN |= dict(gradient_as_bucket_view=False, reshard_after_forward=True)
TRAINERS = dict(per_device_train_batch_size=8, gradient_accumulation_steps=1, bf16=False)
TRAINERS |= dict(activation_checkpointing=False, learning_rate=5e-5, max_grad_norm=1.0)
TRAINERS |= dict(optim="adamw_torch_fused", ddp_bucket_cap_mb=None)
ONLY = dict(gradient_as_bucket_view=WHOLE, ddp_bucket_cap_mb=WHOLE, reshard_after_forward=CUT)


@dataclass(frozen=True)
class Cut:
    """How a model is trained on several cards.

    Args:
        ranks: how many processes there are, each with a card.
        parallel: one of `STRATEGIES`.
        tensor: how many ranks share each product.
        settings: of `TRAINERS` and `OWN`.
    """

    ranks: int
    parallel: str
    tensor: int
    settings: dict

    @property
    def shards(self) -> int:
        """Over how many ranks the rows of a weight are cut, beside the cut of its products."""
        whole = dict.fromkeys(WHOLE, 1) | {"hsdp": self.ranks // 2}
        return whole.get(self.parallel, self.ranks // self.tensor)

    @property
    def title(self) -> str:
        """Such as "fsdp2 over 4 x tensor 2"."""
        if self.tensor > 1:
            return f"{self.parallel} over {self.ranks // self.tensor} x tensor {self.tensor}"
        return f"{self.parallel} over {self.ranks}"


def cut_as_asked(ranks: int, parallel: str, tensor: int = 1, **settings) -> Cut:
    """The question of `predict_rank`'s arguments; ValueError says what to change."""
    for name, count in (("ranks", ranks), ("tensor", tensor)):
        if type(count) is not int or count < 1:
            raise ValueError(f"{name}={count!r} is no count: it is a whole number from 1 on")
    if parallel in DEEPSPEED:
        raise ValueError(NO_DEEPSPEED.format(parallel))
    if parallel not in STRATEGIES:
        raise ValueError(suggest(parallel, STRATEGIES, "way to train on several cards"))
    if ranks < 2:
        raise ValueError(f"one card has nothing to share by {parallel}: name at least 2")
    if ranks % tensor:
        raise ValueError(f"{ranks} cards do not divide into groups of {tensor}: see --tensor")
    if parallel == "hsdp" and ranks % 2:
        raise ValueError(f"hsdp makes two replicas, and {ranks} cards do not divide by two")
    if tensor > 1 and parallel != "fsdp2":
        raise ValueError(f"tensor={tensor} goes with fsdp2, and not with {parallel}")
    found = Cut(ranks, parallel, tensor, _settings(parallel, settings))
    if tensor > 1 and found.settings["lora"]:
        raise ValueError("torch shares products of plain layers alone: leave out tensor or lora")
    return found


def _settings(parallel: str, given: dict) -> dict:
    """All settings, the usual ones among them; ValueError says what to change."""
    (given, _), known = todays(given), TRAINERS | OWN
    for name in given:
        if name not in known:
            raise ValueError(suggest(name, known, "setting for several cards"))
        if parallel not in ONLY.get(name, STRATEGIES):
            raise ValueError(f"{name} does nothing with {parallel}: it is for {ONLY[name][0]}")
    check_settings({k: v for k, v in given.items() if k in TRAINERS}, None, on_cpu=False)
    found = known | given
    for name, usual in known.items():
        if type(usual) is bool and type(found[name]) is not bool:
            raise ValueError(f"{name}={found[name]!r} is not True or False")
    if type(found["lora"]) is not int or found["lora"] < 0:
        raise ValueError(f"lora={found['lora']!r} is no rank of adapters: write lora=16")
    if found["optim"] not in OPTIMIZERS:
        raise ValueError(suggest(found["optim"], OPTIMIZERS, "optimizer for several cards"))
    return found


def predict_rank(
    workload: str | Workload,
    gpu: str,
    ranks: int,
    parallel: str,
    tensor: int = 1,
    *,
    length: int | None = None,
    host: float | str | None = None,
    say: Callable[[str], None] | None = None,
    **settings,
) -> Prediction:
    """Memory of rank 0 of so many, by the real wrappers, and what its link carries in a step.

    Args:
        workload: a language model, or its name as in `helpers.language_modelling`.
        gpu: a card of `data/gpus.csv`, of which each rank has one.
        ranks: how many there are.
        parallel: "ddp", "zero1", "fsdp2", or "hsdp" with two replicas.
        tensor: how many ranks share each product; with "fsdp2".
        length: tokens of a sample, where a name is given.
        host: seconds that a card's computer takes for an operation, as `predict` takes them.
        say: is told how far it is.
        settings: of `TRAINERS`, as `TrainingArguments` names them, and of `OWN`: `lora`, the rank
            of adapters; `sync_each_batch`, whether each micro-batch is reduced;
            `gradient_as_bucket_view`; `reshard_after_forward`.

    Returns:
        A `Prediction` of the script that `rank_script` returns for the same.

    Raises:
        ValueError: what to change.
    """
    asked = cut_as_asked(ranks, parallel, tensor, **settings)
    if gpu == "cpu":
        raise ValueError("ranks are predicted for cards: name one, such as 8xA100-80GB")
    workload = _language_model(workload, length)
    few = few_layers(workload) if _follow_from_few(asked) else []
    with tempfile.TemporaryDirectory() as folder:
        script, *shallow = (
            _saved(one, asked, Path(folder, str(n)), say) for n, one in enumerate([workload, *few])
        )
        script.few = shallow
        try:
            found = predict(script, gpu=gpu, host=host)
        except ValueError as error:
            path, name = script.path, f"the script for {asked.title}"
            raise ValueError(str(error).replace(path, name)) from None
    notes = _of_ranks(workload, asked), workload.note, found.note
    return dataclasses.replace(
        found,
        name=f"{workload.title}, {asked.title}",
        workload=f"{workload.title}, rank 0 of {asked.title}",
        settings=dict(ranks=ranks, parallel=parallel, tensor=tensor) | settings,
        note=" ".join(filter(None, notes)),
    )


def _follow_from_few(asked: Cut) -> bool:
    """Whether few layers may tell many: what is shared of other optimizers is not known."""
    return asked.parallel != "zero1" or asked.settings["optim"] == TRAINERS["optim"]


def _weights(workload: Workload, asked: Cut) -> Weights:
    """What replicas send and train, and how."""
    sent, trained = tensors_of(workload, _dtype(asked), asked.settings["lora"])
    share = (0, asked.ranks) if asked.parallel == "zero1" else None
    found = Weights(sent, trained, asked.settings["gradient_as_bucket_view"], share)
    cap = asked.settings["ddp_bucket_cap_mb"]
    return found._replace(buckets=(cap * 2**20,) * 2) if cap else found


def _dtype(asked: Cut) -> torch.dtype:
    """Of the model's own weights."""
    return torch.bfloat16 if asked.settings["lora"] and asked.settings["bf16"] else torch.float32


def _saved(workload: Workload, asked: Cut, folder: Path, say: Callable | None) -> Script:
    """The script of a workload, beside the configuration that it reads."""
    folder.mkdir()
    workload.config.save_pretrained(folder)
    path = folder / "train.py"
    path.write_text(_rendered(workload, asked, str(folder), weights=False), "utf-8")
    script = Script(str(path), ranks=asked.ranks, say=say)
    script.layers = workload.config.get_text_config().num_hidden_layers
    if asked.parallel in WHOLE:
        script.rule = lambda tokens: _weights(workload, asked).passages(tokens)
    return script


def rank_script(
    workload: str | Workload,
    ranks: int,
    parallel: str,
    tensor: int = 1,
    *,
    length: int | None = None,
    **settings,
) -> str:
    """The script that `predict_rank` predicts, but that this one reads the model's weights.

    The arguments are those of `predict_rank`.
    """
    asked = cut_as_asked(ranks, parallel, tensor, **settings)
    workload = _language_model(workload, length)
    local = data_file("configs", f"{workload.name}.json")
    hub_id = json.loads(local.read_text("utf-8"))["_name_or_path"] if local.is_file() else None
    return _rendered(
        workload, asked, str(workload.weights or hub_id or workload.name), weights=True
    )


def _language_model(workload: str | Workload, length: int | None) -> Workload:
    task = "language_modelling"
    if isinstance(workload, str):
        task = task if workload in ("tiny", "large", "auto") else workloads.usual_task(workload)
        workload = workloads.workload(workload, task, length=length)
    if workload.task != "language_modelling" or workload.changes:
        raise ValueError(
            "several cards are predicted for a language model as it is: give a script of your own "
            "for another one, by --script"
        )
    return workload


def _rendered(workload: Workload, cut: Cut, model: str, weights: bool) -> str:
    """The whole script, from `examples/rank.jinja`."""
    path = example_file("rank.jinja")
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(path.read_text("utf-8"))
    return template.render(_values(workload, cut) | dict(model=json.dumps(model), weights=weights))


def _values(workload: Workload, cut: Cut) -> dict[str, object]:
    """What the template is told."""
    asked, model = cut.settings, skeleton(workload)
    plan = plan_of(model, cut.tensor) if cut.tensor > 1 else {}
    batch, accumulation = map(asked.get, COUNTS)
    optimizer, how = OPTIMIZERS[asked["optim"]]
    packages = ["transformers", "accelerate"] + ["peft"] * bool(asked["lora"])
    return dict(
        torch=versions()["torch"].partition("+")[0],
        packages=[f"{name}=={versions()[name]}" for name in packages],
        ranks=cut.ranks,
        parallel=cut.parallel,
        tensor=cut.tensor,
        inside=INSIDE.get(workload.config.model_type),
        cut=cut.parallel in CUT,
        layers=json.dumps(layers_of(model)),
        plan={name: STYLES[style] for name, style in plan.items() if style in STYLES},
        summed=json.dumps([name for name, style in plan.items() if style == SUMMED]),
        dtype=str(_dtype(cut)),
        lora=asked["lora"],
        bf16=asked["bf16"],
        checkpointing=asked["activation_checkpointing"],
        reshard=asked["reshard_after_forward"],
        bucket_view=asked["gradient_as_bucket_view"],
        bucket_mb=asked["ddp_bucket_cap_mb"],
        whole=not asked["sync_each_batch"],
        optimizer=optimizer,
        how=how,
        rate=asked["learning_rate"],
        clip=asked["max_grad_norm"],
        length=workload.length,
        batch=batch,
        accumulation=accumulation,
        samples=4 * batch * accumulation * cut.ranks // cut.tensor,
    )


# -------------------------------------------------------------------------------------- the model
def _of_ranks(workload: Workload, cut: Cut) -> str:
    """Whether other ranks hold something else, in words."""
    if cut.parallel == "zero1":
        return "Each rank keeps the states of other weights, whole ones: rank 0 is shown."
    rows = [p.shape[0] for p in skeleton(workload).parameters()] + [cut.settings["lora"]]
    if cut.parallel == "ddp" or all(n % (cut.shards * cut.tensor) == 0 for n in rows):
        return "All ranks hold as much."
    larger = "" if cut.tensor > 1 else ", and has the larger shards"
    return f"Some weights do not divide evenly: rank 0 is shown{larger}."
