"""What transformers 4.45 to 4.48 (2024) did with memory otherwise than today, switched on.

Fine-tuning runs of those years were measured with them. Each behaviour stands in that version's
source, named beside it, and has no number to tune. Used by the tests and by the recorded
comparisons with real cards, never by the helpers.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from torch.nn import functional
from transformers import GraniteForCausalLM
from transformers.loss import loss_utils
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_outputs import CausalLMOutputWithPast

BEHAVIOURS = ("logits shifted by a copy", "flash attention without a mask", "Granite's own loss")
# Reentrant unless told otherwise (`gradient_checkpointing_enable` in modeling_utils.py of
# transformers 4.48.1), which today's is not.
CHECKPOINTED = {
    "activation_checkpointing": True,
    "activation_checkpointing_kwargs": {"use_reentrant": True},
}


def _shifted(logits, labels):
    """Logits without the last token of each text, labels without the first: copies of both, unless
    there is one text only, which `contiguous` leaves where it is."""
    logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
    return logits.view(-1, logits.shape[-1]), labels.view(-1)


def _causal_loss(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, **_):
    """Logits in 32 bits, and a copy of them that ends one token earlier (`ForCausalLMLoss` in
    loss/loss_utils.py of transformers 4.48.1). Today the labels are shifted instead."""
    logits = logits.float()
    moved, targets = _shifted(logits, labels)  # `logits` stands until the loss is there
    return loss_utils.fixed_cross_entropy(moved, targets, num_items_in_batch, ignore_index)


def _granite(self, input_ids=None, labels=None, num_items_in_batch=None, **options):
    """Granite computed its loss by itself and returned its logits in 32 bits
    (`GraniteForCausalLM.forward` in modeling_granite.py of transformers 4.45.2)."""
    outputs = self.model(input_ids=input_ids, **options)
    logits = self.lm_head(outputs[0])
    logits = logits / self.config.logits_scaling
    logits = logits.float()
    moved, targets = _shifted(logits, labels)
    return CausalLMOutputWithPast(loss=functional.cross_entropy(moved, targets), logits=logits)


def _no_mask(*_, **__):
    """flash-attn gets no mask for texts without padding, and a window as wide as the text is none
    (`_update_causal_mask` in modeling_mistral.py, `_flash_attention_forward` in
    modeling_flash_attention_utils.py of transformers 4.48.1). torch's flash kernel stands in."""


@contextmanager
def behaving(behaviours: tuple[str, ...] = BEHAVIOURS) -> Iterator[None]:
    """Switch behaviours of 2024 on for a block."""
    with ExitStack() as stack:
        if "logits shifted by a copy" in behaviours:
            losses = mock.patch.dict(loss_utils.LOSS_MAPPING, ForCausalLM=_causal_loss)
            stack.enter_context(losses)
        if "flash attention without a mask" in behaviours:
            masks = AttentionMaskInterface._global_mapping
            stack.enter_context(mock.patch.dict(masks, sdpa=_no_mask))
        if "Granite's own loss" in behaviours:
            stack.enter_context(mock.patch.object(GraniteForCausalLM, "forward", _granite))
        yield
