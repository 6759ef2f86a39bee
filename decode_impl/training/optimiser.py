"""Muon for the matrices and AdamW for the rest, free of host synchronisation so that a step fits a CUDA graph."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

from decode_impl.training.model import K3Text

ADAM_ONLY = ("embed_tokens", "lm_head", "conv", "A_log", "dt_bias")


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Replace the singular values of each [N,rows,columns] by about one: a quintic Newton-Schulz iteration in BF16."""
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.float().square().sum((-2, -1), keepdim=True).sqrt() + 1e-7).bfloat16()
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    result: Tensor = (x.mT if tall else x).float()
    return result


class Optimiser:
    """Steps a `K3Text`; `rate` is a device scalar in 0..1 that scales both learning rates."""

    def __init__(self, model: K3Text, matrix_rate: float, other_rate: float, decay: float = 0.05) -> None:
        named = [(name, p) for name, p in model.named_parameters() if not name.startswith("layers.0.attention_mix.")]
        named += [(n, p) for n, p in model.named_parameters() if n == "layers.0.attention_mix.out_norm"]
        self.rate = torch.ones((), device=model.embed_tokens.device)
        self.matrix_rate, self.other_rate, self.decay = matrix_rate, other_rate, decay
        self.all = [p for _, p in named]
        self.others: list[Tensor] = [p for n, p in named if p.ndim == 1 or n.rsplit(".", 1)[-1] in ADAM_ONLY]
        matrices = [p for p in self.all if all(p is not o for o in self.others)]
        self.first = [torch.zeros_like(p) for p in self.others]
        self.second = [torch.zeros_like(p) for p in self.others]
        self.count = torch.zeros((), device=self.rate.device)
        self.momentum = {id(p): torch.zeros_like(p) for p in matrices}
        # Rows of a fused parameter that belong to different projections are orthogonalised apart.
        self.pieces = [(p, start, size) for p in matrices for start, size in _rows(model, p)]

    @torch.no_grad()
    def step(self, clip: float = 1.0) -> Tensor:
        """One update from the gradients in place; returns the gradient norm before clipping."""
        grads = [p.grad for p in self.all if p.grad is not None]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        torch._foreach_mul_(grads, (clip / (norm + 1e-6)).clamp(max=1.0))
        self._adam()
        self._muon()
        return norm

    def _adam(self, betas: tuple[float, float] = (0.9, 0.97)) -> None:
        grads = [p.grad for p in self.others if p.grad is not None]
        self.count += 1
        torch._foreach_lerp_(self.first, grads, 1 - betas[0])
        torch._foreach_mul_(self.second, betas[1])
        torch._foreach_addcmul_(self.second, grads, grads, 1 - betas[1])
        scale = (1 - betas[1] ** self.count).sqrt() / (1 - betas[0] ** self.count)
        root = torch._foreach_sqrt(self.second)
        torch._foreach_add_(root, 1e-8)
        update = list(torch._foreach_div(self.first, root))
        torch._foreach_mul_(update, self.rate * scale * -self.other_rate)
        torch._foreach_add_(self.others, update)

    def _muon(self, beta: float = 0.95) -> None:
        groups: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for p, start, size in self.pieces:
            assert p.grad is not None
            grad, momentum = (
                p.grad[..., start : start + size, :],
                self.momentum[id(p)][..., start : start + size, :],
            )
            momentum.lerp_(grad, 1 - beta)
            groups[tuple(grad.shape)].append((p[..., start : start + size, :], grad.lerp(momentum, beta)))
        for shape, members in groups.items():
            rows, columns = shape[-2:]
            stacked = torch.stack([update for _, update in members]).view(-1, rows, columns)
            updates = orthogonalise(stacked).view(len(members), *shape) * max(1.0, rows / columns) ** 0.5
            rate = self.rate * self.matrix_rate
            for (weight, _), update in zip(members, updates, strict=True):
                weight.mul_(1 - rate * self.decay).sub_(update * rate)


def _rows(model: K3Text, parameter: nn.Parameter) -> list[tuple[int, int]]:
    """Row ranges (start, size) of the projections inside a parameter."""
    rows = parameter.shape[-2]
    sizes = [rows]
    for module in model.modules():
        name = next((n for n, p in module.named_parameters(recurse=False) if p is parameter), None)
        if name == "in_proj":
            q_k_v, gate, *rest = module.sizes  # type: ignore[misc]
            sizes = [q_k_v // 3] * 3 + [gate, *rest]
        elif name == "a_proj":
            sizes = list(module.sizes)  # type: ignore[arg-type]
        elif name in ("gate_up", "w13"):
            sizes = [rows // 2] * 2
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return list(zip(starts, sizes, strict=True))
