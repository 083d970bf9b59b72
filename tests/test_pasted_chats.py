"""What readers copy from lesson 23 keeps its promise: labels, borders, adapter, preferences.

The code is the lesson's own. A small Qwen3 in a folder stands for the model from the hub, and TRL
is optional: where it is missing, the tests that run it skip.
"""

import re
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

import datasets
import pytest
import torch
from peft import LoraConfig, PeftModel

import notebook_rules as rules
from evidence.lessons import lesson_23
from exercises import python
from test_pasted_tuning import saved_model

LESSON = next((Path(__file__).resolve().parents[1] / "notebooks").glob("23_*.ipynb"))
# Cells that define, and up to which words of theirs: what comes behind them trains or shows.
CELLS = {"imports": "", "imports-2": "", "knobs": "", "raw": "", "messages": "", "tokenizer": ""}
CELLS |= {"template": "", "encode": "wrong = ", "trainer": "", "trap": "unmoved = ", "marked": ""}
CELLS |= {"labels-fact": "two = ", "fits": "PARTS = ", "recipe-settings": "", "longest-first": ""}
CELLS |= {
    "packing-fact": "model, some = ",
    "train": "with measure",
    "dpo": "",
    "dpo-fact": "pairs =",
}
CHAT = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
# As Qwen3's, it thinks: the lesson then begins each answer with an empty thought.
THINKS = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>

</think>

