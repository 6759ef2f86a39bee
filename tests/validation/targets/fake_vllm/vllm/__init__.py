"""Stands in for vLLM where it is not installed: its offline interface over logits that are a function of the text.

What a test wants to happen is in the checkpoint's config.json: `fake` may hold `dies` (generate ends the process),
`hangs` (generate never ends), `refuses` (the engine does not start), `leaves` (forced tokens are ignored), `shows` (an
engine asked for latency_specialized owns a specialised decode), `specialized_off_by` (what that is wrong by).
"""

from __future__ import annotations

import importlib
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

__version__ = "0.0.fake"

BATCH_NOISE = 0.01
"""Logits depend that much on how many requests share a call: another batch rounds otherwise."""


class SamplingParams(SimpleNamespace):
    extra_args: dict[str, Any] | None = None
    ignore_eos = False
    logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()


class Row(np.ndarray):  # type: ignore[type-arg]
    """Logits with the methods of a tensor that a processor uses; importing torch takes seconds."""

    def clone(self) -> Row:
        return self.copy()

    def fill_(self, value: float) -> None:
        self.fill(value)


class LLM:
    def __init__(self, **options: Any) -> None:
        config = json.loads((Path(options["model"]) / "config.json").read_text())
        self._vocab, self._fake, self._seed = config["vocab_size"], config.get("fake", {}), config.get("seed", 0)
        if starts := os.environ.get("FAKE_VLLM_STARTS"):
            with Path(starts).open("a") as file:
                file.write(f"{options['model']} {options['kv_cache_dtype']}\n")
        if self._fake.get("refuses"):
            raise ValueError(self._fake["refuses"])
        self._specialized = (
            bool(self._fake.get("shows")) and options["additional_config"]["decode_backend"] == "latency_specialized"
        )
        self._processors = []
        for name in options["logits_processors"]:
            module, _, attribute = name.partition(":")
            self._processors.append(getattr(importlib.import_module(module), attribute)())
        self.llm_engine = SimpleNamespace(
            vllm_config=SimpleNamespace(
                model_config=SimpleNamespace(get_vocab_size=lambda: self._vocab),
                cache_config=SimpleNamespace(cache_dtype=options["kv_cache_dtype"], mamba_ssm_cache_dtype="float32"),
                additional_config=options["additional_config"],
            )
        )

    def apply_model(self, function: Any) -> list[Any]:
        return [function(SimpleNamespace(specialized_decode=object() if self._specialized else None))]

    def generate(self, prompts: list[dict[str, Any]], params: list[Any], use_tqdm: bool) -> list[Any]:
        if self._fake.get("dies"):
            os._exit(3)
        if self._fake.get("hangs"):
            time.sleep(600)
        return [self._one(p["prompt_token_ids"], param, len(prompts)) for p, param in zip(prompts, params, strict=True)]

    def _one(self, prompt: list[int], params: Any, company: int) -> Any:
        drawn: list[int] = []
        steps = []
        forces = [force for p in self._processors if (force := p.new_req_logits_processor(params))]
        finish = "length"
        while len(drawn) < params.max_tokens:
            raw = self._logits([*prompt, *drawn], company)
            steps.append({token: SimpleNamespace(logprob=float(raw[token])) for token in range(self._vocab)})
            logits = raw
            for force in forces if not self._fake.get("leaves") else ():
                logits = force(drawn, logits)
            drawn.append(int(logits.argmax()))
            if drawn[-1] in params.stop_token_ids:
                finish = "stop"
                break
        output = SimpleNamespace(token_ids=drawn, logprobs=steps if params.logprobs else None, finish_reason=finish)
        return SimpleNamespace(outputs=[output])

    def _logits(self, tokens: list[int], company: int) -> Row:
        def normal(*key: int) -> Any:
            return np.random.default_rng(key).standard_normal(self._vocab, dtype=np.float32)

        wrong = self._fake.get("specialized_off_by", 0.0) if self._specialized else 0.0
        text = tokens[-4:]
        logits = 2 * normal(self._seed, *text) + BATCH_NOISE * normal(company, 7, *text)
        return (logits + np.float32(wrong) * normal(5, *text)).view(Row)
