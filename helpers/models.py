"""Models by their names: in data/configs, a folder on this machine, or the hub."""

import difflib
import json
import re
import time
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import huggingface_hub
from transformers import AutoConfig, PreTrainedConfig

from fake_cuda.units import PICTURES, SPEECH, TEXTS, TEXTS_AND_PICTURES, TOKENS

from .hardware import GIB, data_file, describe, gib, suggest

NAMED_BY_TYPE = {"whisper": SPEECH, "qwen3_vl": TEXTS_AND_PICTURES}  # not by a head's name
# Text models that are published only inside a model that sees and hears, too: their class, and what
# their weights' names begin with there, for `key_mapping` of from_pretrained. AutoModelForCausalLM
# would give all of it; by other names the class would draw its weights at random.
INSIDE = {"gemma4_text": ("Gemma4ForCausalLM", r"^model\.language_model")}
REMEMBERED = 60  # seconds for which an answer of the hub, or none, is taken for the next one's


class Found(NamedTuple):
    """A model's description, where its weights are (None: nowhere) and its name for a reader."""

    config: PreTrainedConfig
    weights: str | Path | None
    name: str


def find_model(name: str) -> Found:
    """A model that is named in one of three ways: in data/configs, a folder, or a hub id.

    Raises:
        FileNotFoundError: a folder without a config.json.
        ValueError: a name that is nearly known, or whose family is.
        ConnectionError: another name, and the hub cannot be reached.
    """
    folder, local = Path(name).expanduser(), data_file("configs", f"{name}.json")
    if local.is_file():
        return Found(AutoConfig.from_pretrained(local), None, name)
    if (folder / "config.json").is_file():
        return Found(AutoConfig.from_pretrained(folder), folder, folder.name)
    if name.startswith((".", "/", "~")) or folder.exists():
        raise FileNotFoundError(f"{name} is not a model folder: it has no config.json")
    known = ["tiny", "large", "auto", *sorted(p.stem for p in data_file("configs").glob("*.json"))]
    if "/" not in name:
        _suggest_model(name, known)
    if not online():
        raise ConnectionError(
            f"{name!r} is not in data/configs and the hub cannot be reached: check the name and "
            f"the network, or choose tiny, large, auto or one of the {len(known) - 3} there"
        )
    return Found(AutoConfig.from_pretrained(name), name, name)


def usual_task(size: str) -> str:
    """The task of a model that is named without one: its head's, or else a classifier's."""
    if size in ("auto", "large", "tiny"):
        return TEXTS
    config = find_model(size).config
    heads = config.architectures or ()
    if config.model_type in NAMED_BY_TYPE:
        return NAMED_BY_TYPE[config.model_type]
    if any("ForImageClassification" in head for head in heads):
        return PICTURES
    decoder = any(head.endswith(("ForCausalLM", "LMHeadModel")) for head in heads)
    return TOKENS if decoder else TEXTS


def picked(task: str) -> tuple[str, str]:
    """The size that this machine's memory has room for, and a note that says so.

    The lessons' largest classic step takes 11.5 GiB (batch 8, lesson 02), a context comes on top;
    the decoder takes 16 bytes a parameter and its activations.
    """
    here, need = describe(), (13 if task == "text_classification" else 24) * GIB
    size = "large" if here.device != "cpu" and here.free > need else "tiny"
    return size, f"picked for {here.device} with {gib(here.free)} free"


def _suggest_model(name: str, known: list[str]) -> None:
    """ValueError for a name that is nearly known, or whose family is."""

    def size(text: str) -> list[str]:
        return re.findall(r"\d+(?:\.\d+)?", text)

    near = difflib.get_close_matches(name.lower(), known, n=1)
    if near and size(near[0]) == size(name.lower()):
        raise ValueError(suggest(name, known, "size or model"))
    first = name.lower().split("-")[0]  # the family is what stands before the size
    letters = re.match(r"[a-z]*", first)[0]
    for family in (first, letters if len(letters) > 2 else first):  # "t5" is no "tinyllama"
        found = [other for other in known[3:] if other.startswith(family)]
        if family and found:
            there = json.loads(data_file("configs", f"{found[0]}.json").read_text("utf-8"))
            hub_id = there["_name_or_path"]
            raise ValueError(
                f"{name!r} is not in data/configs, where there are {', '.join(found)}: choose one "
                f"of these, or write the model's hub id, such as {hub_id}"
            )
    if near:
        raise ValueError(suggest(name, known, "size or model"))


def online() -> bool:
    """Whether the hub answers within three seconds; never asked when HF_HUB_OFFLINE is set.

    An answer counts for a minute, so that a network that comes back is seen.
    """
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return False
    return _answers(int(time.monotonic() // REMEMBERED))


@lru_cache(maxsize=1)
def _answers(minute: int) -> bool:
    try:
        huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=3)
        return True
    except Exception:  # whatever the HTTP library calls it, it means no network
        return False


def reachable(hub_id: str) -> bool:
    """Whether a model's weights are on this machine already, or can be fetched."""
    cached = huggingface_hub.try_to_load_from_cache(hub_id, "model.safetensors")
    return isinstance(cached, str) or online()
