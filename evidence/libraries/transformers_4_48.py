"""What transformers did until 4.48 and later (2024 on) with memory otherwise than today."""

from contextlib import AbstractContextManager
from unittest import mock

from torch.nn import functional
from transformers import GraniteForCausalLM, PreTrainedModel
from transformers.loss import loss_utils
from transformers.modeling_outputs import CausalLMOutputWithPast

from evidence.libraries.behaviour import Behaviour


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


_enable_checkpointing = PreTrainedModel._activation_checkpointing_enable


def _reentrant(self, activation_checkpointing_kwargs=None, *args, **options):
    """Reentrant unless told otherwise (`gradient_checkpointing_enable` in modeling_utils.py: True
    in 4.57.0, False in 5.0.0)."""
    told = activation_checkpointing_kwargs or {"use_reentrant": True}
    return _enable_checkpointing(self, told, *args, **options)


def _logits_shifted() -> AbstractContextManager:
    return mock.patch.dict(loss_utils.LOSS_MAPPING, ForCausalLM=_causal_loss)


def _granites_own_loss() -> AbstractContextManager:
    return mock.patch.object(GraniteForCausalLM, "forward", _granite)


def _checkpoints_reentrant() -> AbstractContextManager:
    return mock.patch.object(PreTrainedModel, "_activation_checkpointing_enable", _reentrant)


BEHAVIOURS = (
    # loss/loss_utils.py shifts the logits in 4.48.1 and the labels in 4.49.0.
    Behaviour("logits shifted by a copy", "4.49", _logits_shifted),
    # modeling_granite.py has its own in 4.47.0 and that of all models in 4.48.0.
    Behaviour("Granite's own loss", "4.48", _granites_own_loss),
    Behaviour("checkpoints are reentrant", "5.0", _checkpoints_reentrant),
)
