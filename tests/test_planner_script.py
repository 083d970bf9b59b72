"""The script that is pasted keeps its promise: gradient, method, saved model."""

import dataclasses
import functools

import peft
import pytest
import torch
import transformers
from transformers.models.whisper.modeling_whisper import shift_tokens_right

from helpers.runs import load
from helpers.tasks import loss_of_step
from helpers.workloads import (
    image_classification,
    image_text_to_text,
    language_modelling,
    speech_recognition,
    text_classification,
)
from planned import (
    SHAPE,
    padded,
    question,
    samples,
    saved_decoder,
    saved_encoder,
    saved_seeing,
    saved_speech,
    saved_vision,
)
from planner.predictions import Predictions
from planner.question import ask
from planner.script import script
from planner.techniques import KINDS, LIGER, WAYS, Plan

PADDED = ", data_collator=padded"
KIND_NAMES = [kind.name for kind in KINDS]
# Liger's kernels need Triton's interpreter: test_planner_liger.
WAY_NAMES = [way.name for way in WAYS if LIGER not in way.techniques]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return saved_decoder(tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return saved_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    return saved_vision(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    return saved_speech(tmp_path_factory.mktemp("speech"))


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    return saved_seeing(tmp_path_factory.mktemp("seeing"))


@dataclasses.dataclass
class Ran:
    """A script that was pasted and run: its names, and the gradients of its first step."""

    names: dict
    gradients: dict
    batch: dict


@pytest.fixture
def pasted(monkeypatch, tmp_path):
    """Runs a script as it stands, but for its data; a machine without a card uses its CPU."""
    arguments = transformers.TrainingArguments
    usual = dict(use_cpu=True, report_to="none", max_grad_norm=0, learning_rate=1e-2)
    here = functools.partialmethod(arguments.__init__, **usual)
    monkeypatch.setattr(arguments, "__init__", here)
    offload = torch.autograd.graph.save_on_cpu
    plain = offload.__init__  # without a card there is no memory to pin
    monkeypatch.setattr(offload, "__init__", lambda hooks, *_, **__: plain(hooks))
    monkeypatch.chdir(tmp_path)

    def run(asked, name, micro_batch, edit=lambda text: text):
        plan = Plan.named(name)
        text = edit(script(asked, plan, micro_batch))
        assert all(len(line) <= 100 for line in text.splitlines() if "pytest" not in line), text
        assert text.count("train_dataset = [sample]") == text.count("=train_dataset)") == 1
        assert ("learning_rate=5e-4," in text) == ("LoRA" in name)
        text = text.replace("learning_rate=5e-4", "learning_rate=1e-2")  # few steps
        text = text.replace("train_dataset = [sample]", "_ = [sample]").replace(
            "=train_dataset)", f"=SAMPLES{'' if 'data_collator=together' in text else PADDED})"
        )
        rows, seen = samples(asked), {}

        class Watch(transformers.TrainerCallback):
            def on_pre_optimizer_step(self, args, state, control, model=None, **_):
                for key, p in model.named_parameters():
                    if p.grad is not None:
                        seen[key] = p.grad.float().clone()

        def step(optimizer, closure=None, plain=transformers.Adafactor.step):
            for p in optimizer.param_groups[0]["params"]:
                if p.grad is not None:
                    seen[id(p)] = p.grad.float().clone()
            return plain(optimizer, closure)

        def trainer(*args, real=transformers.Trainer, **options):
            return real(*args, callbacks=[Watch()], **options)

        names = {"SAMPLES": rows, "padded": padded}
        transformers.set_seed(0)
        with monkeypatch.context() as patch:
            patch.setattr(transformers, "Trainer", trainer)
            patch.setattr(transformers.Adafactor, "step", step)
            exec(compile(text, "pasted", "exec"), names)
        assert names["trainer"].state.global_step == 1
        for key, value in asked.settings(plan, micro_batch).items():
            assert getattr(names["args"], key) == value
        parameters = names["trainer"].model.named_parameters()
        gradients = {key: seen.get(key, seen.get(id(p))) for key, p in parameters}
        gradients = {key: value for key, value in gradients.items() if value is not None}
        return Ran(names, gradients, padded(rows))

    return run


def prepared(asked, name) -> torch.nn.Module:
    """The model of a script, before it is trained; `lora` begins where adapters come."""
    names = {}
    transformers.set_seed(0)
    exec(script(asked, Plan.named(name), 1).split("\nsample = ")[0], names)
    return names["model"].train()


def inputs_of(model, batch) -> dict:
    """What the plain model is given: all but the labels, and of Whisper what its decoder reads."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    if "input_features" in inputs:
        special = model.config.pad_token_id, model.config.decoder_start_token_id
        inputs["input_features"] = inputs["input_features"].to(model.dtype)
        inputs["decoder_input_ids"] = shift_tokens_right(batch["labels"], *special)
    return inputs


def by_hand(asked, name, batch) -> dict:
    """The gradient of the mean over all labels of a step, by the plain model in one batch."""
    model = prepared(asked, name)
    inputs = inputs_of(model, batch)
    with torch.autocast(
        "cpu", torch.bfloat16, enabled="bf16" in asked.settings(Plan.named(name), 1)
    ):
        logits = model(**inputs).logits.float()
    labels = batch["labels"]
    if "input_ids" in inputs and logits.dim() == 3:  # each token tells the next one
        logits, labels = logits[:, :-1], labels[:, 1:]
    torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten()).backward()
    return {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}


def distance(gradients: dict, wanted: dict) -> float:
    """How far two gradients are apart, as a share of the second."""
    assert gradients.keys() == wanted.keys()
    apart = sum((gradients[n] - wanted[n]).square().sum() for n in wanted)
    return float((apart / sum(g.square().sum() for g in wanted.values())).sqrt())


def answers(model, batch) -> torch.Tensor:
    """Logits, in the 16 bits that Trainer leaves around a model that it trained in them."""
    inputs = inputs_of(model, batch)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return model.eval()(**inputs).logits.float()


def check_method(model, trainer, name):
    """The prepared model is of the method that the recipe names."""
    layers = dict(model.named_modules())
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {
        torch.bfloat16 if "in bf16" in name else torch.float32
    }
    adapters = {n for n in trained if "lora_" in n}
    heads = {n for n in trained if "classifier" in n or "lm_head" in n}
    assert bool(adapters) == ("LoRA" in name)
    if adapters:
        assert trained.keys() <= adapters | heads and not any(
            head in n for n in adapters for head in ("lm_head", "proj_out")
        )
        named, out = str(adapters), "out_proj" if "out_proj" in str(adapters) else "o_proj"
        assert all(f"{part}_proj" in named for part in "qkv") and out in named or "query" in named
    small = {n: m for n, m in layers.items() if type(m).__name__ == "Linear4bit"}
    assert bool(small) == ("QLoRA" in name)
    assert all(
        m.weight.quant_type == "nf4" and m.weight.dtype == torch.uint8 for m in small.values()
    )
    assert not any(head in n for n in small for head in ("lm_head", "classifier", "proj_out"))
    assert ("checkpoint" in name) == any(
        getattr(m, "gradient_checkpointing", False) for m in layers.values()
    )
    kind = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    if "8-bit" in name:
        assert kind.args.optim_bits == 8
    assert isinstance(kind, transformers.Adafactor) == ("Adafactor" in name and "back" not in name)


def check_saved(ran, asked, name, kind, auto=transformers.AutoModelForCausalLM):
    """What was trained differs from its start, and loads again as it was."""
    model = ran.names["trainer"].model
    if "LoRA" in kind:
        base = {}
        exec(script(asked, Plan.named(name), 1).split("\nlora = ")[0], base)
        again = peft.PeftModel.from_pretrained(base["model"], "trained")
    else:
        again = auto.from_pretrained("trained")
    assert type(again) is type(model)
    kept = {n: p for n, p in model.state_dict().items() if "lora_" in n or "LoRA" not in kind}
    assert kept and all(torch.equal(again.state_dict()[n], p) for n, p in kept.items())
    torch.testing.assert_close(answers(again, ran.batch), answers(model, ran.batch))
    moved = answers(prepared(asked, name), ran.batch) - answers(model, ran.batch)
    assert moved.abs().max() > 1e-3


@pytest.mark.parametrize("kind", KIND_NAMES)
@pytest.mark.parametrize("way", WAY_NAMES)
def test_the_code_of_every_recipe_keeps_its_promise(kind, way, decoder, pasted):
    """One step of the real Trainer, in two micro-batches where it accumulates: the gradient is
    that of the plain model, the method the one named, and what is saved loads again."""
    name, asked = ", ".join(filter(None, (kind, way))), question(decoder, batch=4)
    ran = pasted(asked, name, 4 if "backward" in kind else 2)
    model, trainer = ran.names["trainer"].model, ran.names["trainer"]
    rounded = "bf16" in name or "bf16" in asked.settings(Plan.named(name), 1)
    assert distance(ran.gradients, by_hand(asked, kind, ran.batch)) < (0.03 if rounded else 1e-4)
    check_method(model, trainer, name)
    check_saved(ran, asked, name, kind)


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_the_code_of_a_classifier_keeps_its_promise(kind, encoder, pasted):
    name = f"{kind}, checkpointing"
    asked = question(encoder, text_classification, batch=4)
    ran = pasted(asked, name, 4 if "backward" in kind else 2)
    model = ran.names["trainer"].model
    check_method(model, ran.names["trainer"], name)
    assert any(p.requires_grad for n, p in model.named_parameters() if "classifier" in n)
    wanted = by_hand(asked, kind, ran.batch)
    assert distance(ran.gradients, wanted) < 0.05


@pytest.mark.parametrize("kind", KIND_NAMES)
@pytest.mark.parametrize("way", ("", "checkpoints on the host"))
def test_the_code_of_a_model_of_pictures_keeps_its_promise(kind, way, vision, pasted):
    """Its head, for which peft has no name, learns whole and is saved."""
    name = ", ".join(filter(None, (kind, way)))
    asked = question(vision, image_classification, batch=4)
    ran = pasted(asked, name, 4 if "backward" in kind else 2)
    model = ran.names["trainer"].model
    check_method(model, ran.names["trainer"], name)
    learn = {n for n, p in model.named_parameters() if p.requires_grad and "classifier" in n}
    assert {n.split(".")[-1] for n in learn} == {"weight", "bias"}
    assert distance(ran.gradients, by_hand(asked, kind, ran.batch)) < 0.03
    check_saved(ran, asked, name, kind, transformers.AutoModelForImageClassification)


@pytest.mark.parametrize("kind", KIND_NAMES)
@pytest.mark.parametrize("way", ("", "checkpoints on the host"))
def test_the_code_of_a_model_of_sound_keeps_its_promise(kind, way, speech, pasted):
    """The mean over all labels of a step, which micro-batches have unlike many of: Whisper's own
    loss is a mean of each."""
    name = ", ".join(filter(None, (kind, way)))
    asked = question(speech, speech_recognition, batch=4)
    ran = pasted(asked, name, 4 if "backward" in kind else 2)
    check_method(ran.names["trainer"].model, ran.names["trainer"], name)
    assert distance(ran.gradients, by_hand(asked, kind, ran.batch)) < 0.03
    check_saved(ran, asked, name, kind, transformers.AutoModelForSpeechSeq2Seq)
    model = ran.names["model"].eval()  # writes down what it hears, as the last line says
    heard = ran.batch["input_features"].to(model.device, model.dtype)
    assert model.generate(heard, max_new_tokens=3).shape[0] == 4


@pytest.mark.parametrize("kind", KIND_NAMES)
@pytest.mark.parametrize("way", ("", "checkpointing, chunked loss", "checkpoints on the host"))
def test_the_code_of_a_model_that_sees_keeps_its_promise(kind, way, seeing, pasted):
    """The script's own collator puts pictures of unlike sizes and texts of unlike lengths together,
    and all labels of a step weigh alike, which the model's class would not have."""
    name = ", ".join(filter(None, (kind, way)))
    asked = question(seeing, image_text_to_text, batch=4)
    ran = pasted(asked, name, 4 if "backward" in kind else 2)
    model = ran.names["trainer"].model
    check_method(model, ran.names["trainer"], name)
    learn = {n for n, p in model.named_parameters() if p.requires_grad}
    assert any("visual" in n for n in learn) and any("language_model" in n for n in learn)
    assert distance(ran.gradients, by_hand(asked, kind, ran.batch)) < 0.03
    check_saved(ran, asked, name, kind, transformers.AutoModelForImageTextToText)


@pytest.mark.parametrize(
    "right, wrong",
    [
        ("model.accepts_loss_kwargs = True", "model.accepts_loss_kwargs = False"),
        ('"labels": -100}', '"labels": 0}'),
        (" if name in sample]", ' if "pixel_values" in sample]'),
        ("batch_first=True, padding_value=filling[name]", 'True, filling[name], "left"'),
    ],
)
def test_a_wrong_batch_of_pictures_is_seen(right, wrong, seeing, pasted):
    asked = question(seeing, image_text_to_text, batch=4)
    assert right in script(asked, Plan.named("full"), 2)
    ran = pasted(asked, "full", 2, lambda text: text.replace(right, wrong))
    assert distance(ran.gradients, by_hand(asked, "full", ran.batch)) > 0.05


def test_whispers_own_loss_is_seen(speech, pasted):
    asked = question(speech, speech_recognition, batch=4)
    own = "model = loss_of_step(model)", "model.accepts_loss_kwargs = False"
    ran = pasted(asked, "full", 2, lambda text: text.replace(*own))
    assert distance(ran.gradients, by_hand(asked, "full", ran.batch)) > 0.1


def test_a_whispers_labels_begin_after_the_first_token(speech):
    """The model puts it before all labels, and so twice where a processor's stand as they are."""
    assert "without <|startoftranscript|>" in script(ask(speech, batch=1), Plan.named("full"), 1)
    model = loss_of_step(transformers.AutoModelForSpeechSeq2Seq.from_pretrained(speech))
    batch, seen = padded(samples(question(speech, speech_recognition))), []
    model.model.decoder.register_forward_pre_hook(
        lambda _, args, options: seen.append(options["input_ids"]), with_kwargs=True
    )
    model(**batch)
    assert torch.equal(seen[0], inputs_of(model, batch)["decoder_input_ids"])
    assert set(seen[0][:, 0].tolist()) == {model.config.decoder_start_token_id}


def test_what_a_collator_gives_whispers_decoder_is_taken(speech):
    """As Whisper itself does: who smooths labels has to, for Trainer keeps them from the model."""
    model = loss_of_step(transformers.AutoModelForSpeechSeq2Seq.from_pretrained(speech))
    batch = padded(samples(question(speech, speech_recognition)))
    alone = model(**batch)
    others = inputs_of(model, batch)["decoder_input_ids"].roll(1)
    given = model(**batch, decoder_input_ids=others)
    assert given["loss"] != alone["loss"] and given.logits.shape == alone.logits.shape


@pytest.mark.parametrize("kind", ("full in bf16", "LoRA", "QLoRA"))
@pytest.mark.parametrize("model", ("Dinov2", "Dinov2WithRegisters"))
def test_the_code_of_other_vision_transformers(model, kind, tmp_path, pasted):
    """The tokens that they add are taken for no experts."""
    size = SHAPE | dict(image_size=32, patch_size=8, num_labels=3, initializer_range=0.2)
    quiet = {"hidden_dropout_prob": 0.0, "drop_path_rate": 0.0}
    config = getattr(transformers, f"{model}Config")(**size, **quiet)
    folder = tmp_path / "model"
    transformers.AutoModelForImageClassification.from_config(config).save_pretrained(folder)
    asked = question(str(folder), image_classification, batch=4)
    ran = pasted(asked, kind, 2)
    check_method(ran.names["trainer"].model, ran.names["trainer"], kind)
    assert distance(ran.gradients, by_hand(asked, kind, ran.batch)) < 0.03
    assert Predictions(asked, keep=False).predict(Plan.named(kind), 2).peak_allocated > 0


@pytest.mark.parametrize("kind", ("LoRA", "QLoRA"))
def test_a_head_of_two_layers_learns_whole(kind, tmp_path, pasted):
    """DistilBERT's, of which peft would adapt the first and save both: it refuses that."""
    shape = {"dim": 64, "hidden_dim": 128, "n_heads": 4, "n_layers": 2, "vocab_size": 257}
    quiet = {"dropout": 0, "attention_dropout": 0, "seq_classif_dropout": 0, "pad_token_id": 0}
    config = transformers.DistilBertConfig(**shape, **quiet, max_position_embeddings=64)
    config.initializer_range = 0.2
    transformers.DistilBertForSequenceClassification(config).save_pretrained(tmp_path)
    asked = question(str(tmp_path), text_classification, batch=4)
    ran = pasted(asked, kind, 2)
    learn = {n for n, p in ran.names["model"].named_parameters() if p.requires_grad}
    assert {n.split(".")[-1] for n in learn if "pre_classifier" in n} == {"weight", "bias"}
    assert all("classifier" in n or "lora_" in n for n in learn) and "q_lin" in str(learn)
    assert distance(ran.gradients, by_hand(asked, kind, ran.batch)) < 0.05
    base = {}  # both layers are saved, and load again as they were
    exec(script(asked, Plan.named(kind), 1).split("\nlora = ")[0], base)
    again = peft.PeftModel.from_pretrained(base["model"], "trained")
    torch.testing.assert_close(answers(again, ran.batch), answers(ran.names["model"], ran.batch))
    moved = answers(prepared(asked, kind), ran.batch) - answers(again, ran.batch)
    assert moved.abs().max() > 1e-3


@pytest.mark.parametrize(
    "right, wrong",
    [
        ("total / num_items_in_batch", "total / (targets != -100).sum()"),
        ("total / num_items_in_batch", "total / targets.numel()"),
        ("labels=None, num_items_in_batch=None, **others", "labels=None, attention_mask=None"),
        ("model.base_model(input_ids, **others)", "model.base_model(input_ids)"),
        ("labels[:, 1:]", "labels[:, :-1]"),
    ],
)
def test_a_wrong_loss_is_seen(right, wrong, decoder, pasted):
    """Planted defects: each moves the gradient by more than rounding, or stops the script."""
    name, asked = "full, chunked loss", question(decoder, batch=4)
    assert right in script(asked, Plan.named(name), 2)
    try:
        ran = pasted(asked, name, 2, lambda text: text.replace(right, wrong))
    except (TypeError, NameError):
        return
    assert distance(ran.gradients, by_hand(asked, "full", ran.batch)) > 0.05


def test_a_quantized_model_is_put_on_the_card_whole(decoder):
    """With "auto", a fifth of the card is set aside, and what is left over for the host refused."""
    text = script(question(decoder), Plan.named("QLoRA"), 1)
    assert "load_in_4bit=True" in text and "device_map" not in text


def test_the_recorded_code_is_what_is_pasted_today():
    for row in load("fits").itertuples():
        asked = ask(row.model, row.gpu, length=row.length, batch=row.batch)
        code = script(asked, Plan.named(row.recipe), row.micro_batch)
        assert without_versions(code) == without_versions(row.code)
        assert row.code.startswith("# Predicted with torch ")


def without_versions(code):
    lines = code.split("\n")[1:]
    return [line for line in lines if not line.startswith("# pip install ")]


@pytest.mark.parametrize("kind", ("full in bf16", "LoRA", "QLoRA"))
@pytest.mark.parametrize(
    "task, model",
    [
        (language_modelling, "decoder"),
        (text_classification, "encoder"),
        (image_classification, "vision"),
        (speech_recognition, "speech"),
        (image_text_to_text, "seeing"),
    ],
)
def test_what_is_pasted_is_what_was_predicted(kind, task, model, request):
    """The same weights in the same types: names, shapes, and which of them learn."""
    asked = question(request.getfixturevalue(model), task)

    def weights(model):
        named = model.named_parameters()
        return {n: (tuple(p.shape), p.dtype, p.requires_grad) for n, p in named}

    assert weights(prepared(asked, kind)) == weights(asked.changed(Plan.named(kind)).model())
