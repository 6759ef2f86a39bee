"""vLLM's offline engine in a process of its own: reads commands as JSON lines, writes replies as JSON lines.

    PYTHON -m validation.targets.vllm_worker REPLY_FD

It runs under the Python that has vLLM, needs nothing else of decodegate, and ends when its standard input does.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import numpy as np

FORCED = "decodegate_forced"
PREPARE = "decodegate_prepare"
"""Among an engine's arguments: `module:function`, which gets all others before vLLM is imported and returns them as
they are to be used."""
ENVIRONMENT = {
    # One process: what the engine built can be looked at, and a call's requests start together.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
MOST_DENSE = 8192
"""Largest vocabulary of which answers get an entropy for every token: it needs all log-probabilities of each."""


class Engine:
    """One vLLM engine, and what it is asked. `replay` says whether this vLLM replays traces by itself."""

    def __init__(self, options: dict[str, Any]) -> None:
        prepare = options.pop(PREPARE, None)
        if prepare:
            module, _, function = prepare.partition(":")
            options = getattr(importlib.import_module(module), function)(options)
        from vllm import LLM

        self.replay = bool(options.get("enable_trace_replay"))
        if not self.replay:
            options["logits_processors"] = ["validation.targets.vllm_forcing:Forced"]
        self.llm = LLM(**options)

    def about(self) -> dict[str, Any]:
        """Versions, what the engine was configured to, and what the built model shows of its decode path."""
        import vllm

        # vLLM has imported it.
        torch = sys.modules.get("torch")
        config = self.llm.llm_engine.vllm_config
        self.vocab = int(config.model_config.get_vocab_size())
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__ if torch else "-",
            "device": torch.cuda.get_device_name() if torch and torch.cuda.is_available() else "cpu",
            "vocab": self.vocab,
            "kv_cache_dtype": str(config.cache_config.cache_dtype),
            "mamba_ssm_cache_dtype": str(getattr(config.cache_config, "mamba_ssm_cache_dtype", "none")),
            "additional_config": {k: str(v) for k, v in dict(config.additional_config or {}).items()},
            "forcing": "trace replay" if self.replay else "logits processor",
            "specialized": all(self.llm.apply_model(_specialized)),
        }

    def forced(self, sequences: list[list[int]], prompt_length: int, file: str) -> dict[str, Any]:
        """Teacher-forced decode; writes raw logits f32 [steps, sequences, V], steps being the decode steps alone."""
        prompts = [tokens[:prompt_length] for tokens in sequences]
        # The first token comes from the prefill, the last decode step's own token is of no interest.
        wanted = [[*tokens[prompt_length:], 0] for tokens in sequences]
        results = self._generate(prompts, [self._forcing(tokens) for tokens in wanted])
        for tokens, result in zip(wanted, results, strict=True):
            followed = list(result.outputs[0].token_ids)
            if followed != tokens:
                raise ValueError(f"the engine left the given tokens: {followed[:8]} for {tokens[:8]}")
        rows = [dense(result.outputs[0].logprobs, self.vocab)[1:] for result in results]
        np.save(file, np.stack(rows, axis=1))
        return {"steps": len(wanted[0]) - 1}

    def answer(self, asks: list[dict[str, Any]]) -> dict[str, Any]:
        """Continue prompts; tokens, how each ended, and the entropy of every token where the vocabulary is small."""
        from vllm import SamplingParams

        logprobs = -1 if self.vocab <= MOST_DENSE else None
        params = [
            SamplingParams(
                temperature=ask["temperature"],
                top_p=ask["top_p"],
                seed=ask["seed"],
                max_tokens=ask["max_tokens"],
                stop_token_ids=ask["stop_tokens"],
                logprobs=logprobs,
                detokenize=False,
            )
            for ask in asks
        ]
        outputs = [result.outputs[0] for result in self._generate([ask["prompt"] for ask in asks], params)]
        return {
            "answers": [
                {
                    "tokens": list(output.token_ids),
                    "finish": str(output.finish_reason),
                    "entropies": entropies(output.logprobs, self.vocab) if logprobs else [],
                }
                for output in outputs
            ]
        }

    def _forcing(self, tokens: list[int]) -> Any:
        from vllm import SamplingParams

        how: dict[str, Any] = {"trace_decode_token_ids": tokens} if self.replay else {"extra_args": {FORCED: tokens}}
        common = {"temperature": 0.0, "max_tokens": len(tokens), "ignore_eos": True, "logprobs": -1}
        return SamplingParams(**common, detokenize=False, **how)

    def _generate(self, prompts: list[list[int]], params: list[Any]) -> list[Any]:
        # Full log-probabilities are a million small objects, which the cycle collector would visit again and again.
        gc.disable()
        try:
            asked = [{"prompt_token_ids": prompt} for prompt in prompts]
            return list(self.llm.generate(asked, params, use_tqdm=False))
        finally:
            gc.enable()


def dense(steps: Sequence[Any], vocab: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """vLLM's `{token: Logprob}` of every step as f32 [steps, vocab].

    Raises:
        ValueError: a step does not cover the vocabulary.
    """
    rows = np.full((len(steps), vocab), np.nan, dtype=np.float32)
    for row, step in zip(rows, steps, strict=True):
        ids = np.fromiter(step, dtype=np.int64, count=len(step))
        if len(ids) != vocab:
            raise ValueError(f"a step tells {len(ids)} logits, all {vocab} are needed (max_logprobs=-1)")
        row[ids] = np.fromiter((entry.logprob for entry in step.values()), dtype=np.float32, count=len(step))
    return rows


def entropies(steps: Sequence[Any], vocab: int) -> list[float]:
    """Entropy in nats of every step's distribution at temperature 1, from raw logits."""
    logits = dense(steps, vocab).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return [float(value) for value in -(np.exp(logs) * logs).sum(axis=1)]


def _specialized(model: Any) -> bool:
    """Whether the built model decodes by its specialised path: the executor that vLLM's K3 model then owns."""
    return getattr(model, "specialized_decode", None) is not None


def main() -> None:
    """Answer commands until standard input ends. A command that fails is answered with its error."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    engine: Engine | None = None
    with os.fdopen(int(sys.argv[1]), "w") as replies:
        for line in sys.stdin:
            command = json.loads(line)
            name = command.pop("command")
            try:
                if name == "start":
                    engine = Engine(command["engine"])
                    reply = engine.about()
                else:
                    reply = getattr(engine, name)(**command)
            except Exception as error:
                traceback.print_exc()
                reply = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
