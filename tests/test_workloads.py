"""Workloads: real learning on real text, caches, models and data of one's own, kind errors."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from safetensors import SafetensorError
from tokenizers import ByteLevelBPETokenizer

from helpers import (
    hardware,
    image_classification,
    image_text_to_text,
    language_modelling,
    models,
    own_data,
    predict,
    speech_recognition,
    text_classification,
    tiny,
    train,
    workloads,
)
from planned import saved_seeing, saved_speech, saved_vision


# ----------------------------------------------------------------------------------------- learning
def test_the_language_model_learns_more_than_which_bytes_are_frequent():
    workload = language_modelling("tiny", length=32)
    counts = np.bincount(np.asarray(workload.data("train")["input_ids"]).ravel(), minlength=257)
    shares = counts[counts > 0] / counts.sum()
    unigram = -(shares * np.log(shares)).sum()

    def loss(trainer):
        return trainer.evaluate(trainer.eval_dataset.select(range(128)))["eval_loss"]

    run = train(workload, max_steps=100, per_device_train_batch_size=16, after=loss)
    assert run.after < 0.85 * unigram
    assert run.losses[0] > unigram > run.losses[-1]


def test_the_classifier_learns_more_than_which_class_is_frequent():
    workload = text_classification("tiny", length=48)
    labels = np.asarray(workload.data("test")["labels"])
    majority = np.bincount(labels).max() / len(labels)

    def accuracy(trainer):
        return trainer.evaluate()["eval_accuracy"]

    run = train(workload, max_steps=200, per_device_train_batch_size=16, after=accuracy)
    assert run.after > 2 * majority


def test_training_and_test_data_are_apart():
    workload = text_classification("tiny", length=64)
    parts = [workload.data(split)["input_ids"] for split in ("train", "test")]
    rows = [{tuple(row) for row in np.asarray(part).tolist()} for part in parts]
    assert len(rows[0] & rows[1]) < 0.1 * len(rows[1])  # some functions are in several modules
    assert len(parts[1]) == pytest.approx(0.1 * (len(parts[0]) + len(parts[1])), abs=1)


# ------------------------------------------------------------------------------- models and batches
def test_bert_large_is_the_classic_one():
    workload = text_classification("large")
    with torch.device("meta"):
        model = workload.model(pretrained=False)
    assert sum(p.numel() for p in model.parameters()) == 335_143_938
    assert model.config.num_labels == 2 and workload.length == 512
    assert set(workload.sample()) == {"input_ids", "labels"}  # no padding mask


def test_large_data_are_512_samples():
    read = partial(tiny.random_tokens, True, 8, 30_522)
    rows = read("train")
    assert rows["input_ids"][:].shape == (512, 8) and len(read("test")) == 64
    assert set(np.asarray(rows["labels"])) == {0, 1}
    assert torch.equal(rows["input_ids"][:], read("train")["input_ids"][:])
    letters = tiny.random_tokens(False, 8, 65, "train")["input_ids"][:]
    assert letters.max() < 65  # a vocabulary smaller than the ids that are left out elsewhere


def test_offline_large_has_random_weights_and_says_so(monkeypatch):
    monkeypatch.setattr(workloads, "reachable", lambda hub_id: False)
    workload = text_classification("large")
    assert workload.weights is None and workloads.OFFLINE in str(workload)
    assert "\n" not in str(workload)
    monkeypatch.setattr(workloads, "reachable", lambda hub_id: True)
    online = text_classification("large")
    assert online.weights == "google-bert/bert-large-uncased" and not online.note


def test_the_usual_length_is_what_a_smaller_model_can_read():
    assert language_modelling("gpt2").length == 1024
    assert language_modelling("llama-3.2-1b").length == 2048
    assert text_classification("bert-base-uncased", length=64).length == 64


def test_a_model_is_the_same_each_time():
    workload = language_modelling("tiny", length=16)
    first, second = (workload.model().state_dict() for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)
    other = language_modelling("tiny", length=16, seed=1).model().state_dict()
    assert any(not torch.equal(first[key], other[key]) for key in first)
    assert all(p.dtype is torch.float32 for p in first.values())


def test_a_sample_has_the_shape_of_the_data():
    for workload in (text_classification("tiny", length=64), language_modelling("tiny", length=64)):
        real = workload.data("train")[0]
        for key, made in workload.sample().items():
            assert (made.shape, made.dtype) == (real[key].shape, real[key].dtype), key


def test_with_model_changes_each_new_model():
    plain, calls = language_modelling("tiny", length=16), []

    def freeze(model):
        calls.append("freeze")
        return model.requires_grad_(False)

    def head(model):
        calls.append("head")
        model.lm_head.weight.requires_grad = True
        return model

    changed = plain.with_model(freeze).with_model(head)
    trained = [name for name, p in changed.model().named_parameters() if p.requires_grad]
    assert trained == ["lm_head.weight"] and calls == ["freeze", "head"]
    assert plain.changes == () and all(p.requires_grad for p in plain.model().parameters())
    after = train(changed, max_steps=3, after=lambda t: len(t.optimizer.state)).after
    assert after == 1 and len(calls) == 4


@pytest.mark.parametrize("make", [text_classification, language_modelling])
def test_the_dataloader_has_the_batches_of_train(make):
    workload, seen = make("tiny", length=64), []

    def spy(model):
        def look(module, args, kwargs):
            seen.append({k: kwargs[k].clone() for k in ("input_ids", "labels")})

        model.register_forward_pre_hook(look, with_kwargs=True)
        return model

    train(workload.with_model(spy), max_steps=3, per_device_train_batch_size=5)
    assert len(seen) == 3
    for mine, theirs in zip(workload.dataloader(5), seen, strict=False):
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


# --------------------------------------------------------------------------------------------- auto
def test_auto_picks_tiny_on_a_cpu_and_says_so(monkeypatch):
    monkeypatch.setattr(hardware, "device", lambda: torch.device("cpu"))
    workload = text_classification()
    assert workload.name == "tiny BERT"
    assert "picked for cpu with" in str(workload) and "GiB free" in str(workload)
    assert "picked" not in str(text_classification("tiny"))


@pytest.mark.parametrize(
    "build, free, name",
    [
        (language_modelling, 80, "tinyllama-1.1b"),
        (language_modelling, 4, "tiny Llama"),
        (text_classification, 14.5, "bert-large-uncased"),  # a T4
        (text_classification, 11.5, "tiny BERT"),  # 12 GB with a desktop
    ],
)
def test_auto_picks_by_the_free_memory_of_a_card(build, free, name, monkeypatch):
    found = hardware.Hardware("cuda", "a card", 80 * 2**30, int(free * 2**30), (8, 0), (), {})
    monkeypatch.setattr(models, "describe", lambda: found)
    workload = build()
    assert workload.name == name and "picked for cuda" in workload.note


# ------------------------------------------------------------------------------------------- caches
@pytest.fixture
def course(tmp_path, monkeypatch):
    """A course folder of its own with quick data, so that caches can be made and damaged."""
    real = hardware.data_file("gpus.csv").parent
    (tmp_path / "data").mkdir()
    shutil.copy(real / "gpus.csv", tmp_path / "data")
    shutil.copytree(real / "configs", tmp_path / "data" / "configs")
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    rows = {"input_ids": random.integers(257, size=(200, 16))}
    monkeypatch.setattr(tiny, "_bytes", lambda length: rows)
    monkeypatch.setattr(workloads, "pretrain", partial(tiny.pretrain, steps=2))
    tiny.standard_library.cache_clear()
    yield tmp_path
    tiny.standard_library.cache_clear()


DAMAGES = {
    "truncated": lambda content: content[: len(content) // 2],
    "overwritten": lambda content: b"damaged",
    "empty": lambda content: b"",
}


def cached(course):
    files = [path for path in (course / "data" / "cache").rglob("*") if path.is_file()]
    return sorted(path.name for path in files if path.suffix != ".lock")


@pytest.fixture
def trainings(monkeypatch):
    """How many times a Trainer has trained."""
    done, real = [], transformers.Trainer.train
    count = lambda self, *args, **kwargs: done.append(1) or real(self, *args, **kwargs)  # noqa: E731
    monkeypatch.setattr(transformers.Trainer, "train", count)
    return done


def test_pretrained_trains_once_and_keeps_the_weights(course, trainings):
    first = language_modelling("tiny", length=16, pretrained=True)
    assert len(trainings) == 1 and "model.safetensors" in cached(course)
    assert all(name.endswith((".safetensors", ".json")) for name in cached(course))
    second = language_modelling("tiny", length=16, pretrained=True)
    assert len(trainings) == 1
    weights = [w.model().state_dict()["lm_head.weight"] for w in (first, second)]
    assert torch.equal(*weights)
    untrained = language_modelling("tiny", length=16).model().state_dict()["lm_head.weight"]
    assert not torch.equal(weights[0], untrained)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_weights_are_named_and_kept(damage, course):
    workload = language_modelling("tiny", length=16, pretrained=True)
    (path,) = (course / "data" / "cache").rglob("model.safetensors")
    broken = DAMAGES[damage](path.read_bytes())
    path.write_bytes(broken)
    with pytest.raises((ValueError, OSError)) as caught:
        language_modelling("tiny", length=16, pretrained=True).model()
    assert str(path.parent) in one_sentence(caught) and "damaged" in str(caught.value)
    assert path.read_bytes() == broken
    shutil.rmtree(path.parent)  # what the sentence says helps
    assert torch.is_tensor(workload.model(pretrained=False).lm_head.weight)
    language_modelling("tiny", length=16, pretrained=True).model()


def test_a_cache_that_lost_its_weights_is_made_anew(course, trainings):
    language_modelling("tiny", length=16, pretrained=True)
    (path,) = (course / "data" / "cache").rglob("model.safetensors")
    path.unlink()
    language_modelling("tiny", length=16, pretrained=True).model()
    assert path.is_file() and len(trainings) == 2


def test_weights_are_trained_by_one_kernel_alone(course, trainings):
    """A second kernel waits for the first one's weights, and trains none of its own."""
    with ThreadPoolExecutor() as pool:
        make = partial(language_modelling, "tiny", length=16, pretrained=True)
        first, second = pool.map(lambda _: make(), range(2))
    assert first.weights == second.weights and len(trainings) == 1


