"""Recipes with Liger's kernels, trained in Triton's interpreter: `test_planner_liger` runs this.

TRITON_INTERPRET=1 python -m pytest -n0 tests/interpreted_recipes.py
"""

import interpreted  # noqa: F401, I001  before anything imports Liger
import dataclasses
import inspect

import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama

from planned import SHAPE, padded, question, samples, saved_decoder
from planner.question import Question
from planner.techniques import KINDS
from test_planner_script import answers, by_hand, check_method, distance
from test_planner_script import decoder, pasted  # noqa: F401  fixtures

FULL = "full, Liger kernels"
HOST = "LoRA, checkpoints on the host, Liger kernels"
CHANGED = "apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP"  # of all models, not of one alone
NAMES = (
    FULL,
    HOST,
    "full in bf16, Adafactor in backward, checkpointing, Liger kernels",
    "QLoRA, checkpointing, Liger kernels",
)
PLAIN = {name: getattr(modeling_llama, name) for name in CHANGED}


@dataclasses.dataclass(frozen=True)
class InFloat32(Question):
    """A question whose recipes do not autocast, so that nothing is rounded to 16 bits."""

    def settings(self, plan, micro_batch):
        found = super().settings(plan, micro_batch)
        return {name: value for name, value in found.items() if name != "bf16"}


@pytest.fixture(autouse=True)
def plain_before_and_after(monkeypatch):
    """Liger changes parts of all models of a kind; the interpreter takes a time per token."""
    monkeypatch.setattr("planned.PROMPT", 7)
    monkeypatch.setattr("planned.LABELS", (8, 4, 2, 1))
    assert all(getattr(modeling_llama, name) is part for name, part in PLAIN.items())
    yield
    make_plain()


def make_plain():
    for name, part in PLAIN.items():
        setattr(modeling_llama, name, part)


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory):
    """Enough for what is said of the loss."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPE, "num_hidden_layers", 1)
        return saved_decoder(tmp_path_factory.mktemp("one_layer"))


def in_float32(model) -> Question:
    return InFloat32(**vars(question(model, batch=4)))


def wanted(asked, kind="full") -> dict:
    """The plain model's gradient."""
    return by_hand(asked, kind, padded(samples(asked)))


@pytest.mark.parametrize("name", NAMES)
def test_gradient_and_method_are_those_of_the_recipe(name, decoder, pasted):  # noqa: F811
    """Texts of unlike lengths, padded, with masked labels, in two micro-batches."""
    kind = next(kind.name for kind in reversed(KINDS) if name.startswith(f"{kind.name}, "))
    asked = question(decoder, batch=4)
    plain = wanted(asked, kind)
    ran = pasted(asked, name, 4 if "backward" in kind else 2)
    model = ran.names["trainer"].model
    assert distance(ran.gradients, plain) < 0.06  # both are rounded to 16 bits, at other places
    check_method(model, ran.names["trainer"], name)
    base = model.get_base_model() if "LoRA" in kind else model
    for module in (base, base.model.layers[0].mlp, base.model.norm):
        forward = inspect.unwrap(module.forward)  # Trainer's autocast is around it
        assert forward.__module__.startswith("liger_kernel.")


def test_in_float32_the_gradient_is_the_same(one_layer, pasted):  # noqa: F811
    asked = in_float32(one_layer)
    plain, ran = wanted(asked), pasted(asked, FULL, 2)
    assert distance(ran.gradients, plain) < 1e-4
    model = ran.names["trainer"].model
    again = transformers.AutoModelForCausalLM.from_pretrained("trained")
    assert all(torch.equal(again.state_dict()[n], p) for n, p in model.state_dict().items())
    in_16_bits = dict(rtol=0.05, atol=0.05)
    torch.testing.assert_close(answers(again, ran.batch), answers(model, ran.batch), **in_16_bits)


def test_a_mean_over_each_micro_batch_would_be_seen(one_layer, pasted):  # noqa: F811
    """As in versions that do not tell Liger how many labels a step has."""
    asked, line = in_float32(one_layer), "model.config.use_cache = False\n"

    def edit(text):
        return text.replace(line, f"{line}model.accepts_loss_kwargs = False\n")

    plain = wanted(asked)
    assert distance(pasted(asked, FULL, 2, edit).gradients, plain) > 0.05


def test_label_smoothing_is_kept(one_layer, pasted):  # noqa: F811
    """Trainer computes it from logits, which then are all made: so says the script."""
    asked, smooth = in_float32(one_layer), "    label_smoothing_factor=0.1,\n)\ntrainer"
    with_liger = pasted(asked, FULL, 2, lambda text: text.replace(")\ntrainer", smooth, 1))
    make_plain()
    plain = pasted(asked, "full", 2, lambda text: text.replace(")\ntrainer", smooth, 1))
    assert distance(with_liger.gradients, plain.gradients) < 1e-4
    assert distance(with_liger.gradients, wanted(asked)) > 0.01
