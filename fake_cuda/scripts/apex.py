"""The package apex: its fused norms and its fused Adam.

A norm keeps its input and a float32 or two of each row, as torch's do; backward its kernels take
partial sums of 16 rows more, which are left out (apex/normalization/fused_layer_norm.py,
csrc/layer_norm_cuda_kernel.cu). Adam's states are float32 whatever the weights are, and a step
makes nothing (apex/optimizers/fused_adam.py).
"""

import numbers

import torch
import torch.nn.functional as F
from torch import nn

from .words import Stop

VERSION = "0.1"
NOT_KNOWN = "uses apex's {}, whose memory is not known here"


class _Norm(nn.Module):
    """Weights, and a bias where the norm has one, over the last dimensions."""

    biased = False

    def __init__(self, normalized_shape, eps=1e-5, elementwise_affine=True, memory_efficient=False):
        super().__init__()
        if memory_efficient:
            raise Stop(NOT_KNOWN.format(f"{type(self).__name__}(memory_efficient=True)"))
        one = isinstance(normalized_shape, numbers.Integral)
        self.normalized_shape = (int(normalized_shape),) if one else tuple(normalized_shape)
        self.eps, self.elementwise_affine = eps, elementwise_affine
        for name, made in (("weight", torch.ones), ("bias", torch.zeros)):
            there = elementwise_affine and (name == "weight" or self.biased)
            value = nn.Parameter(made(self.normalized_shape)) if there else None
            self.register_parameter(name, value)


class FusedLayerNorm(_Norm):
    biased = True

    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class FusedRMSNorm(_Norm):
    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class FusedAdam(torch.optim.Optimizer):
    """AdamW, or Adam with `adam_w_mode=False`, in one kernel for a list of weights."""

    def __init__(
        self,
        params,
        lr=1e-3,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-8,
        adam_w_mode=True,
        weight_decay=0.0,
        amsgrad=False,
        set_grad_none=True,
        capturable=False,
        master_weights=False,
        **others,
    ):
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant.")
        odd = dict(capturable=capturable, master_weights=master_weights) | others
        if asked := [name for name, value in odd.items() if value]:
            raise Stop(NOT_KNOWN.format(f"FusedAdam({asked[0]}=...)"))
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.fused = torch._fused_adamw_ if adam_w_mode else torch._fused_adam_
        self.steps = torch.zeros(1, device="cuda")  # its place is that of the overflow's flag

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            for p in weights:
                if not self.state[p]:
                    names = ("exp_avg", "exp_avg_sq")
                    self.state[p] |= {name: torch.zeros_like(p).float() for name in names}
            self._update(group, weights)
        return loss

    def _update(self, group: dict, weights: list) -> None:
        if not weights:
            return
        states = [[self.state[p][name] for p in weights] for name in ("exp_avg", "exp_avg_sq")]
        steps = [self.steps] * len(weights)
        beta1, beta2 = group["betas"]
        self.fused(
            weights,
            [p.grad for p in weights],
            *states,
            [],
            steps,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )


NORMS = dict(FusedLayerNorm=FusedLayerNorm, FusedRMSNorm=FusedRMSNorm)
MODULES = {
    "apex": {},
    "apex.normalization": NORMS,
    "apex.normalization.fused_layer_norm": NORMS,
    "apex.optimizers": dict(FusedAdam=FusedAdam),
}