def test_no_half_written_weights(course, monkeypatch):
    def fail(self, folder, **options):
        Path(folder, "model.safetensors").write_bytes(b"half")
        raise SafetensorError("No space left on device")  # so it says, and not OSError

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", fail)
    with pytest.raises(OSError, match="data/cache cannot be written.*No space left"):
        language_modelling("tiny", length=16, pretrained=True)
    assert cached(course) == []


def test_cached_weights_need_no_lock_and_are_for_everyone(course, trainings, monkeypatch):
    weights = language_modelling("tiny", length=16, pretrained=True).weights
    assert weights.stat().st_mode & 0o055 == 0o055

    def refuse(*_):
        raise PermissionError("Read-only file system")

    monkeypatch.setattr(tiny, "FileLock", refuse)
    assert language_modelling("tiny", length=16, pretrained=True).weights == weights
    with pytest.raises(OSError, match="data/cache cannot be written.*Read-only"):
        language_modelling("tiny", length=8, pretrained=True)


@pytest.mark.parametrize(
    "size, task",
    [
        ("large", "text_classification"),
        ("tiny", "text_classification"),
        ("bert-base-uncased", "text_classification"),
        ("modernbert-base", "text_classification"),
        ("llama-3.2-1b", "language_modelling"),
        ("gpt2", "language_modelling"),
        ("vit-large-patch16-224", "image_classification"),
        ("whisper-small", "speech_recognition"),
    ],
)
def test_the_usual_task_is_that_of_the_model(size, task):
    assert workloads.usual_task(size) == task


