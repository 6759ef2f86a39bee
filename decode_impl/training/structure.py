"""How structured k3-mini's KDA is on a real text: decay, key correlation and state rank, by layer.

python -m decode_impl.training.structure STATE TEXT_FILE
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decode_impl.presets import K3_MINI
from decode_impl.training.model import KDA, K3Text, Precision
from decode_impl.training.state import load_state


def final_state(k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """The state f32 [h, v, k] after all tokens of one sequence, token by token; inputs [T,h,d] and [T,h]."""
    state = k.new_zeros(k.shape[1], v.shape[2], k.shape[2])
    for k_t, v_t, l_t, beta_t in zip(k, v, log_decay, beta, strict=True):
        state = state * l_t.exp().unsqueeze(1)
        u = (v_t - (state @ k_t.unsqueeze(-1)).squeeze(-1)) * beta_t.unsqueeze(-1)
        state = state + u.unsqueeze(-1) * k_t.unsqueeze(1)
    return state


def effective_rank(states: Tensor) -> Tensor:
    """exp of the entropy of the squared singular values, per matrix: the number of directions in real use."""
    energy = torch.linalg.svdvals(states).square()
    share = energy / energy.sum(-1, keepdim=True)
    rank: Tensor = torch.special.entr(share).sum(-1).exp()
    return rank


@torch.no_grad()
def structure(module: K3Text, tokens: Tensor) -> dict[int, dict[str, list[float]]]:
    """By KDA layer, for one sequence i64 [1,T]: quantiles (5, 50, 95 %) of the decay factor and of |k_s . k_t| over
    pairs of tokens in a head, and the smallest and largest effective rank of its final states."""
    seen: dict[int, Tensor] = {}
    for index, layer in enumerate(module.layers):
        attention: Any = layer.self_attn
        if isinstance(attention, KDA):
            attention.register_forward_pre_hook(lambda _, inputs, i=index: seen.update({i: inputs[0]}))
    precision = Precision(torch.float32)
    module(tokens, precision)
    quantiles = torch.tensor([0.05, 0.5, 0.95])
    result = {}
    for index, x in seen.items():
        attention = module.layers[index].self_attn
        (_, k, v, log_decay, beta), _ = attention.delta_inputs(x[:, : tokens.shape[1]], precision)
        products = torch.einsum("thd,shd->hts", k[0], k[0]).abs()
        pairs = products[:, *torch.triu_indices(len(k[0]), len(k[0]), 1)]
        ranks = effective_rank(final_state(k[0], v[0], log_decay[0], beta[0]))
        result[index] = {
            "decay": _quantiles(log_decay.exp(), quantiles),
            "key correlation": _quantiles(pairs, quantiles),
            "rank": [float(ranks.min()), float(ranks.max())],
        }
    return result


def _quantiles(values: Tensor, at: Tensor) -> list[float]:
    ordered = values.flatten().sort().values
    return [float(ordered[int(q * (len(ordered) - 1))]) for q in at]


def main() -> None:
    """Print the table of the model card."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("state", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=1024)
    arguments = parser.parse_args()
    module = K3Text(K3_MINI)
    load_state(module, arguments.state)
    data = list(arguments.text.read_bytes()[: arguments.tokens - 1])
    tokens = torch.tensor([[module.config.bos_token_id, *data]])
    for index, row in structure(module.eval(), tokens).items():
        cells = (" / ".join(f"{value:.3g}" for value in values) for values in row.values())
        print(f"| {index} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
