"""What readers copy from lessons 05, 07 and 08 keeps its promise, under the real `Trainer`.

The code is the lesson's own: its cells are run here, with those that they need.
"""

import ast
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers.integrations.integration_utils import TensorBoardCallback
from transformers.utils import is_galore_torch_available

import notebook_rules as rules
from exercises import needed, python
from helpers import language_modelling

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
TINY = language_modelling("tiny")


def function_of(lesson: str, cell: str, name: str, space: dict):
    """One function of a cell whose other lines take long."""
    notebook = rules.read(next(FOLDER.glob(f"{lesson}_*.ipynb")))
    source = next(python(found) for found in rules.code(notebook) if found.id == cell)
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if getattr(node, "name", "") == name]
    exec(compile(tree, "<cell>", "exec"), space)
    return space[name]


def imported_in(lesson: str, cell: str, name: str):
    """What a cell imports by this name."""
    notebook = rules.read(next(FOLDER.glob(f"{lesson}_*.ipynb")))
    source = next(python(found) for found in rules.code(notebook) if found.id == cell)
    tree, space = ast.parse(source), {}
    tree.body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(tree, "<cell>", "exec"), space)
    return space[name]


def cells_of(lesson: str, *wanted: str) -> dict:
    """The names after the cells of a lesson that bind `wanted`, and after those they need."""
    path = next(FOLDER.glob(f"{lesson}_*.ipynb"))
    sources = ["", *(python(cell) for cell in rules.code(rules.read(path))[1:])]
    space = {"__name__": "__main__"}
    with redirect_stdout(StringIO()):
        for place in needed(sources, "\n".join(wanted)):
            exec(compile(sources[place], "<cell>", "exec"), space)
    return space


def trained(model, data, folder, collator=None, optimizer=None, callbacks=(), resume=None, **more):
    """The Trainer after training, as a reader would write it."""
    settings = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "max_steps": 1}
    settings |= {"disable_tqdm": True, "logging_steps": 1, "train_sampling_strategy": "sequential"}
    args = TrainingArguments(str(folder), **settings | more)
    options = {"optimizer_cls_and_kwargs": optimizer} if optimizer else {}
    trainer = Trainer(
        model,
        args,
        train_dataset=data,
        data_collator=collator,
        callbacks=list(callbacks),
        **options,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def moved(trainer, before) -> torch.Tensor:
    """What one step of plain SGD at a rate of 1 has taken from the weights: the gradient."""
    return torch.cat(
        [(b - p.detach()).flatten() for b, p in zip(before, weights(trainer.model), strict=True)]
    )


def weights(model) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


STEP = {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0}


# Lesson 05: selective checkpointing, and TensorBoard.


def bert():
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(**shape, intermediate_size=64, vocab_size=50, hidden_dropout_prob=0.0)
    config.attention_probs_dropout_prob = 0.0
    return BertForSequenceClassification(config)


def tensorboard():
    """The callback as Trainer makes it, but what it writes goes nowhere."""
    callback = TensorBoardCallback.__new__(TensorBoardCallback)
    callback.tb_writer = callback._SummaryWriter = MagicMock()
    callback.logging_dir = "unused"
    return callback


def test_selective_checkpointing_under_tensorboard(tmp_path):
    lesson = cells_of("05", "create_selective_checkpoint_contexts")
    keep_linear = function_of("05", "flops", "keep_linear", lesson)
    settings = {"use_reentrant": False, "context_fn": keep_linear}
    data = [{"input_ids": [1, 2, 3, 4 + i], "labels": i % 2} for i in range(8)]
    flag = {"activation_checkpointing": True, "activation_checkpointing_kwargs": settings}
    with pytest.raises(TypeError, match="JSON"):  # what the lesson warns of
        trained(bert(), data, tmp_path, callbacks=[tensorboard()], **flag)
    gradients = {}
    for way, options in {"plain": {}, "flag": flag, "called": {}}.items():
        model = bert()
        before = weights(model)
        if way == "called":
            model.activation_checkpointing_enable(settings)
        watchers = [] if way == "flag" else [tensorboard()]
        trainer = trained(model, data, tmp_path, callbacks=watchers, **STEP, **options)
        gradients[way] = moved(trainer, before)
        assert model.is_activation_checkpointing == (way != "plain")
    for way in ("flag", "called"):
        assert torch.allclose(gradients[way], gradients["plain"], atol=1e-6)


# Lesson 07: Muon by a factory, and what the layer-wise flags leave out.


def muon_run(folder, resume=None, **more):
    lesson = cells_of("07", "MuonAdamW")
    saving = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3} | more
    factory = (lambda: lesson["MuonAdamW"], {"lr": 3e-3, "weight_decay": 0.1})
    torch.manual_seed(0)
    data = TINY.data("train").select(range(48))
    model = TINY.model(pretrained=False)
    saving |= {"per_device_train_batch_size": 2, "learning_rate": 3e-3}
    return trained(model, data, folder, TINY.collate, factory, resume=resume, **saving)


