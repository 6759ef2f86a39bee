"""Hooks that keep what enters and leaves vLLM's modules while it decodes one sequence (eager mode, one request)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Probe:
    """Recorded tensors by name, one per step; `close` takes the hooks off.

    Per layer i: `delta`, `prefix`, `blocks` (the residual at its entry), `attn_in`, `attn_out`, `mlp_in`, `mlp_out`;
    KDA: `proj`, MLA: `mla_q_c`, `mla_q`; both: `heads` (what enters the output projection); MoE: `router`, `latent_in`,
    `latent_sum`, `shared`. Behind the layers: `final_mix`, `head_in`, `logits`.
    """

    def __init__(self, model: Any) -> None:
        self._kept: dict[str, list[Tensor]] = defaultdict(list)
        self._handles: list[Any] = []
        for index, layer in enumerate(model.model.layers):
            self._watch_layer(f"layers.{index}.", layer)
        self._before(model.model.norm, "final_mix")
        self._before(model.logits_processor, "head_in", position=1)
        self._after(model.logits_processor, "logits")

    def _watch_layer(self, name: str, layer: Any) -> None:
        self._residual(layer, name)
        self._before(layer.self_attn, f"{name}attn_in", "hidden_states")
        self._after(layer.self_attn, f"{name}attn_out")
        self._before(layer.self_attn.o_proj, f"{name}heads")
        for attribute, kept in {"in_proj_qkvgfab": "proj", "q_b_proj": "mla_q"}.items():
            if isinstance(getattr(layer.self_attn, attribute, None), nn.Module):
                self._after(getattr(layer.self_attn, attribute), name + kept)
        if isinstance(getattr(layer.self_attn, "q_b_proj", None), nn.Module):
            self._before(layer.self_attn.q_b_proj, f"{name}mla_q_c")
        self._before(layer.mlp, f"{name}mlp_in")
        self._after(layer.mlp, f"{name}mlp_out")
        after = {"gate": "router", "routed_expert_down_proj": "latent_in", "shared_experts": "shared"}
        for attribute, kept in after.items():
            if isinstance(getattr(layer.mlp, attribute, None), nn.Module):
                self._after(getattr(layer.mlp, attribute), name + kept)
        if isinstance(getattr(layer.mlp, "routed_expert_norm", None), nn.Module):
            self._before(layer.mlp.routed_expert_norm, f"{name}latent_sum")

    def _keep(self, name: str, value: Any) -> None:
        value = value[0] if isinstance(value, tuple) else value
        if isinstance(value, Tensor):
            self._kept[name].append(value.detach().clone())

    def _before(self, module: nn.Module, name: str, keyword: str = "", position: int = 0) -> None:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._keep(name, kwargs[keyword] if keyword in kwargs else args[position] if len(args) > position else None)

        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _after(self, module: nn.Module, name: str) -> None:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._keep(name, output)

        self._handles.append(module.register_forward_hook(hook))

    def _residual(self, layer: nn.Module, name: str) -> None:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for keyword, kept in {"hidden_states": "delta", "prefix_sum": "prefix", "residual": "blocks"}.items():
                self._keep(name + kept, kwargs.get(keyword))

        self._handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))

    def tensors(self, rows: int) -> dict[str, Tensor]:
        """Everything kept, steps joined and cut to the sequence's first `rows` rows, on the CPU.

        Raises:
            ValueError: something was seen in fewer rows.
        """
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        joined = {name: torch.cat([step.cpu() for step in steps]) for name, steps in self._kept.items()}
        # Logits are computed for the last row of a step only, so the prefill gives one row of them.
        last_rows_only = {"head_in", "logits", "final_mix"}
        short = {n: t.shape[0] for n, t in joined.items() if t.shape[0] < rows and n not in last_rows_only}
        if short:
            raise ValueError(f"the probe saw too few rows: {short}, {rows} are needed")
        return {name: (t if name in last_rows_only else t[:rows]).contiguous() for name, t in joined.items()}

    def close(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()


def probed(llm: Any, decode: Callable[[Sequence[Sequence[int]]], Tensor], sequence: Sequence[int]) -> dict[str, Tensor]:
    """Decode one sequence alone with the probe on; its rows are the tokens at positions 0 .. length-2."""
    probes: list[Probe] = []
    llm.apply_model(lambda model: probes.append(Probe(model)))
    try:
        decode([sequence])
        return probes[0].tensors(len(sequence) - 1)
    finally:
        probes[0].close()
