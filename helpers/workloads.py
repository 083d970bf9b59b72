"""The workloads that there are: by task, and by the name of a model."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from fake_cuda.units import PICTURES, SPEECH, TEXTS_AND_PICTURES

from .models import find_model, picked, reachable, usual_task
from .own_data import with_data
from .samples import IMAGE_SIZE, beside_texts
from .tasks import refuse, refuse_model
from .tiny import pretrain, random_tokens, standard_library, tiny_config
from .workload import Workload

LARGE = {  # name in data/configs, where the weights are, tokens in a sample
    "text_classification": ("bert-large-uncased", "google-bert/bert-large-uncased", 512),
    "language_modelling": ("tinyllama-1.1b", "TinyLlama/TinyLlama_v1.1", 2048),
}
OFFLINE = "random weights, because the hub cannot be reached: memory and speed are the same"


def text_classification(size: str = "auto", **options) -> Workload:
    """Classify texts.

    Args:
        size: "tiny" asks which package of Python's standard library a function comes from (8
            classes); "large" is the classic experiment, bert-large-uncased on 512 samples of 512
            random tokens; "auto" is one of the two, by this machine's memory. Otherwise a hub id,
            a local folder or a name in `data/configs`.
        options: `length` in tokens; `seed`; `data`, a CSV, JSON or Parquet file, a folder of them
            or a hub id, with the columns `text` and `label`; `pretrained=True` trains the tiny
            model on first use and keeps its weights.

    Raises:
        ValueError: an option, a model or a table that will not do, and what to change.
        OSError: a file, the network or a folder that is not there.
    """
    return workload(size, "text_classification", **options)


def language_modelling(size: str = "auto", **options) -> Workload:
    """Predict the next token.

    Args:
        size: "tiny" is a byte-level Llama on the source of Python's standard library, without a
            tokenizer; "large" is TinyLlama, 1.1 billion parameters, on 512 samples of 2,048 random
            tokens. The rest is as in `text_classification`.
        options: as in `text_classification`; `data` needs only the column `text`.
    """
    return workload(size, "language_modelling", **options)


def image_classification(size: str, **options) -> Workload:
    """Classify pictures with a vision transformer.

    Args:
        size: a hub id, a local folder or a name in `data/configs`, such as vit-large-patch16-224;
            it trains on random pictures, of the one size that it reads.
        options: `seed`.

    Raises:
        ValueError: a model of another kind, or an option for texts.
    """
    return workload(size, PICTURES, **options)


def speech_recognition(size: str, **options) -> Workload:
    """Write down what is said, with a Whisper.

    Args:
        size: as in `image_classification`, such as whisper-small; it trains on random sound of the
            30 seconds that it reads.
        options: `length` of a text in tokens, 448 at most; `seed`.
    """
    return workload(size, SPEECH, **options)


def image_text_to_text(size: str, **options) -> Workload:
    """Answer about pictures, with a Qwen3-VL.

    Args:
        size: as in `image_classification`, such as qwen3-vl-4b; each sample is a random picture
            and a text after it, which alone is to be predicted.
        options: `length` in tokens, the picture's among them; `image_size`, pixels of a side of
            the picture, 512 if none is given; `seed`.
    """
    return workload(size, TEXTS_AND_PICTURES, **options)


def workload(
    size: str,
    task: str | None = None,
    data: str | Path | None = None,
    length: int | None = None,
    pretrained: bool = False,
    seed: int = 0,
    image_size: int | None = None,
) -> Workload:
    """The workload of a task, or of a model's usual one; the rest as in `text_classification`."""
    task = task or usual_task(size)
    note = ""
    if size == "auto" and task in LARGE:
        size, note = picked(task)
    refuse(task, size, data, length, image_size)
    if size != "tiny" and pretrained:
        raise ValueError('pretrained=True is for size "tiny"; other models bring their weights')
    if size == "tiny":
        made = replace(tiny(task, length or 128), note=note, seed=seed)
        return replace(made, weights=pretrain(made)) if pretrained else made
    made = large(task, length) if size == "large" else named(task, size, length, image_size)
    made = made if data is None else with_data(made, str(data))
    return replace(made, note="; ".join(filter(None, (note, made.note))), seed=seed)


def tiny(task: str, length: int) -> Workload:
    """A model that two CPU cores train in seconds, on Python's own source."""
    classify = task == "text_classification"
    read = partial(standard_library, classify, length)
    name, rate = ("tiny BERT", 1e-3) if classify else ("tiny Llama", 3e-3)
    return Workload(name, task, tiny_config(classify, length), length, read, learning_rate=rate)


def large(task: str, length: int | None) -> Workload:
    """The model of the classic experiments, with its weights where the hub can be reached."""
    known, hub_id, usual = LARGE[task]
    made = named(task, known, length, usual=usual)
    if reachable(hub_id):
        return replace(made, weights=hub_id)
    return replace(made, note=OFFLINE)


def named(
    task: str,
    name: str,
    length: int | None,
    image_size: int | None = None,
    usual: int | None = None,
) -> Workload:
    """A model by its name, on random tokens: as many as asked for, or as it usually reads."""
    config, weights, name = find_model(name)
    refuse_model(name, task, config)
    if task == TEXTS_AND_PICTURES:
        image_size = IMAGE_SIZE if image_size is None else image_size
        config.text_config.use_cache = False  # keys and values are cached for generation only
    if task not in LARGE:
        length, read = beside_texts(name, task, config, length, image_size)
        return Workload(name, task, config, length, read, weights, image_size=image_size)
    usual = usual or LARGE[task][2]
    classify = task == "text_classification"
    if classify and getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = 0  # decoders classify by the last token that is not padding
    config.use_cache = False
    most = getattr(config, "max_position_embeddings", None) or 0
    most = most if most > 0 else length or usual  # XLNet's is -1: as long as you like
    length = length or min(usual, most)
    if length > most:
        raise ValueError(f"{name} reads {most} tokens at most")
    read = partial(random_tokens, classify, length, config.vocab_size)
    return Workload(name, task, config, length, read, weights)