# --------------------------------------------------------------------------------------- pictures
@pytest.mark.parametrize(
    "kind, tokens",  # of 32 x 32 in patches of 8, and those that a model adds
    [("ViT", 17), ("DeiT", 18), ("ViTMSN", 17), ("Dinov2WithRegisters", 16 + 5), ("IJepa", 16)],
)
def test_a_vision_transformer_trains_on_pictures_of_its_own_size(kind, tokens, tmp_path):
    size = dict(image_size=32, patch_size=8, num_channels=1, num_labels=3)
    shape = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    shape["architectures"] = [f"{kind}ForImageClassification"]
    getattr(transformers, f"{kind}Config")(**size, **shape).save_pretrained(tmp_path)
    workload = image_classification(str(tmp_path))
    assert workload.length == tokens and workload.title.endswith(f"{tokens} tokens a picture")
    first, again, other = (workload.data(split)[1] for split in ("train", "train", "test"))
    assert torch.equal(first["pixel_values"], again["pixel_values"])
    assert not torch.equal(first["pixel_values"], other["pixel_values"])
    classes = [int(picture["labels"]) for picture in workload.data("train")]
    assert len(classes) == 512 and set(classes) == {0, 1, 2}
    shapes = [{k: (v.shape, v.dtype) for k, v in one.items()} for one in (first, workload.sample())]
    assert shapes[0] == shapes[1] and shapes[0]["pixel_values"][0] == (1, 32, 32)
    model = workload.model(pretrained=False)
    hidden = model.base_model(workload.collate([first])["pixel_values"])[0]
    assert hidden.shape[1] == tokens


