"""Text that a script generates: no fake token ever ends it, so it runs to its stated length, or to
the 20 new tokens of transformers where none is stated (`_prepare_generated_length`)."""

import traceback
from collections.abc import Iterator

import torch
from transformers import GenerationMixin
from transformers.generation import StoppingCriteriaList

from .words import Stop, TimeOver, stood

GENERATE, ENDED = GenerationMixin.generate, StoppingCriteriaList.__call__
BEAMS = GenerationMixin._beam_search_has_unfinished_sequences
GUESSING = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")
ASSISTED = "lets another model guess tokens ({}), of which fake tensors accept none or all"
NOT_DONE = "generates text ({}) that was not complete when its seconds were over"
SPECIAL = ("eos_token_id", "pad_token_id")
FULL_LENGTH = (
    "Text was generated to its full stated length, or to transformers' 20 new tokens without one: "
    "on a card an end token may cut it."
)


def changes(run, where) -> Iterator[tuple]:
    """(owner, name, value) of what is replaced in transformers for a `Run`.

    `run.generated` says where the script generates, and a call of `generate` counts as one pass.
    `where.ends` are tokens that end a text or fill it up: afterwards none is among unknown tokens.
    """

    def generate(model, *args, **options):
        run.generated = f"generate in {stood(traceback.extract_stack())}"
        config = options.get("generation_config") or (args[1:2] or [None])[0]
        asked = [options, vars(config) if config else {}, vars(model.generation_config)]
        if any(given.get(name) for given in asked for name in GUESSING):
            raise Stop(ASSISTED.format(run.generated))
        passes, begin = len(run.trace.passes), len(run.trace.work.operations)
        try:
            out = GENERATE(model, *args, **options)
        except TimeOver:  # its memory is the largest at its end
            raise Stop(NOT_DONE.format(run.generated)) from None
        run.trace.passes[passes:] = [begin]
        run.note(FULL_LENGTH)
        for token in (given.get(name) for given in asked for name in SPECIAL):
            where.ends.update(token if isinstance(token, list) else [token])
        return out

    yield GenerationMixin, "generate", generate
    yield StoppingCriteriaList, "__call__", _ended
    yield GenerationMixin, "_beam_search_has_unfinished_sequences", staticmethod(_beams_go_on)


def _ended(criteria, tokens, scores, **options):
    """Whether each text is as long as it may be; the other criteria ask for values."""
    found = ENDED(criteria, tokens, scores, **options)
    over = criteria.max_length is not None and tokens.shape[1] >= criteria.max_length
    return torch.full(found.shape, over, device=tokens.device)


def _beams_go_on(improves, finished, ended, early):
    """As theirs, but only the length ends beams: scores and end tokens are not known."""
    BEAMS(improves, finished, ended, early)
    return ~torch.all(ended)