def test_muon_is_one_optimizer_for_trainer(tmp_path):
    whole = muon_run(tmp_path, gradient_accumulation_steps=2)
    resumed = muon_run(tmp_path, f"{tmp_path}/checkpoint-3", gradient_accumulation_steps=2)
    assert all(map(torch.equal, weights(whole.model), weights(resumed.model)))
    saved = torch.load(tmp_path / "checkpoint-3" / "optimizer.pt", weights_only=True)
    assert len(saved["state"]) == len(list(whole.model.parameters()))  # nothing was left out
    muon, adamw = whole.optimizer.optimizer.parts
    inside = {id(p) for n, p in whole.model.named_parameters() if p.ndim == 2 and ".layers." in n}
    assert {id(p) for p in muon.param_groups[0]["params"]} == inside
    assert type(muon).__name__ == "Muon" and type(adamw).__name__ == "AdamW"
    assert muon.param_groups[0]["lr"] == adamw.param_groups[0]["lr"] == 0.0  # the schedule's end
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    again = [entry["loss"] for entry in resumed.state.log_history if "loss" in entry]
    assert again == losses


def test_the_recorded_muon_is_the_lessons():
    from evidence.lessons import lesson_07

    lesson, updates = cells_of("07", "MuonAdamW")["MuonAdamW"], []
    for kind in (lesson, lesson_07.MuonAdamW):
        torch.manual_seed(0)
        model = TINY.model(pretrained=False)
        optimizer = kind(model, lr=1e-3)
        for i, p in enumerate(model.parameters()):
            p.grad = torch.linspace(-1, i, p.numel()).reshape(p.shape)
        optimizer.step()
        updates.append(weights(model))
    assert all(map(torch.equal, *updates))


@pytest.mark.filterwarnings("ignore")
def test_8_bit_states_and_chance_go_on_from_a_checkpoint(tmp_path):
    """The line that the lesson adds, on a model in bf16; not compiled, for time."""
    pytest.importorskip("torchao")
    notebook = rules.read(next(FOLDER.glob("07_*.ipynb")))
    text = next(cell.source for cell in notebook.cells if cell.id == "by-chance-read")
    added = re.search(r"^\+ (optim=.*?),? +#", text, re.MULTILINE)[1]
    options = eval(f"dict({added})") | {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    options |= {"per_device_train_batch_size": 2, "learning_rate": 1e-3}
    data = TINY.data("train").select(range(16))

    def ends(resume=None):
        torch.manual_seed(0)
        model = TINY.model(pretrained=False).bfloat16()
        with torch.compiler.set_stance("force_eager"):
            done = trained(model, data, tmp_path, TINY.collate, resume=resume, **options)
        return weights(done.model)

    whole, half_way = ends(), tmp_path / "checkpoint-3"
    assert all(map(torch.equal, whole, ends(half_way)))
    saved = torch.load(half_way / "optimizer.pt", weights_only=True)
    kinds = {type(state["exp_avg"]).__name__ for state in saved["state"].values()}
    assert "OptimState8bit" in kinds
    for state in saved["state"].values():  # the states are what it goes on with
        getattr(state["exp_avg"], "codes", state["exp_avg"]).zero_()
    torch.save(saved, half_way / "optimizer.pt")
    assert not all(map(torch.equal, whole, ends(half_way)))


@pytest.mark.skipif(not is_galore_torch_available(), reason="galore-torch is not installed")
@pytest.mark.filterwarnings("ignore")
def test_what_layerwise_flags_leave_out(tmp_path):
    options = {"optim_target_modules": "all-linear", "optim_args": "rank=8", "max_steps": 4}
    options |= {"save_strategy": "steps", "save_steps": 4, "per_device_train_batch_size": 2}
    options |= {"learning_rate": 1e-3, "optim": "galore_adamw_layerwise"}
    data = TINY.data("train").select(range(16))
    trainer = trained(TINY.model(pretrained=False), data, tmp_path, TINY.collate, **options)
    inner = trainer.optimizer.optimizer.optimizer_dict.values()
    assert {group["lr"] for one in inner for group in one.param_groups} == {1e-3}  # no schedule
    saved = torch.load(tmp_path / "checkpoint-4" / "optimizer.pt", weights_only=True)
    assert not saved["state"] and any(one.state for one in inner)  # states, but none is saved
    norms = [e["grad_norm"] for e in trainer.state.log_history if "grad_norm" in e]
    assert trainer.args.max_grad_norm == 1.0 and set(norms) == {0.0}  # nothing to clip


# Lesson 08: rows of texts under Trainer.


def llama():
    torch.manual_seed(1)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**shape, intermediate_size=64, vocab_size=2000))


