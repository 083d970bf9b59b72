"""Text models that are published inside a model that sees and hears: what is pasted takes them out.

Gemma 4's is asked for by name; Qwen3.5's is what AutoModelForCausalLM gives.
"""

import sys
from pathlib import Path

import pytest
import torch
import transformers

import test_planner_ranks as ranked
from planned import question
from planner.predictions import Predictions
from planner.ranks import rank_script
from planner.script import script
from planner.techniques import Plan
from test_planner_ranks import launched  # noqa: F401
from test_planner_script import (  # noqa: F401
    KIND_NAMES,
    by_hand,
    check_method,
    check_saved,
    distance,
    pasted,
    prepared,
)

TYPES = ["sliding_attention", "full_attention"] * 3
SHAPE = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4)
SHAPE |= dict(num_key_value_heads=1, head_dim=32, global_head_dim=64, layer_types=TYPES)
SHAPE |= dict(num_kv_shared_layers=2, use_double_wide_mlp=True, final_logit_softcapping=30.0)
SHAPE |= dict(vocab_size=257, vocab_size_per_layer_input=257, hidden_size_per_layer_input=64)
SHAPE |= dict(sliding_window=16, max_position_embeddings=64, initializer_range=0.2)
TOWER = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
TOWER |= dict(num_key_value_heads=2, head_dim=8, position_embedding_size=16)

LINEAR = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4)
LINEAR |= dict(
    num_key_value_heads=2, head_dim=16, linear_num_key_heads=8, linear_num_value_heads=32
)
LINEAR |= dict(linear_key_head_dim=16, linear_value_head_dim=16, vocab_size=257)
LINEAR |= dict(max_position_embeddings=64, initializer_range=0.2, tie_word_embeddings=True)
SEES = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=64)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The folders of the whole model and of its text model's configuration."""
    whole, text = (tmp_path_factory.mktemp(name) for name in ("whole", "text"))
    config = transformers.Gemma4TextConfig(**SHAPE, architectures=["Gemma4ForCausalLM"])
    config.save_pretrained(text)
    both = transformers.Gemma4Config(
        text_config=config.to_dict(), vision_config=TOWER, audio_config=None
    )
    transformers.set_seed(0)
    transformers.Gemma4ForConditionalGeneration(both).save_pretrained(whole)
    return str(whole), str(text)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """The same of Qwen3.5."""
    whole, text = (tmp_path_factory.mktemp(name) for name in ("whole", "text"))
    config = transformers.Qwen3_5TextConfig(**LINEAR, architectures=["Qwen3_5ForCausalLM"])
    config.save_pretrained(text)
    options = dict(vision_config=SEES, tie_word_embeddings=True)
    both = transformers.Qwen3_5Config(text_config=config.to_dict(), **options)
    transformers.set_seed(0)
    transformers.Qwen3_5ForConditionalGeneration(both).save_pretrained(whole)
    return str(whole), str(text)


def asked_of(published, **options):
    whole, text = published
    return question(text, hub_id=whole, **options)


def weights_of(whole) -> dict:
    """The text model's own, by its own names, as the whole model loads them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(whole)
    assert type(model).__name__ == "Gemma4ForConditionalGeneration"  # what Auto would give
    return {f"model.{name}": p for name, p in model.model.language_model.state_dict().items()}


def test_the_text_model_begins_with_the_weights_of_the_whole(published):
    model, wanted = prepared(asked_of(published), "full"), weights_of(published[0])
    found = model.state_dict()
    assert type(model) is transformers.Gemma4ForCausalLM
    assert found.keys() - wanted.keys() == {"lm_head.weight"}
    assert all(torch.equal(found[name], p) for name, p in wanted.items())
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("kind", KIND_NAMES)
@pytest.mark.parametrize("way", ("", "checkpointing", "checkpoints on the host"))
def test_the_code_keeps_its_promise(kind, way, published, pasted):  # noqa: F811
    """Unlike numbers of labels in micro-batches, keys and values that layers share: the gradient
    is that of the plain run, and what is saved loads again."""
    name, asked = ", ".join(filter(None, (kind, way))), asked_of(published, batch=4)
    ran = pasted(asked, name, 4 if "backward" in kind else 2)
    rounded = "bf16" in name or "bf16" in asked.settings(Plan.named(name), 1)
    assert distance(ran.gradients, by_hand(asked, kind, ran.batch)) < (0.05 if rounded else 1e-4)
    check_method(ran.names["trainer"].model, ran.names["trainer"], name)
    if "LoRA" in kind:
        for part in ("layers.0.per_layer_projection", "per_layer_model_projection", "k_proj"):
            assert f"{part}.lora_A" in str(ran.gradients.keys())
        if way:  # on a CPU, bitsandbytes rounds otherwise what may need a gradient
            ran.names["model"].get_base_model().disable_input_require_grads()
    check_saved(ran, asked, name, kind)


def test_training_goes_on_from_what_trainer_keeps_on_the_way(published, pasted):  # noqa: F811
    """Trainer saves checkpoints itself: by the file's own names nothing of them would load."""
    ran = pasted(asked_of(published, batch=4), "full", 2)
    checkpoint = next(Path("trained").glob("checkpoint-*"))
    again = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    trained = ran.names["trainer"].model.state_dict()
    assert type(again) is transformers.Gemma4ForCausalLM
    assert all(torch.equal(trained[name], p) for name, p in again.state_dict().items())


