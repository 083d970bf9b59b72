"""How students train the decoder of the assignment: their losses, their AdamW, their loops."""

from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F

from evidence.decoder import WORDS, Decoder, Student
from fake_cuda import Card, Simulation, simulate


def log_softmax(x):
    x = x - torch.max(x, dim=-1, keepdim=True)[0]
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))


def loss_of_the_last_token(logits, targets):
    """logits (batch, length, WORDS), targets (batch,)."""
    # With torch 2.6 `[:, -1, :]` is three views, of which two copy in backward.
    logits = logits.narrow(0, 0, len(logits))[:, -1].narrow(1, 0, WORDS)
    top = torch.max(logits, dim=-1, keepdim=True)[0]
    log = logits - top - torch.log(torch.sum(torch.exp(logits - top), dim=-1, keepdim=True))
    hot = torch.zeros_like(log)
    hot.scatter_(-1, targets.unsqueeze(-1), 1)
    return -torch.sum(hot * log) / len(logits)


def loss_of(logits, targets, kind: str):
    """logits (batch, length, WORDS), targets (batch, length)."""
    if kind == "of torch":
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    if kind == "of the last token":
        return loss_of_the_last_token(logits, targets)
    if kind == "logsumexp":
        logits, targets = logits.flatten(0, 1), targets.flatten()
        logits = logits - logits.amax(dim=-1, keepdim=True)
        total = torch.logsumexp(logits, dim=-1)
        return (total - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)).mean()
    if kind == "flat":
        logits, targets = logits.flatten(0, 1), targets.flatten()
    surprise = -log_softmax(logits)
    return torch.mean(torch.gather(surprise, -1, targets.unsqueeze(-1)))


class AdamW(torch.optim.Optimizer):
    """By hand, one parameter after another.

    `order` says when it shrinks the weights: "decay first", "decay last"; or whose it is: "new
    weights" (niuhuang, with new tensors for all), "in place" (luke396).
    """

    def __init__(self, parameters, order: str):
        super().__init__(parameters, {"order": order})
        if order == "new weights":
            for p in self.param_groups[0]["params"]:
                self.state[p] = {"m": torch.zeros_like(p.data), "v": torch.zeros_like(p.data)}

    def step(self):
        order = self.defaults["order"]
        ways = {"new weights": self.with_new_weights, "in place": self.in_place}
        way = ways.get(order, partial(self.with_new_states, last=order == "decay last"))
        for p in self.param_groups[0]["params"]:
            way(p, self.state[p])

    def with_new_weights(self, p, state):
        gradient = p.grad.data
        new_m = 0.9 * state["m"] + 0.1 * gradient
        state["m"] = new_m
        new_v = 0.99 * state["v"] + 0.01 * gradient**2
        state["v"] = new_v
        p.data = p.data - 0.1 * (new_m / (torch.sqrt(new_v) + 1e-8))
        p.data = p.data - 0.1 * 0.0 * p.data

    def in_place(self, p, state):
        gradient = p.grad
        if not state:
            state["m"], state["v"] = torch.zeros_like(p.data), torch.zeros_like(p.data)
        state["m"].mul_(0.9).add_(gradient, alpha=0.1)
        state["v"].mul_(0.99).addcmul_(gradient, gradient, value=0.01)
        root = state["v"].sqrt().add_(1e-8)
        p.data.add_(p.data, alpha=-0.1)
        p.data.addcdiv_(state["m"], root, value=-0.1)

    def with_new_states(self, p, state, last: bool):
        gradient = p.grad.data
        if not last:
            p.data -= 0.1 * p.data
        old_m = state.get("m", torch.zeros_like(gradient))
        old_v = state.get("v", torch.zeros_like(gradient))
        m = 0.9 * old_m + 0.1 * gradient
        v = 0.99 * old_v + 0.01 * torch.square(gradient)
        p.data -= 0.1 * m / (torch.sqrt(v) + 1e-8)
        if last:
            p.data -= 0.1 * p.data
        state["m"], state["v"] = m, v


def optimizer_of(model: Decoder, student: Student) -> torch.optim.Optimizer:
    if student.adamw == "of torch":
        return torch.optim.AdamW(model.parameters())
    return AdamW(model.parameters(), student.adamw)


def run(student: Student):
    """Build the model and take the student's steps."""
    model = Decoder(student)
    steps = student.stage in ("train", "one step after all passes")
    optimizer = optimizer_of(model, student) if steps else None
    shape = student.batch, student.length
    words, targets = torch.zeros(shape, dtype=torch.long), None
    alone = student.code == "niuhuang"  # whose targets are the last tokens', none for a mere pass
    if not (alone and student.stage == "forward"):
        targets = torch.zeros(shape[:1] if alone else shape, dtype=torch.long)
    autocast = partial(torch.autocast, "cuda", torch.bfloat16, enabled=student.bf16)
    outer = nullcontext
    if alone and student.stage == "train":  # one context around all, backward and optimizer too
        autocast, outer = nullcontext, autocast
    with outer():
        take_steps(student, autocast, model, optimizer, words, targets)
    return model, optimizer


def take_steps(student: Student, autocast, model, optimizer, words, targets) -> None:
    if student.tried:
        with autocast():
            logits = model(words)
    forward = student.stage.startswith("forward")
    for step in range(student.steps):
        with autocast(), student.no_grad() if forward else nullcontext():
            logits = model(words)
            if student.stage != "forward":
                loss = loss_of(logits, targets, student.loss)
        wait(student, loss if student.stage != "forward" else logits)
        if student.gradients == "freed before backward":
            model.zero_grad()
        if not forward:
            loss.backward()
            wait(student, loss)
        if student.stage == "one step after all passes":
            logits = loss = None
        if optimizer and (student.stage == "train" or step == student.steps - 1):
            optimizer.step()
            wait(student, loss)
        if student.gradients == "freed after a step":
            model.zero_grad()
        if not student.holds:
            logits = loss = None


def wait(student: Student, result: torch.Tensor | None) -> None:
    if student.waits:
        result.view(-1)[0].item() if result.dim() else result.item()


def simulated(student: Student, card: Card) -> Simulation:
    return simulate(partial(run, student), card=card)