def padded(texts):
    longest = max(len(text["input_ids"]) for text in texts)
    fill = {"input_ids": 0, "labels": -100}
    batch = {
        name: torch.tensor([t[name] + [value] * (longest - len(t[name])) for t in texts])
        for name, value in fill.items()
    }
    lengths = torch.tensor([len(text["input_ids"]) for text in texts])
    return batch | {"attention_mask": (torch.arange(longest) < lengths[:, None]).long()}


@pytest.mark.parametrize("batch, accumulation", [(4, 1), (1, 4), (2, 2)])
def test_packed_rows_give_the_plain_gradient(tmp_path, batch, accumulation):
    """Prompts masked by -100, and micro-batches with unequal numbers of labels."""
    lesson = cells_of("08", "packed", "flatten")
    random, texts = torch.Generator().manual_seed(3), []
    for n in (40, 24, 90, 60, 15, 33, 70, 8, 12, 51):
        ids = torch.randint(5, 2000, (n,), generator=random).tolist()
        texts.append({"input_ids": ids, "labels": [-100] * (n // 2) + ids[n // 2 :]})
    rows = lesson["packed"]([len(text["input_ids"]) for text in texts], room=120)
    assert sorted(i for row in rows for i in row) == list(range(len(texts))) and len(rows) == 4
    data = [[texts[i] for i in row] for row in rows]
    model = llama()
    before = weights(model)
    plain = trained(model, texts, tmp_path, padded, per_device_train_batch_size=10, **STEP)
    wanted = moved(plain, before)
    sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    packed = trained(llama(), data, tmp_path, lesson["flatten"], **sizes, **STEP)
    assert (moved(packed, before) - wanted).norm() < 1e-4 * wanted.norm()
    assert packed.state.log_history[0]["loss"] == pytest.approx(
        plain.state.log_history[0]["loss"], rel=1e-4
    )


def test_best_fit_keeps_every_row_within_its_room():
    packed = cells_of("08", "packed")["packed"]
    lengths = [8 + (37 * i * i) % 505 for i in range(5000)]
    rows = packed(lengths)
    assert sorted(i for row in rows for i in row) == list(range(5000))
    assert max(sum(lengths[i] for i in row) for row in rows) <= 512
    assert len(rows) < 1.03 * sum(lengths) / 512


# Lesson 11: the loss in pieces.


def unlike():
    """Samples with many labels, few, and none: two and two, or each alone in a micro-batch."""
    random, found = torch.Generator().manual_seed(5), []
    for length, counted in ((40, 0), (33, 0), (60, 50), (24, 3)):
        ids = torch.randint(5, 2000, (length,), generator=random).tolist()
        found.append({"input_ids": ids, "labels": [-100] * (length - counted) + ids[:counted]})
    return found


def whole(batch, accumulation):
    return {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}


@pytest.mark.parametrize("batch, accumulation", [(4, 1), (2, 2), (1, 4)])
def test_the_loss_in_pieces_gives_the_plain_gradient(tmp_path, batch, accumulation):
    """Under accumulation one micro-batch has no labels at all."""
    in_pieces = imported_in("11", "pieces-model", "in_pieces")
    model = llama()
    before = weights(model)
    wanted = moved(trained(model, unlike(), tmp_path, padded, **STEP | whole(4, 1)), before)
    sizes = whole(batch, accumulation)
    pieces = trained(in_pieces(llama(), size=16), unlike(), tmp_path, padded, **STEP | sizes)
    assert wanted.norm() > 0 and (moved(pieces, before) - wanted).norm() < 1e-4 * wanted.norm()