def test_a_text_model_that_was_saved_alone_is_read_by_the_same_code(published, tmp_path):
    model = prepared(asked_of(published), "full")
    model.save_pretrained(tmp_path)
    again = prepared(question(str(tmp_path)), "full")
    found = again.state_dict()
    assert all(torch.equal(found[name], p) for name, p in model.state_dict().items())


def test_other_models_need_no_names(published):
    text = script(question("gemma-3-1b", hub_id="google/gemma-3-1b-pt"), Plan.named("full"), 1)
    assert "AutoModelForCausalLM" in text and "key_mapping" not in text


@pytest.mark.parametrize("parallel", ("ddp", "fsdp2"))
def test_the_code_for_several_cards_keeps_its_promise(
    parallel,
    published,
    launched,  # noqa: F811
    tmp_path,
):
    whole, text = published
    settings = ranked.ACCUMULATED | dict(activation_checkpointing=True)
    code = rank_script(text, 2, parallel, length=16, **settings).replace(text, whole)
    launched(ranked.on_rows(code), python=sys.executable)
    plain = prepared(asked_of(published), "full")
    wanted = ranked.plainly(plain)
    for rank in range(2):
        found = torch.load(tmp_path / f"grads{rank}.pt")
        assert ranked.distance(found, wanted) < 1e-4
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    before, after = plain.state_dict(), again.state_dict()
    assert type(again) is type(plain) and before.keys() == after.keys()
    moved = [n for n in before if not torch.equal(before[n], after[n])]
    assert moved and all((before[n] - after[n]).abs().max() < 1e-3 for n in before)


@pytest.mark.parametrize("kind", ("full in bf16", "LoRA", "QLoRA"))
def test_what_is_pasted_is_what_was_predicted(kind, published):
    asked = asked_of(published)

    def weights(model):
        named = model.named_parameters()
        return {n: (tuple(p.shape), p.dtype, p.requires_grad) for n, p in named}

    made = asked.changed(Plan.named(kind)).model(pretrained=False)
    assert weights(prepared(asked, kind)) == weights(made)


@pytest.mark.parametrize("shared", (0, 2))
def test_the_model_is_told_by_itself(shared, tmp_path):
    """Twins of few layers do not say which of them share keys, nor how wide which heads are."""
    config = transformers.Gemma4TextConfig(**SHAPE | dict(num_kv_shared_layers=shared))
    config.save_pretrained(tmp_path)
    found, plan = Predictions(question(str(tmp_path)), keep=False), Plan.named("LoRA")
    full = found.predict(plan, 2)
    estimate = found.estimate(plan, 2)
    assert not found.question.alike
    assert estimate.need == pytest.approx(found.question.need(full.peak_reserved), rel=0.02)
    assert estimate.seconds == pytest.approx(full.step_seconds, rel=0.05)
    assert found._twins == [()]


@pytest.mark.parametrize("kind", ("full", "full in bf16", "LoRA", "QLoRA"))
@pytest.mark.parametrize("way", ("", "checkpointing"))
def test_the_code_of_linear_attention_keeps_its_promise(kind, way, qwen, pasted):  # noqa: F811
    name, asked = ", ".join(filter(None, (kind, way))), asked_of(qwen, batch=4)
    ran = pasted(asked, name, 2)
    rounded = "bf16" in name or "bf16" in asked.settings(Plan.named(name), 1)
    assert distance(ran.gradients, by_hand(asked, kind, ran.batch)) < (0.05 if rounded else 1e-4)
    check_saved(ran, asked, name, kind)
    whole = transformers.AutoModelForImageTextToText.from_pretrained(qwen[0]).state_dict()
    begun = prepared(asked, "full").state_dict()
    inside = {n.replace("model.language_model.", "model."): p for n, p in whole.items()}
    assert all(torch.equal(inside[n], p) for n, p in begun.items() if n != "lm_head.weight")
