"""What the planner predicts: twins meet the whole model, one micro-batch tells the others."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import transformers

from helpers.prediction import predict
from planned import SHAPE, predictions, saved_decoder
from planner import cache
from planner.changes import adapters, in_4_bits, in_16_bits
from planner.predictions import Predictions
from planner.techniques import Plan

CHANGES = {"full": [], "LoRA": [in_16_bits, adapters], "QLoRA": [in_16_bits, in_4_bits, adapters]}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return saved_decoder(tmp_path_factory.mktemp("decoder"))


@pytest.mark.parametrize("name", ("LoRA", "full, Adafactor in backward, checkpointing"))
def test_the_lines_of_two_twins_meet_the_full_prediction(name, tmp_path):
    shape = SHAPE | {"num_hidden_layers": 6, "hidden_size": 256}
    transformers.LlamaConfig(**shape, vocab_size=512).save_pretrained(tmp_path)
    found, plan = predictions(str(tmp_path), keep=False), Plan.named(name)
    need, seconds, again, end = found.estimate(plan, 2)
    full = found.predict(plan, 2)
    assert 0 < again < full.forward < seconds  # the layers', beside embeddings and the head
    assert 0 < end < seconds and end == pytest.approx(full.end, rel=0.05)
    assert need == pytest.approx(found.question.need(full.peak_reserved), rel=0.02)
    assert seconds == pytest.approx(full.step_seconds, rel=0.05)


@pytest.mark.parametrize(
    "name",
    (
        "full, 8-bit AdamW, checkpointing",
        "full, Adafactor, chunked loss",
        "full in bf16, 8-bit AdamW, Liger kernels",
    ),
)
def test_a_twin_with_another_optimizer_is_told_by_that_of_adamw(name, tmp_path, monkeypatch):
    """Each phase as its own prediction has it, which the search then need not make."""
    shape = SHAPE | {"num_hidden_layers": 4, "hidden_size": 256}
    transformers.LlamaConfig(**shape, vocab_size=512).save_pretrained(tmp_path)
    found, plan, asked = predictions(str(tmp_path), keep=False), Plan.named(name), []
    real, layers = Predictions.predict, ("full_attention",)

    def predict(self, plan, micro_batch, **options):
        asked.append((plan.name, micro_batch))
        return real(self, plan, micro_batch, **options)

    monkeypatch.setattr(Predictions, "predict", predict)
    told = found._twin(plan, 2, layers, 0)
    assert (name, 2) not in asked and (plan.kind.name, 1) in asked
    own = found.predict(plan, 2, layers=layers)
    assert told.phases == pytest.approx(own.phases, rel=0.003)
    assert told.seconds == pytest.approx(own.step_seconds, rel=0.01)


def test_who_asks_for_what_is_being_predicted_waits_for_it(decoder, monkeypatch):
    found, lora, begun = predictions(decoder, keep=False), Plan.named("LoRA"), []

    def slowly(self, *asked):
        begun.append(asked)
        time.sleep(0.2)
        return object()

    monkeypatch.setattr(Predictions, "_kept", slowly)
    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(lambda _: found.predict(lora, 1), range(3)))
    assert len(begun) == 1 and len(set(map(id, answers))) == 1


def test_layers_of_two_kinds_need_a_twin_for_each(tmp_path, monkeypatch):
    shape = SHAPE | {"num_hidden_layers": 8, "hidden_size": 256, "head_dim": 64}
    config = transformers.Gemma3TextConfig(**shape, vocab_size=512, sliding_window=8)
    assert config.layer_types.count("sliding_attention") == 7  # every sixth sees everything
    config.save_pretrained(tmp_path)
    found, asked = predictions(str(tmp_path), keep=False), []
    real, lora = Predictions.predict, Plan.named("LoRA")

    def predict(self, plan, micro_batch, *, layers=(), length=0):
        asked.append(layers)
        return real(self, plan, micro_batch, layers=layers, length=length)

    monkeypatch.setattr(Predictions, "predict", predict)
    need, seconds, *_ = found.estimate(lora, 2)
    assert [len(layers) for layers in asked] == [2, 3, 3]  # and not six and twelve
    full = found.predict(lora, 2)
    assert need == pytest.approx(found.question.need(full.peak_reserved), rel=0.02)
    assert seconds == pytest.approx(full.step_seconds, rel=0.05)


def test_layers_that_differ_by_their_number_alone_have_no_twins(tmp_path):
    """The first three are no mixtures: twins of one and two layers would tell of no other."""
    shape = SHAPE | {"num_hidden_layers": 6, "first_k_dense_replace": 3, "pad_token_id": 0}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    config = transformers.DeepseekV3Config(
        **shape | experts | {"moe_intermediate_size": 512}, q_lora_rank=16, kv_lora_rank=16
    )
    config.save_pretrained(tmp_path)
    found, plan = predictions(str(tmp_path), keep=False), Plan.named("full")
    full = found.question.need(found.predict(plan, 2).peak_reserved)
    assert found.estimate(plan, 2).need == pytest.approx(full, rel=0.02)


@pytest.mark.parametrize("name", ("full, checkpointing", "LoRA", "QLoRA, checkpointing"))
def test_what_is_kept_is_the_prediction_with_the_same_settings(name, decoder):
    found, plan = predictions(decoder, batch=4, keep=False), Plan.named(name)
    facts, settings = found.predict(plan, 1), found.question.settings(plan, 1)
    work = found.question.workload
    for change in CHANGES[name.split(",")[0]]:
        work = work.with_model(change)
    whole = predict(work, gpu="RTX 4090", **settings)
    assert facts.peak_allocated == pytest.approx(whole.peak_allocated, rel=0.01)
    assert facts.peak_reserved == pytest.approx(whole.peak_reserved, rel=0.01)
    assert facts.step_seconds == pytest.approx(whole.step_seconds, rel=0.02)
    assert sum(facts.by_category.values()) == facts.peak_allocated
    assert facts.by_category == pytest.approx(whole.by_category, rel=0.03, abs=2**16)


def test_other_settings_and_other_code_are_asked_anew(decoder, monkeypatch):
    keys, lora = [], Plan.named("LoRA")
    monkeypatch.setattr(cache, "kept", lambda question, predict: keys.append(question))
    predictions(decoder).predict(lora, 2)
    predictions(decoder).predict(lora, 1)
    predictions(decoder, gpu="T4").predict(lora, 2)
    predictions(decoder).predict(lora, 2, layers=(1,))
    predictions(decoder).predict(Plan.named("QLoRA"), 2)
    predictions(decoder).predict(lora, 2, length=8)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    predictions(decoder).predict(lora, 2)
    monkeypatch.setattr(cache, "code", lambda: "edited")
    predictions(decoder).predict(lora, 2)
    assert len(set(keys)) == 8
    predictions(decoder).predict(lora, 2)
    assert len(set(keys)) == 8
