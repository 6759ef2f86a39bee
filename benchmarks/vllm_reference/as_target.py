"""k3-mini made fit for vLLM 0.33 on a Hopper GPU, for the target `vllm` of decodegate's gates.

`target.options.prepare = "benchmarks.vllm_reference.as_target:prepare"` in a profile, see `against_builtin.toml`:

    decodegate run --profile benchmarks/vllm_reference/against_builtin.toml --model MODEL
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.vllm_reference import convert, engine


def prepare(options: dict[str, Any]) -> dict[str, Any]:
    """Engine arguments with the checkpoint converted as `OUT/main` of `run_vllm` has it; see this folder's README."""
    engine.prepare()
    model = Path(options["model"])
    folder = Path(tempfile.mkdtemp(prefix="k3-for-vllm-"))
    convert.convert(model, folder, experts="experts" in os.environ.get("K3_CONVERT", ""), mla=True)
    shipped = json.loads((model / "config.json").read_text(encoding="utf-8"))
    loaded = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    sizes = (loaded["qk_nope_head_dim"], loaded["qk_rope_head_dim"], loaded["kv_lora_rank"])
    if engine.epilogue_refusal(*sizes):
        engine.use_copies_as_epilogues()
    engine.use_softmax_scale(convert.softmax_scale(shipped))
    return {**options, "model": str(folder)}
