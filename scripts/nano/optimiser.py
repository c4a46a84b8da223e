"""Muon for the matrices inside layers, Adam for everything else, both free of host synchronisation.

The learning rate is a tensor on the device, so that a captured CUDA graph can follow a schedule.
"""

from __future__ import annotations

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(update: Tensor, steps: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrices of a stack [n, rows, columns], by Newton-Schulz iterations."""
    a, b, c = NEWTON_SCHULZ
    x = update.to(torch.bfloat16) if update.is_cuda else update
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()


def is_muon(name: str, parameter: Tensor) -> bool:
    """Matrices of the layers; vectors, taps, the router, pseudo-queries, embedding and head go to Adam."""
    inside = name.startswith("model.layers.") and not name.endswith(
        ("gate.weight", "conv1d.weight", "_res_proj.weight")
    )
    return inside and parameter.ndim >= 2 and min(parameter.shape[-2:]) > 8


class Optimiser:
    """One step over all parameters from their gradients."""

    def __init__(self, params: dict[str, Tensor], *, muon: float, adam: float, decay: float) -> None:
        matrices = {name for name, p in params.items() if p.requires_grad and muon and is_muon(name, p)}
        self.rate = torch.ones((), device=next(iter(params.values())).device)  # share of the peak rates
        self.peak_muon, self.decay = muon, decay
        self.trained = [p for p in params.values() if p.requires_grad]
        self.matrices: dict[tuple[int, int], list[Tensor]] = {}
        for name, p in params.items():
            if name in matrices:
                self.matrices.setdefault((p.shape[-2], p.shape[-1]), []).append(p)
        self.momentum = {
            shape: torch.zeros(
                sum(p.numel() for p in group) // (shape[0] * shape[1]), *shape, device=self.rate.device
            )
            for shape, group in self.matrices.items()
        }
        self.rest = [p for name, p in params.items() if p.requires_grad and name not in matrices]
        self.peak_adam = adam
        self.first = [torch.zeros_like(p) for p in self.rest]
        self.second = [torch.zeros_like(p) for p in self.rest]
        self.count = torch.zeros((), device=self.rate.device)

    @torch.no_grad()
    def step(self, loss: Tensor) -> None:
        """Differentiate the loss and move every parameter."""
        with torch.enable_grad():
            grads = torch.autograd.grad(
                loss, self.trained, materialize_grads=True
            )  # layer 0 has an idle mixing site
        by_parameter = dict(zip(self.trained, grads, strict=True))
        self._muon(by_parameter)
        self._adam([by_parameter[p] for p in self.rest])

    def _muon(self, grads: dict[Tensor, Tensor]) -> None:
        keep = 1 - self.rate * self.peak_muon * self.decay
        for shape, group in self.matrices.items():
            grad = torch.cat([grads[p].reshape(-1, *shape) for p in group])
            momentum = self.momentum[shape]
            momentum.lerp_(grad, 0.05)
            update = orthogonalise(torch.lerp(grad, momentum, 0.95))
            update *= self.rate * (-self.peak_muon * 0.2 * max(shape) ** 0.5)
            torch._foreach_mul_(group, keep)
            parts = update.split([p.numel() // (shape[0] * shape[1]) for p in group])
            torch._foreach_add_(group, [part.view_as(p) for part, p in zip(parts, group, strict=True)])

    def _adam(self, grads: list[Tensor], beta1: float = 0.9, beta2: float = 0.95, eps: float = 1e-8) -> None:
        self.count += 1
        norm = torch.stack(torch._foreach_norm(grads)).norm()
        grads = list(torch._foreach_mul(grads, torch.clamp(1 / (norm + 1e-6), max=1.0)))
        torch._foreach_lerp_(self.first, grads, 1 - beta1)
        torch._foreach_mul_(self.second, beta2)
        torch._foreach_addcmul_(self.second, grads, grads, 1 - beta2)
        bias1, bias2 = 1 - beta1**self.count, 1 - beta2**self.count
        roots = torch._foreach_sqrt(self.second)
        torch._foreach_mul_(roots, 1 / bias2.sqrt())
        torch._foreach_add_(roots, eps)
        steps = torch._foreach_div(self.first, roots)
        torch._foreach_mul_(steps, -self.rate * self.peak_adam / bias1)
        torch._foreach_add_(self.rest, steps)
