"""Score the embedded k3-mini on eval items through the project's own engine; the figures of its model card.

python benchmarks/score_k3_mini.py --set aime --count 100 [--kv fp8] [--temperature 1] [--drafts 7]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from decode_impl.checkpoint import load_checkpoint
from decode_impl.deployment import Deployment
from decode_impl.drafter.checkpoint import load_drafter
from decode_impl.embedded import EMBEDDED_DRAFTER, EMBEDDED_MODEL
from decode_impl.engine import Engine
from decode_impl.runner import ModelRunner
from decode_impl.sampling import SamplingParams
from decode_impl.weights import shard_weights
from evals.items import aime, chain, gpqa, mrcr
from evals.items.base import Item, Message
from evals.items.shards import EOS, chat_tokens

Scored = tuple[list[Message], Item, Callable[[str], float]]


def scored(name: str, index: int) -> Scored:
    """Item `index` of a set with its chat and its scorer; sets are aime, gpqa, mrcr-NEEDLES-CHARS, chain-TOKENS."""
    kind, *sizes = name.split("-")
    if kind == "aime":
        item = aime.item("eval", index)
        return aime.messages(item.row), item, lambda text: float(aime.correct(text, item.row))
    if kind == "gpqa":
        item = gpqa.item("eval", index)
        return gpqa.messages(item.row, 0), item, lambda text: float(gpqa.correct(text, item.row, 0))
    if kind == "mrcr":
        item = mrcr.item("eval", index, int(sizes[0]), int(sizes[1]), marked=len(sizes) < 3)
        return mrcr.messages(item.row), item, lambda text: mrcr.score(text, item.row)
    item = chain.item("eval", index, int(sizes[0]) // chain.TOKENS_PER_STEP)
    return chain.messages(item.row), item, lambda text: float(chain.correct(text, item.row))


def main() -> None:
    """Generate and score."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", required=True, help="aime, gpqa, mrcr-NEEDLES-CHARS[-unmarked] or chain-TOKENS")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--kv", default="bf16")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--drafts", type=int, default=0, help="tokens drafted per step by the embedded drafter")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", type=Path, default=EMBEDDED_MODEL)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    begun = time.time()
    checkpoint = load_checkpoint(arguments.model)
    weights = shard_weights(checkpoint.config, checkpoint.tensors)
    loaded = time.time()
    items = [scored(arguments.set, index) for index in range(arguments.count)]
    prompts = [[int(t) & 511 for part in chat_tokens(chat, 0) for t in part] for chat, _, _ in items]
    limits = [len(item.target.encode()) + 40 for _, item, _ in items]
    context = max(len(p) + limit for p, limit in zip(prompts, limits, strict=True))
    deployment = Deployment(
        decode_backend=arguments.backend,
        kv_cache_dtype=arguments.kv,
        max_batch=arguments.batch,
        max_context=context,
        drafts=arguments.drafts,
    )
    drafter = load_drafter(EMBEDDED_DRAFTER) if arguments.drafts else None
    engine = Engine(ModelRunner(weights, deployment, drafter=drafter))
    for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        sampling = SamplingParams(arguments.temperature, arguments.top_p, seed=index)
        engine.add(str(index), prompt, limit, sampling, stop_tokens=[EOS])
    started = time.time()
    engine.run()
    took = time.time() - started
    scores, exact, tokens = [], 0, 0
    for index, (_, item, score) in enumerate(items):
        output = [t for t in engine.request(str(index)).output if t != EOS]
        text = bytes(t for t in output if t < 256).decode(errors="replace")
        scores.append(score(text))
        exact += text == item.target
        tokens += len(output)
    result: dict[str, Any] = {"set": arguments.set, "items": len(items), "kv": arguments.kv}
    result |= {"temperature": arguments.temperature, "score": sum(scores) / len(scores), "exact": exact / len(items)}
    result |= {"tokens": tokens, "seconds": round(took, 1), "load_seconds": round(loaded - begun, 2)}
    result |= {"steps": dict(engine.runner.steps)}
    if arguments.drafts:
        result |= {"acceptance_length": round(engine.speculator.acceptance.length, 3)}
        result |= {"accepted_by_position": [round(share, 3) for share in engine.speculator.acceptance.by_position()]}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