def test_accumulated_pictures_have_the_gradient_of_one_batch(tmp_path):
    """These heads do not divide by the step's samples, so Trainer must."""
    workload = image_classification(saved_vision(tmp_path))
    found = []
    for size in (4, 2):
        arguments = dict(per_device_train_batch_size=size, gradient_accumulation_steps=4 // size)
        trainer = workload.trainer(
            lambda model, _: torch.optim.SGD(model.parameters(), lr=0.1),
            **arguments,
            max_steps=1,
            max_grad_norm=0,
            learning_rate=0.1,
        )
        trainer.train()
        found.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    start = torch.cat([p.detach().flatten() for p in workload.model().parameters()])
    one, several = (weights - start for weights in found)
    assert (several - one).norm() < 1e-4 * one.norm()


def test_a_whisper_trains_on_thirty_seconds_and_a_text(tmp_path):
    saved_speech(tmp_path)
    workload = speech_recognition(str(tmp_path), length=8)
    assert workload.title.endswith("8 tokens and 30 s of sound")
    assert speech_recognition(str(tmp_path)).length == 64  # as many as it reads
    first = workload.data("train")[0]
    shapes = [{k: (v.shape, v.dtype) for k, v in one.items()} for one in (first, workload.sample())]
    assert shapes[0] == shapes[1] and shapes[0]["input_features"][0] == (8, 32)
    with pytest.raises(IndexError):
        workload.data("test")[64]
    run = train(workload, max_steps=3, per_device_train_batch_size=2)
    assert run.tokens_per_second == pytest.approx(8 * run.samples_per_second)


def test_a_model_that_sees_trains_on_pictures_in_texts(tmp_path):
    """Its batches reach it whole, from a stream, too, of which Accelerate would cut them."""
    workload = image_text_to_text(saved_seeing(tmp_path), length=20, image_size=256)
    assert workload.title.endswith("20 tokens, of which a picture of 256 x 256")
    assert image_text_to_text(str(tmp_path)).image_size == 512
    first = workload.data("train")[0]
    shapes = [{k: (v.shape, v.dtype) for k, v in one.items()} for one in (first, workload.sample())]
    assert shapes[0] == shapes[1] and shapes[0]["pixel_values"][0] == (16, 3 * 2 * 64 * 64)
    assert first["labels"].tolist() == [-100] * 6 + first["input_ids"][6:].tolist()

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([workload.data("train")[k] for k in range(4)])

    seen = []
    config = {"split_batches": False}  # of a reader's own
    options = dict(per_device_train_batch_size=2, max_steps=2, accelerator_config=config)
    trainer = workload.trainer(data=Stream(), **options)
    trainer.model.register_forward_pre_hook(
        lambda _, args, options: seen.append(options["pixel_values"].shape[0]), with_kwargs=True
    )
    trainer.train()
    assert seen == [32, 32]
    run = train(workload, max_steps=3, per_device_train_batch_size=2)
    assert run.tokens_per_second == pytest.approx(20 * run.samples_per_second)


def test_smoothed_labels_of_a_model_that_sees_are_one_sentence(tmp_path):
    """Trainer would compare each token with its own label, as it does where it knows no class."""
    workload = image_text_to_text(saved_seeing(tmp_path), length=20, image_size=256)
    with pytest.raises(ValueError, match="label_smoothing_factor compares tokens with") as caught:
        workload.trainer(label_smoothing_factor=0.1)
    one_sentence(caught)


def test_pictures_are_predicted_with_all_their_patches(tmp_path):
    """Of two pictures as many more bytes are kept as of one, though they stand in one row."""
    workload = image_text_to_text(saved_seeing(tmp_path, patch=16), length=600)
    kept = [
        predict(workload, gpu="T4", per_device_train_batch_size=n).by_category["activations"]
        for n in (2, 3, 4)
    ]
    assert kept[2] - kept[1] == pytest.approx(kept[1] - kept[0], rel=0.1)
    assert kept[0] == pytest.approx(2 * (kept[1] - kept[0]), rel=0.2)


def test_a_model_with_a_teacher_is_one_sentence(tmp_path):
    """It answers twice and has no loss; its name is another one than that of all the others."""
    told = {"architectures": ["DeiTForImageClassificationWithTeacher"]}
    transformers.DeiTConfig(**told).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no loss of its own.*--script") as caught:
        workloads.workload(str(tmp_path))
    one_sentence(caught)


def test_a_model_that_casts_no_pictures_is_one_sentence(tmp_path):
    transformers.BeitConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="takes pictures in the type of its weights") as caught:
        image_classification(str(tmp_path))
    one_sentence(caught)