{% endif %}"""


@dataclass
class Lesson:
    """The names of the lesson after its definitions; nothing was trained."""

    names: dict

    def __getattr__(self, name):
        return self.names[name]


def lesson(folder: Path, real: Path | None = None) -> Lesson:
    """Runs the cells that define; what the lesson writes goes to `folder`."""
    cells = {cell.id: python(cell) for cell in rules.code(rules.read(LESSON))}
    names = {"__name__": "__main__"}
    knobs = re.sub(r"(?m)^REAL = .*", f"REAL = {real and str(real)!r}", cells["knobs"])
    cells["knobs"] = knobs.replace('Path("../build")', f"Path({str(folder)!r})")
    cells["dpo-fact"] = "def pair" + cells["dpo-fact"].partition("def pair")[2]
    with redirect_stdout(StringIO()):
        for cell, end in CELLS.items():
            source = cells[cell].partition(end)[0] if end else cells[cell]
            assert not end or source != cells[cell], f"{cell} has no {end!r}"
            exec(compile(source, cell, "exec"), names)
    return Lesson(names)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Lesson:
    return lesson(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Lesson:
    folder = tmp_path_factory.mktemp("real")
    return lesson(folder, saved_model(folder / "model", THINKS))


@pytest.fixture(params=["tiny", "real"])
def either(request) -> Lesson:
    return request.getfixturevalue(request.param)


def test_labels_are_the_answers_and_their_ends(either):
    two = [*CHAT, {"role": "user", "content": "And?"}, {"role": "assistant", "content": "So."}]
    row = either.encode(two, either.MARKED)
    counted = either.tokenizer.decode([token for token in row["labels"] if token != -100])
    assert counted == "Because.<|im_end|>So.<|im_end|>"
    pairs = zip(row["input_ids"], row["labels"], strict=True)
    assert all(label in (token, -100) for token, label in pairs)
    assert either.text(two) == either.text(two, either.SHIPPED)
    prompt = either.text(two[:-1], add_generation_prompt=True)
    assert either.text(two).startswith(prompt)
    assert prompt.endswith("assistant\n" + either.THOUGHT)
    assert bool(either.THOUGHT) == (either.REAL is not None)


def test_without_marks_the_log_is_zero_and_nothing_is_learned(tiny):
    """What the lesson says of the first three steps."""
    wrong = [tiny.encode(chat, tiny.SHIPPED) for chat in tiny.train[:8]]
    model = tiny.BASE.model()
    before = [p.detach().clone() for p in model.parameters()]
    assert tiny.losses(tiny.new_trainer(model, wrong, max_steps=2)) == [0.0, 0.0]
    assert model(**tiny.DataCollatorForSeq2Seq(tiny.tokenizer)(wrong)).loss.isnan()
    assert all(map(torch.equal, before, model.parameters()))
    seen = tiny.new_trainer(model, wrong, max_steps=1, logging_nan_inf_filter=False)
    assert all(loss != loss for loss in tiny.losses(seen))


def moved(tiny, collator, micro, times) -> torch.Tensor:
    """What one step of plain SGD under the real Trainer subtracts: the gradient."""
    step = {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant"}
    step |= {"max_steps": 1, "max_grad_norm": 0, "train_sampling_strategy": "sequential"}
    step |= {"per_device_train_batch_size": micro, "gradient_accumulation_steps": times}
    model = tiny.BASE.model()
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    tiny.losses(tiny.new_trainer(model, tiny.data[:8], collator, **step))
    return before - torch.cat([p.detach().flatten() for p in model.parameters()])


def apart_from_padded(tiny, collator, micro, times) -> float:
    wanted = moved(tiny, tiny.DataCollatorForSeq2Seq(tiny.tokenizer), 8, 1)
    assert wanted.norm() > 0
    return float((moved(tiny, collator, micro, times) - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("micro, times", [(8, 1), (2, 4)])
def test_flattened_chats_give_the_gradient_of_padded_ones(tiny, micro, times):
    """Under the real Trainer, and with unequal numbers of labels in the micro-batches."""
    assert apart_from_padded(tiny, tiny.DataCollatorWithFlattening(), micro, times) < 1e-3


def test_a_broken_border_is_seen(tiny):
    """The planted defect: positions that run on, so that a chat reads those before it."""
    flat = tiny.DataCollatorWithFlattening()

    def running_on(rows):
        batch = flat(rows)
        batch["position_ids"] = torch.arange(batch["input_ids"].numel())[None]
        return batch

    def one_border_gone(rows):
        batch = flat(rows)
        positions = torch.as_tensor(batch["position_ids"]).clone()
        second = (positions[0] == 0).nonzero()[1].item()  # the first token of the second chat
        third = (positions[0] == 0).nonzero()[2].item()
        positions[0, second:third] += second
        return batch | {"position_ids": positions}

    assert apart_from_padded(tiny, running_on, 8, 1) > 1e-2
    assert apart_from_padded(tiny, one_border_gone, 8, 1) > 1e-2


def test_the_recipe_trains_an_adapter_that_comes_back_and_answers(either):
    rows, settings = either.data[:16], either.RECIPE | either.OURS | {"max_steps": 2}
    trainer = either.new_trainer(either.student(), rows, **settings)
    assert either.RECIPE["learning_rate"] == 5e-4 and either.STEP == 16
    losses = either.losses(trainer)
    assert len(losses) == 2 and 0 < losses[1] < losses[0] + 1
    trainer.save_model()
    again = PeftModel.from_pretrained(either.BASE.model(), either.BUILD / "chat").eval()
    ids = torch.tensor([rows[0]["input_ids"]])
    with torch.no_grad():
        assert torch.allclose(trainer.model.eval()(ids).logits, again(ids).logits, atol=1e-5)
        assert not torch.equal(again(ids).logits, either.BASE.model().eval()(ids).logits)
    assert isinstance(either.answer(again, "Why?"), str)


def test_a_long_chat_leads_each_early_micro_batch_and_none_is_lost(tiny):
    found = tiny.long_ones_first(tiny.data, 8, 4)
    sizes = [len(row["input_ids"]) for row in tiny.data]
    assert sorted(map(str, found)) == sorted(map(str, tiny.data))
    assert [len(row["input_ids"]) for row in found[:32:4]] == sorted(sorted(sizes)[-8:])


def test_two_steps_need_what_the_whole_run_needs(tiny):
    """The second step has states, gradients and the longest chat, so its peak is the run's."""

    def run(rows, steps, pretrained=False):
        settings = tiny.RECIPE | tiny.OURS | {"max_steps": steps, "use_cpu": True}
        model = tiny.adapted(tiny.BASE.model(pretrained=pretrained))
        tiny.losses(tiny.new_trainer(model, rows, **settings))

    rows = tiny.long_ones_first(tiny.data, 2 * tiny.STEP // tiny.MICRO, tiny.MICRO)
    with tiny.measure() as usage:
        run(rows, 8, pretrained=True)
    measured = usage.peak_allocated - usage.start
    planned = tiny.predict(lambda: run(rows, 2)).peak_allocated
    assert planned == pytest.approx(measured, rel=0.005)
    shortest = sorted(tiny.data, key=lambda row: len(row["input_ids"]))[: tiny.STEP]
    first_alone = [*rows[: tiny.STEP], *shortest]  # long chats where there are no states yet
    assert tiny.predict(lambda: run(first_alone, 2)).peak_allocated < 0.99 * planned


def test_log_p_is_the_sum_over_answers_whatever_the_padding(tiny):
    model, chats = tiny.BASE.model().eval(), tiny.train[:3]
    pad = tiny.DataCollatorForSeq2Seq(tiny.tokenizer)
    rows = [tiny.encode(chat, tiny.MARKED) for chat in chats]
    with torch.no_grad():
        found = tiny.log_p(model, pad(rows))
        for row, log_p in zip(rows, found, strict=True):
            each = model(torch.tensor([row["input_ids"]])).logits[0].log_softmax(-1)
            places = [at for at, label in enumerate(row["labels"]) if label != -100]
            wanted = sum(each[at - 1, row["labels"][at]] for at in places)
            assert torch.isclose(log_p, wanted, atol=1e-3)


def test_preferences_begin_at_the_logarithm_of_two_and_are_learned(tiny):
    torch.manual_seed(0)
    policy = tiny.adapted(tiny.BASE.model())
    batches = [tiny.pair(tiny.train[i : i + 4]) for i in range(0, 32, 4)]
    losses = torch.stack(list(tiny.preferring(policy, batches)))
    assert losses[0].item() == pytest.approx(0.693147, abs=1e-4) and losses[-1] < losses[0]
    better, other = tiny.gains(policy, tiny.pair(tiny.test[:8]))
    assert (better > other).all()

    def reference(batch):
        with policy.disable_adapter():
            return lesson_23.log_p(policy, batch)

    recorded = lesson_23.by_preference(policy, reference, batches[0])  # what was predicted
    better, other = tiny.gains(policy, batches[0])
    assert torch.isclose(recorded, -torch.nn.functional.logsigmoid(0.1 * (better - other)).mean())


def fenced(word: str) -> str:
    texts = "\n".join(cell.source for cell in rules.markdown(rules.read(LESSON)))
    (found,) = [b for b in re.findall(r"```python\n(.*?)```", texts, re.DOTALL) if word in b]
    return found


@pytest.mark.skipif(not find_spec("trl"), reason="TRL is optional, and not installed")
def test_the_class_of_trl_begins_at_the_logarithm_of_two(real, tmp_path, monkeypatch):
    import trl

    snippet = fenced("DPOTrainer").replace('"Qwen/Qwen3-0.6B"', repr(str(real.REAL)))
    few = 'DPOConfig(max_steps=1, logging_steps=1, use_cpu=True, bf16=False, report_to="none", '
    monkeypatch.chdir(tmp_path)
    no = [{"role": "assistant", "content": "NO."}]
    rows = {"prompt": [CHAT[:1]] * 4, "chosen": [CHAT[1:]] * 4, "rejected": [no] * 4}
    space = {"DPOTrainer": trl.DPOTrainer, "DPOConfig": trl.DPOConfig, "LoraConfig": LoraConfig}
    space["pairs"] = datasets.Dataset.from_dict(rows)
    trainer = eval(snippet.replace("DPOConfig(", few), space)
    trainer.train()
    (loss,) = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert loss == pytest.approx(0.693147, abs=1e-3)
    learning = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    assert learning and all("lora_" in name for name in learning)


@pytest.mark.skipif(not find_spec("trl"), reason="TRL is optional, and not installed")
def test_trl_takes_the_same_steps(tiny):
    cells = {cell.id: python(cell) for cell in rules.code(rules.read(LESSON))}
    tiny.names["taught"] = tiny.data[:96]
    settings = tiny.RECIPE | tiny.OURS | {"max_steps": 6}
    tiny.names["curve"] = tiny.losses(tiny.new_trainer(tiny.student(), tiny.data[:96], **settings))
    printed = StringIO()
    with redirect_stdout(printed):
        exec(compile(cells["trl"], "trl", "exec"), tiny.names)
    assert float(re.search(r"([\d.]+)% apart", printed.getvalue())[1]) < 0.1
