"""Lesson 23: a step on answers, and a step on preferences, with and without a second model."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model

from helpers import language_modelling, predict

ASKED = (("qwen3-0.6b", "T4"), ("llama-3.1-8b", "A100-80GB"))  # bf16 also stands for a T4's fp16
LENGTH = 512  # tokens of a chat


def adapted(model: torch.nn.Module) -> torch.nn.Module:
    """LoRA beside every linear layer of a model in 16 bits, as in the planner's recipe."""
    options = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return get_peft_model(model.bfloat16(), LoraConfig(r=16, lora_alpha=32, **options))


def log_p(model: torch.nn.Module, batch: dict) -> torch.Tensor:
    """The log-probability of each answer, a sum over its tokens: [chats]."""
    logits = model(**{key: batch[key] for key in ("input_ids", "attention_mask")}).logits[:, :-1]
    targets = batch["labels"][:, 1:]
    lost = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return -lost.view(targets.shape).sum(1)  # a label of -100 loses nothing


def by_preference(policy: torch.nn.Module, reference: Callable, batch: dict) -> torch.Tensor:
    """DPO's loss, beta 0.1; the first half of the batch is preferred to the second."""
    with torch.no_grad():
        before = reference(batch)
    better, worse = (log_p(policy, batch) - before).chunk(2)
    return -F.logsigmoid(0.1 * (better - worse)).mean()


def step(name: str, way: str) -> None:
    """Two steps on two chats, or on a pair of them."""
    workload = language_modelling(name, length=LENGTH)
    policy = adapted(workload.model(pretrained=False))
    batch = workload.collate([workload.sample()] * 2)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    if way == "a second model":
        second = workload.model(pretrained=False).bfloat16().eval()

    def reference(batch: dict) -> torch.Tensor:
        if way == "a second model":
            return log_p(second, batch)
        with policy.disable_adapter():
            return log_p(policy, batch)

    learning = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=5e-4, weight_decay=0.0, fused=True)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            answers = way == "answers"
            loss = policy(**batch).loss if answers else by_preference(policy, reference, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def preferences() -> Iterator[tuple]:
    for name, card in ASKED:
        for way in ("answers", "adapters off", "a second model"):
            yield name, way, lambda n=name, w=way, c=card: predict(lambda: step(n, w), gpu=c)


SETS = (preferences,)