@pytest.mark.parametrize("kind", ("Swin", "ResNet", "ConvNext", "PPLCNet", "TimmWrapper"))
def test_a_model_without_tokens_of_one_width_is_one_sentence(kind, tmp_path):
    getattr(transformers, f"{kind}Config")().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="does not read a picture as tokens.*--script") as caught:
        image_classification(str(tmp_path))
    one_sentence(caught)


OF_PICTURES, OF_SOUND, OF_BOTH = image_classification, speech_recognition, image_text_to_text


@pytest.mark.parametrize("kind", ("Gemma3", "Llava", "Qwen2_5_VL", "Idefics3"))
def test_other_models_that_see_are_one_sentence(kind, tmp_path):
    getattr(transformers, f"{kind}Config")().save_pretrained(tmp_path)
    for task in (image_text_to_text, language_modelling):
        with pytest.raises(ValueError, match="has parts beside that for texts.*--script") as caught:
            task(str(tmp_path))
        one_sentence(caught)


@pytest.mark.parametrize(
    "task, size, options, message",
    [
        (OF_PICTURES, "vit-large-patch16-224", {"length": 64}, "197 tokens: leave the length out"),
        (OF_PICTURES, "vit-large-patch16-224", {"data": "cats.csv"}, "pictures of your own"),
        (OF_PICTURES, "tiny", {}, 'has no size "tiny": name a model'),
        (OF_PICTURES, "gpt2", {}, "gpt2 is not a model for image classification"),
        (OF_PICTURES, "whisper-small", {}, "is not a model for image classification"),
        (OF_PICTURES, "qwen3-vl-4b", {}, "is not a model for image classification"),
        (OF_BOTH, "qwen3-vl-4b", {"data": "cats.csv"}, "pictures of your own"),
        (OF_BOTH, "qwen3-vl-4b", {"image_size": 0}, "of 256 to 4,096 pixels a side, and not of 0"),
        (OF_BOTH, "qwen3-vl-4b", {"image_size": 512.0}, "and not of 512.0"),
        (OF_BOTH, "qwen3-vl-4b", {"image_size": 500}, "into 32 x 32 pixels: take 512"),
        (OF_BOTH, "qwen3-vl-4b", {"length": 2**18 + 1}, "reads 262144 tokens at most"),
        (OF_BOTH, "gpt2", {}, "gpt2 is not a model for image text to text"),
        (OF_BOTH, "large", {}, 'has no size "large": name a model, such as qwen3-vl-4b'),
        (OF_SOUND, "whisper-small", {"length": 449}, "reads 448 tokens at most"),
        (OF_SOUND, "whisper-small", {"data": "talks.csv"}, "recordings of your own"),
        (OF_SOUND, "large", {}, 'has no size "large": name a model, such as whisper-small'),
        (OF_SOUND, "vit-large-patch16-224", {}, "is not a model for speech recognition"),
    ],
)
def test_what_cannot_be_asked_of_pictures_and_sound_is_one_sentence(task, size, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        task(size, **options)
    one_sentence(caught)


# ---------------------------------------------------------------------- models and data of ones own
TEXTS = [f"a {word} text about number {n}" for n in range(20) for word in ("short", "plain", "odd")]


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A folder with a checkpoint for each task, with tokenizers, and a table of texts."""
    folder = tmp_path_factory.mktemp("own")
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(TEXTS, 300, special_tokens=["<pad>"], show_progress=False)
    special = {"pad_token": "<pad>", "eos_token": "<pad>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, **special)
    shape = dict(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1)
    shape |= dict(num_attention_heads=2, intermediate_size=64, max_position_embeddings=64)
    models = {
        "bert": transformers.BertModel(transformers.BertConfig(**shape)),
        "headed": transformers.BertForSequenceClassification(
            transformers.BertConfig(num_labels=2, **shape)
        ),
        "llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).bfloat16(),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    labels = ["red", "green", "blue"] * 20
    pd.DataFrame({"text": TEXTS, "label": labels}).to_csv(folder / "texts.csv", index=False)
    return folder


def test_a_local_checkpoint_classifies_a_local_table(own):
    options = {"data": own / "texts.csv", "length": 16}
    workload = text_classification(str(own / "bert"), **options)
    assert workload.masked and workload.config.num_labels == 3
    batch = next(iter(workload.dataloader(4)))
    assert {k: tuple(v.shape) for k, v in batch.items()} == {
        "input_ids": (4, 16),
        "attention_mask": (4, 16),
        "labels": (4,),
    }
    assert (batch["attention_mask"] == 0).any()  # the texts are shorter
    assert set(workload.sample()) == set(batch)
    saved = transformers.BertModel.from_pretrained(own / "bert").embeddings.word_embeddings.weight
    assert torch.equal(workload.model().bert.embeddings.word_embeddings.weight, saved)
    assert len(train(workload, max_steps=3, per_device_train_batch_size=4).losses) == 3


def test_a_head_for_other_classes_is_replaced(own):
    options = {"data": own / "texts.csv", "length": 16}
    workload = text_classification(str(own / "headed"), **options)
    assert workload.model().classifier.out_features == 3


def test_a_local_checkpoint_models_the_language_of_a_local_table(own):
    workload = language_modelling(str(own / "llama"), data=own / "texts.csv", length=16)
    batch = next(iter(workload.dataloader(4)))
    assert tuple(batch["input_ids"].shape) == (4, 16)
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert workload.model().dtype is torch.float32  # although it was saved in 16 bits
    assert len(train(workload, max_steps=3, per_device_train_batch_size=4).losses) == 3


def test_a_table_with_an_odd_name(own, tmp_path):
    path = shutil.copy(own / "texts.csv", tmp_path / "texts [1].CSV")
    workload = text_classification(str(own / "bert"), data=path, length=16)
    assert len(workload.data("train")) == 54


def test_a_decoder_classifies_by_the_last_token_that_is_not_padding(own, tmp_path):
    folder = shutil.copytree(own / "llama", tmp_path / "llama")
    special = {"pad_token": None, "eos_token": "<pad>"}
    transformers.AutoTokenizer.from_pretrained(folder, **special).save_pretrained(folder)
    workload = text_classification(str(folder), data=own / "texts.csv", length=16)
    ends = workload.config.pad_token_id
    batch = next(iter(workload.dataloader(4)))
    assert torch.equal(batch["input_ids"] == ends, batch["attention_mask"] == 0)
    assert train(workload, max_steps=3, per_device_train_batch_size=4).losses


@pytest.mark.parametrize("suffix", ["json", "jsonl", "parquet", "a folder"])
def test_tables_of_other_kinds(suffix, own, tmp_path, monkeypatch):
    table, path = pd.read_csv(own / "texts.csv"), tmp_path / f"texts.{suffix}"
    if suffix == "parquet":
        table.to_parquet(path)
    elif suffix == "a folder":
        path.mkdir()
        table[:30].to_csv(path / "some.csv", index=False)
        table[30:].to_csv(path / "more.csv", index=False)
    else:
        table.to_json(path, orient="records", lines=suffix == "jsonl")
    monkeypatch.setenv("HOME", str(tmp_path))
    for data in (path, f"~/{path.name}"):
        workload = text_classification(str(own / "bert"), data=data, length=16)
        assert workload.config.num_labels == 3 and len(workload.data("train")) == 54


# ------------------------------------------------------------------------------------------- errors
def one_sentence(error):
    text = str(error.value)
    assert "\n" not in text and len(text) < 500, text
    return text


BAD = [
    (lambda: text_classification("tny"), "'tny' is not a known size or model: did you mean 'tiny'"),
    (lambda: text_classification("bert-base-uncase"), "did you mean 'bert-base-uncased'"),
    (lambda: language_modelling("./nowhere"), "./nowhere is not a model folder"),
    (lambda: language_modelling("someone/a-model"), "the hub cannot be reached"),
    (lambda: text_classification("tiny", data="texts.csv"), "tiny"),  # has data of its own
    (lambda: text_classification("large", pretrained=True), 'pretrained=True is for size "tiny"'),
    (lambda: text_classification("bert-base-uncased", length=513), "reads 512 tokens at most"),
    (lambda: text_classification("vit-large-patch16-224"), "vit-large-patch16-224"),
    (lambda: text_classification("tiny", length=-1), "length"),
    (lambda: language_modelling("tiny", length=0), "length"),
]


@pytest.mark.parametrize("make, message", BAD, ids=[message for _, message in BAD])
def test_bad_options_are_one_sentence(make, message, monkeypatch):
    monkeypatch.setattr(models, "online", lambda: False)
    monkeypatch.setattr(own_data, "online", lambda: False)
    with pytest.raises((ValueError, OSError)) as caught:
        make()
    assert message in one_sentence(caught)


def test_data_do_not_go_with_a_tiny_model_that_was_picked(monkeypatch):
    monkeypatch.setattr(workloads, "picked", lambda task: ("tiny", ""))
    with pytest.raises(ValueError, match="has data of its own") as caught:
        text_classification(data="texts.csv")
    one_sentence(caught)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("missing.csv", None, "is neither a file nor a folder on this machine"),
        ("./missing", None, "is neither a file nor a folder on this machine"),
        ("missing/texts", None, "cannot be reached"),
        ("texts.txt", b"a text", "but no 'label'"),
        ("texts.bin", b"\0\1", "texts.bin"),
        ("other.csv", b"body,label\na,1\nb,2\n", "but no 'text'"),
        ("other.csv", b"text,kind\na,1\nb,2\n", "but no 'label'"),
        ("empty.csv", b"", "empty.csv"),
        ("holes.csv", b"text,label\na,1\nb,\nc,2\n", "holes.csv has an empty cell in row 2"),
        ("holes.csv", b"text,label\na,1\n,2\n", "holes.csv has an empty cell in row 2"),
        ("one.csv", b"text,label\na,1\nb,1\n", "one.csv has one class only"),
        ("broken.parquet", b"damaged", "broken.parquet"),
        ("broken.json", b'[{"text": "a", "lab', "broken.json"),
    ],
)
def test_bad_data_are_one_sentence(name, content, message, own, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "online", lambda: False)
    monkeypatch.setattr(own_data, "online", lambda: False)
    monkeypatch.setattr(models, "data_file", partial(data_file, own))
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises((ValueError, OSError)) as caught:
        text_classification(str(own / "bert"), data=name, length=16)
    assert message in one_sentence(caught)
    if content is not None:
        assert (tmp_path / name).read_bytes() == content


def data_file(root, *parts):
    """Stands in for the course's data where the working folder is somewhere else."""
    return root.joinpath(*parts)


def test_too_little_text_is_one_sentence(own, tmp_path):
    pd.DataFrame({"text": ["short"]}).to_csv(tmp_path / "short.csv", index=False)
    with pytest.raises(ValueError) as caught:
        train(language_modelling(str(own / "llama"), data=tmp_path / "short.csv", length=64))
    one_sentence(caught)


def test_a_damaged_checkpoint_of_ones_own_is_not_to_be_deleted(own, tmp_path):
    folder = shutil.copytree(own / "llama", tmp_path / "mine")
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises((ValueError, OSError)) as caught:
        language_modelling(str(folder), length=16).model()
    text = one_sentence(caught)
    assert str(folder) in text and "damaged" in text and "delete" not in text
    (folder / "config.json").write_text("{ damaged")
    with pytest.raises((ValueError, OSError)) as caught:
        language_modelling(str(folder), length=16)
    assert str(folder) in str(caught.value)


def test_workloads_are_frozen_values():
    workload = language_modelling("tiny", length=16)
    with pytest.raises(AttributeError):
        workload.length = 8
    workload.with_model(lambda model: model.resize_token_embeddings(300) and model).model()
    assert workload.config.vocab_size == 257  # what one model was made into is not the next one
    assert workload.model().lm_head.out_features == 257


def test_why_a_table_cannot_be_read_is_said(tmp_path, monkeypatch):
    """`datasets` wraps what went wrong: a file that may not be read is not a damaged one."""

    def refuse(*_, **__):
        try:
            raise PermissionError(13, "Permission denied")
        except PermissionError as error:
            raise RuntimeError("An error occurred while generating the dataset") from error

    (tmp_path / "texts.csv").write_text("text\na\n")
    monkeypatch.setattr(own_data.datasets, "load_dataset", refuse)
    with pytest.raises(ValueError, match="texts.csv cannot be read .* Permission denied") as caught:
        own_data.read_table(str(tmp_path / "texts.csv"), ["text"])
    assert one_sentence(caught)


def test_a_network_that_comes_back_is_seen(monkeypatch):
    asked, minute = [], 60.0
    network = [ConnectionError, None]

    def head(*_, **__):
        asked.append(network[0])
        if network[0]:
            raise network[0]

    monkeypatch.setattr(models.huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(models.huggingface_hub, "get_session", lambda: SimpleNamespace(head=head))
    monkeypatch.setattr(models.time, "monotonic", lambda: minute)
    models._answers.cache_clear()
    assert not models.online() and not models.online() and len(asked) == 1
    network.pop(0)
    minute += models.REMEMBERED
    assert models.online() and models.online() and len(asked) == 2
    models._answers.cache_clear()


def test_samples_of_ones_own_leave_the_evaluation_as_it_was():
    workload = language_modelling("tiny", length=8)
    mine = [workload.sample()] * 16
    trainer = workload.trainer(data=mine)
    assert trainer.train_dataset is mine and len(trainer.eval_dataset) == len(workload.data("test"))
    assert workload.trainer(evaluation=mine).eval_dataset is mine
