"""Settings of a `Trainer` that its library swallows: what is not named as it reads it, it drops."""

import difflib
import inspect
import re
from collections.abc import Iterator

import transformers.trainer
import transformers.training_args

from .words import Stop

# How transformers asks for a key: by get or setdefault, in brackets, or with `in`.
ASKS = re.compile(
    r'fsdp_config(?:\.get\(|\.setdefault\(|\[)\s*"(\w+)"|"(\w+)" in self\.fsdp_config'
)
SWALLOWED = "gives fsdp_config the key {!r}, which transformers never reads: {}"


def known_keys() -> set[str]:
    """The keys of fsdp_config that transformers reads anywhere, of either version of FSDP."""
    modules = transformers.training_args, transformers.trainer
    found = (match for m in modules for match in ASKS.findall(inspect.getsource(m)))
    return {key for match in found for key in match if key}


def misspelt() -> Iterator[tuple]:
    """(owner, name, value): TrainingArguments, which looks at its fsdp_config before it is used."""
    begin = transformers.TrainingArguments.__post_init__

    def begun(self):
        begin(self)  # which reads the file that a text names
        known = sorted(known_keys())
        for key in self.fsdp_config if isinstance(self.fsdp_config, dict) else ():
            name = key.removeprefix("fsdp_")  # as transformers does
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                means = f"did you mean {near[0]!r}?" if near else f"it reads {', '.join(known)}"
                raise Stop(SWALLOWED.format(key, means))

    yield transformers.TrainingArguments, "__post_init__", begun
