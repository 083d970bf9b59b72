"""What readers copy from lessons 12, 14 and 15 keeps its promise.

The code is the lesson's own: its cells, and the fenced code of its texts. TRL and DeepSpeed are
optional: where they are missing, the tests that run them skip, and the others stay.
"""

import json
import re
from contextlib import redirect_stdout
from dataclasses import replace
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

import datasets
import pytest
import torch
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import notebook_rules as rules
from exercises import needed, python
from helpers import language_modelling, train

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
TINY = language_modelling("tiny")
CHATS = [
    [{"role": "user", "content": "one"}, {"role": "assistant", "content": "a number"}],
    [{"role": "user", "content": "left or right"}, {"role": "assistant", "content": "a side"}],
]
PLAIN = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""  # as most models have it: without {% generation %}


def lesson(number: str):
    return rules.read(next(FOLDER.glob(f"{number}_*.ipynb")))


def names_of(number: str, *wanted: str) -> dict:
    """The names after the cells of a lesson that bind `wanted`, and after those they need."""
    sources = ["", *(python(cell) for cell in rules.code(lesson(number))[1:])]
    space = {"__name__": "__main__"}
    with redirect_stdout(StringIO()):
        for place in needed(sources, "\n".join(wanted)):
            exec(compile(sources[place], "<cell>", "exec"), space)
    return space


def fenced(number: str, language: str, word: str) -> str:
    """The one block of this language in a lesson's texts that holds `word`."""
    texts = "\n".join(cell.source for cell in rules.markdown(lesson(number)))
    found = re.findall(rf"```{language}\n(.*?)```", texts, re.DOTALL)
    (block,) = [block for block in found if word in block]
    return block


def tokenizer_with(template: str) -> PreTrainedTokenizerFast:
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: place for place, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(special)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    wrapped.chat_template = template
    return wrapped


def saved_model(folder: Path, template: str) -> Path:
    """A tiny Qwen3 with a tokenizer of bytes, as a stand-in for the model that the lesson names."""
    tokenizer = tokenizer_with(template)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_without_the_marks_no_label_counts():
    """The sentence of lesson 12 about most models' templates."""
    tokenizer = tokenizer_with(PLAIN)
    row = tokenizer.apply_chat_template(
        CHATS[0], return_dict=True, return_assistant_tokens_mask=True
    )
    assert not any(row["assistant_masks"])
    labels = torch.full((1, 8), -100)
    assert TINY.model()(input_ids=torch.ones(1, 8, dtype=torch.long), labels=labels).loss.isnan()


@pytest.mark.skipif(not find_spec("trl"), reason="TRL is optional, and not installed")
@pytest.mark.parametrize("known", [True, False], ids=["qwen3", "unknown template"])
def test_lesson_12_the_class_of_trl_trains_adapters_on_answers(known, tmp_path, monkeypatch):
    import trl

    template = PLAIN
    if known:
        folder = Path(trl.__file__).parent / "chat_templates"
        template = (folder / "qwen3.jinja").read_text("utf-8")
    snippet = fenced("12", "python", "SFTTrainer")
    assert '"Qwen/Qwen3-0.6B"' in snippet  # a family whose template TRL knows
    snippet = snippet.replace('"Qwen/Qwen3-0.6B"', repr(str(saved_model(tmp_path, template))))
    snippet = snippet.replace("SFTConfig(", "SFTConfig(max_steps=1, use_cpu=True, bf16=False, ")
    monkeypatch.chdir(tmp_path)
    space = {"SFTTrainer": trl.SFTTrainer, "SFTConfig": trl.SFTConfig, "LoraConfig": LoraConfig}
    space["data"] = datasets.Dataset.from_dict({"messages": CHATS})
    if not known:
        with pytest.raises(ValueError, match="not training-compatible"):
            eval(snippet, space)
        return
    trainer = eval(snippet, space)
    batch = next(iter(trainer.get_train_dataloader()))
    counted = [row[row != -100] for row in batch["labels"]]
    texts = trainer.processing_class.batch_decode([tokens.tolist() for tokens in counted])
    assert all("a number" in text or "a side" in text for text in texts)
    assert not any("left or right" in text or "user" in text for text in texts)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    assert torch.isfinite(torch.tensor(trainer.train().training_loss))
    moved = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved and all("lora_" in name for name in moved)


def test_lesson_14_the_buffers_of_the_disk_hold_the_largest_weight():
    """DeepSpeed stops with "More elements than buffer size" otherwise.

    The whole weight, since one card holds the only part: swap_tensor/partitioned_param_swapper.py.
    """
    file = json.loads(fenced("14", "json", "nvme_path"))["zero_optimization"]
    with torch.device("meta"):
        llama = language_modelling("llama-2-7b").model(pretrained=False)
    assert file["offload_param"]["buffer_size"] >= max(p.numel() for p in llama.parameters())
    assert file["offload_optimizer"]["buffer_count"] >= 4


@pytest.mark.skipif(not find_spec("deepspeed"), reason="DeepSpeed is optional, and not installed")
def test_lesson_14_deepspeed_takes_its_files_and_learns_the_same(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    space = names_of("14", "ZERO2, ZERO3, run_deepspeed")
    disk = json.loads(fenced("14", "json", "nvme_path"))["zero_optimization"]
    whole = space["ZERO3"]["zero_optimization"] | disk
    given = {name: value for name, value in whole.items() if value != "auto"}
    assert DeepSpeedZeroConfig(**given).offload_param.device == "nvme"
    plain = train(TINY, max_steps=8, per_device_train_batch_size=4, use_cpu=True).losses[4:]
    for file in (space["ZERO2"], space["ZERO3"]):
        losses = json.loads(space["run_deepspeed"](file))
        assert losses == pytest.approx(plain, abs=2e-4)


def test_lesson_15_groups_equal_trainer_with_prompts_and_pads():
    """Labels of -100 in front and behind, padding, and a last group that is not full."""

    def sample(row, prompt, length):
        at = torch.arange(len(row["labels"]))
        labels = row["labels"].where((prompt <= at) & (at < length), -100)
        return row | {"labels": labels, "attention_mask": (at < length).long()}

    parts = [(0, 128), (60, 64), (100, 128), (5, 30), (90, 100), (3, 9), (0, 128), (40, 44)]
    parts += [(7, 70), (120, 128), (64, 66)]
    rows = [sample(row, *p) for row, p in zip(TINY.data("train"), parts, strict=False)]
    workload = replace(TINY, data=lambda split: rows)
    wanted = train(
        workload,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        num_train_epochs=1,
        use_cpu=True,
    ).losses
    found = [*names_of("15", "by_groups")["by_groups"](workload, 4, steps=len(wanted))]
    assert len(wanted) == 3
    assert found == pytest.approx(wanted, abs=1e-5)
