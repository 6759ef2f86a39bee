"""Checkpoints are read whole or refused in one line, and a save that is cut short destroys nothing."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import SMALL
from torch import Tensor

from decode_impl import checkpoint
from decode_impl.checkpoint import CheckpointError, expected_tensors, load_checkpoint, save_checkpoint
from decode_impl.mxfp4 import MXFP4Weight
from decode_impl.random_weights import random_checkpoint
from numerics.formats import mxfp4_quantise

CONFIG = replace(SMALL, num_hidden_layers=2, full_attention_layers=(1,), num_experts=2, experts_per_token=2)
NORM = "model.norm.weight"
SCALE = "model.layers.1.block_sparse_moe.experts.0.w2.weight_scale"
K_SCALE = "model.layers.1.self_attn.k_scale"

Tensors = dict[str, Tensor]


def tensors_of(seed: int = 0) -> Tensors:
    return dict(random_checkpoint(CONFIG, seed).tensors)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    save_checkpoint(path, CONFIG, tensors_of())
    return path


def refusal_of(folder: Path) -> str:
    with pytest.raises(CheckpointError) as refusal:
        load_checkpoint(folder)
    message = str(refusal.value)
    assert "\n" not in message
    assert message.startswith("checkpoint ")
    return message


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_what_is_saved_is_loaded_bit_for_bit(folder: Path) -> None:
    loaded, wanted = load_checkpoint(folder), tensors_of()
    assert loaded.config == replace(CONFIG, name="model")
    assert loaded.tensors.keys() == wanted.keys()
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in wanted.items())
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_a_digest_tells_checkpoints_apart(folder: Path, tmp_path: Path) -> None:
    digest = load_checkpoint(folder).digest
    assert load_checkpoint(folder).digest == digest
    save_checkpoint(tmp_path / "other", CONFIG, tensors_of(seed=1))
    save_checkpoint(tmp_path / "eps", replace(CONFIG, rms_norm_eps=2e-5), tensors_of())
    assert len({digest, load_checkpoint(tmp_path / "other").digest, load_checkpoint(tmp_path / "eps").digest}) == 3


def test_a_checkpoint_of_several_files_is_one_checkpoint(folder: Path) -> None:
    tensors = tensors_of()
    half = sorted(tensors)[: len(tensors) // 2]
    save_file({name: tensors[name] for name in half}, folder / "a.safetensors")
    rewrite(folder, lambda stored: [stored.pop(name) for name in half])
    assert load_checkpoint(folder).tensors.keys() == tensors.keys()


def test_fp8_scales_are_optional(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop(K_SCALE))
    assert K_SCALE not in load_checkpoint(folder).tensors


@pytest.mark.parametrize("missing", ["folder", "config.json", "model.safetensors"])
def test_a_missing_part_is_named(folder: Path, missing: str) -> None:
    if missing == "folder":
        assert "config.json: not found" in refusal_of(folder / "nowhere")
        return
    (folder / missing).unlink()
    expected = {"config.json": "config.json: not found", "model.safetensors": "no *.safetensors file in it"}
    assert expected[missing] in refusal_of(folder)


@pytest.mark.parametrize("kept", [0, 4, 100, -1, -1000])
def test_a_truncated_file_is_refused(folder: Path, kept: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert "model.safetensors: not a whole safetensors file" in refusal_of(folder)


PROBLEMS: dict[str, Callable[[Tensors], object]] = {
    f"tensor {NORM} is missing": lambda t: t.pop(NORM),
    "tensor model.extra is unknown": lambda t: t.update({"model.extra": torch.zeros(1)}),
    f"tensor {NORM} is bfloat16 (63,), bfloat16 (64,) is needed": lambda t: t.update({NORM: t[NORM][:63].clone()}),
    f"tensor {NORM} is float32 (64,), bfloat16 (64,) is needed": lambda t: t.update({NORM: t[NORM].float()}),
    f"tensor {NORM} holds NaN or infinity": lambda t: t[NORM].__setitem__(3, torch.nan),
    f"tensor {K_SCALE} holds NaN or infinity": lambda t: t.update({K_SCALE: torch.tensor(torch.inf)}),
    f"tensor {K_SCALE} is float32 (1,), float32 () is needed": lambda t: t.update({K_SCALE: torch.ones(1)}),
    f"tensor {SCALE} holds NaN (E8M0 code 0xff)": lambda t: t[SCALE].__setitem__((0, 0), 255),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_tensor_that_is_wrong_is_named_with_what_is_needed(folder: Path, problem: str) -> None:
    rewrite(folder, PROBLEMS[problem])
    assert refusal_of(folder) == f"checkpoint {folder}: {problem}"


def test_of_many_problems_the_first_are_listed_and_the_rest_counted(folder: Path) -> None:
    rewrite(folder, lambda tensors: [tensors.pop(name) for name in sorted(tensors)[:10]])
    message = refusal_of(folder)
    assert message.count("is missing") == 4
    assert message.endswith("; and 6 more")


def test_a_tensor_in_two_files_is_refused(folder: Path) -> None:
    save_file({NORM: torch.ones(64).bfloat16()}, folder / "more.safetensors")
    assert refusal_of(folder).endswith(f"more.safetensors: tensor {NORM} is in another file of the folder too")


def test_a_malformed_config_names_its_line(folder: Path) -> None:
    file = folder / "config.json"
    lines = file.read_text().splitlines()
    lines[5] = lines[5].rstrip(",")
    file.write_text("\n".join(lines))
    assert "config.json: not valid JSON, line 7" in refusal_of(folder)


def test_an_unsupported_config_is_refused_with_all_reasons(folder: Path) -> None:
    file = folder / "config.json"
    fields = json.loads(file.read_text()) | {"hidden_act": "silu", "mla_use_nope": False, "vocab_size": 0}
    file.write_text(json.dumps(fields))
    message = refusal_of(folder)
    assert all(f"{name} is" in message for name in ("hidden_act", "mla_use_nope", "vocab_size"))


def test_wrong_tensors_are_not_written(folder: Path) -> None:
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    tensors = tensors_of(seed=1)
    del tensors[NORM]
    with pytest.raises(CheckpointError, match=f"not written: tensor {NORM} is missing"):
        save_checkpoint(folder, CONFIG, tensors)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


@pytest.mark.parametrize("other_config", [False, True])
def test_an_exception_in_the_middle_of_a_save_leaves_the_old_checkpoint_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch, other_config: bool
) -> None:
    before = {file.name: file.read_bytes() for file in folder.iterdir()}

    def half_written(tensors: Tensors, file: Path, metadata: object) -> None:
        file.write_bytes(b"half of it")
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint, "save_file", half_written)
    with pytest.raises(OSError, match="no space left"):
        save_checkpoint(folder, replace(CONFIG, rms_norm_eps=2e-5) if other_config else CONFIG, tensors_of(seed=1))
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def kill_in_save(folder: Path, eps: float, call: str, nth: int) -> None:
    """Save another checkpoint in a child process that is killed at the start of the nth call of a function."""
    child = os.fork()
    if not child:
        owner = checkpoint.os if call == "replace" else checkpoint
        original, calls = getattr(owner, call), iter(range(1, 10))

        def killed(*arguments: object, **options: object) -> object:
            if next(calls) == nth:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        setattr(owner, call, killed)
        save_checkpoint(folder, replace(CONFIG, rms_norm_eps=eps), tensors_of(seed=1))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("eps", [CONFIG.rms_norm_eps, 2e-5])
def test_a_save_killed_while_it_writes_leaves_the_old_checkpoint_whole(folder: Path, eps: float) -> None:
    digest = load_checkpoint(folder).digest
    kill_in_save(folder, eps, "save_file", 1)
    assert load_checkpoint(folder).digest == digest


def test_a_save_killed_between_its_two_files_never_leaves_a_mix(folder: Path, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "same config", CONFIG, tensors_of(seed=1))
    kill_in_save(folder, CONFIG.rms_norm_eps, "replace", 2)
    assert load_checkpoint(folder).digest == load_checkpoint(tmp_path / "same config").digest
    kill_in_save(folder, 2e-5, "replace", 2)
    assert "config.json: not found" in refusal_of(folder)
    save_checkpoint(folder, CONFIG, tensors_of())  # and the folder can be saved to again
    assert load_checkpoint(folder).config.rms_norm_eps == CONFIG.rms_norm_eps


# MXFP4 columns: a rank's share of an expert's input axis.


def mxfp4(columns: int = 128) -> MXFP4Weight:
    w = torch.randn(2, 5, columns, generator=torch.Generator().manual_seed(2))
    return MXFP4Weight(*mxfp4_quantise(w * torch.logspace(-3, 3, columns)))


@pytest.mark.parametrize(("start", "stop"), [(0, 128), (32, 96), (96, 128), (0, 16), (16, 32), (44, 48), (126, 128)])
def test_a_share_of_columns_is_exact_and_padded_with_zeros(start: int, stop: int) -> None:
    whole = mxfp4()
    part = whole.columns(start, stop)
    assert part.in_features % 32 == 0
    assert torch.equal(part.dense[..., : stop - start], whole.dense[..., start:stop])
    assert not part.dense[..., stop - start :].any()


@pytest.mark.parametrize(("start", "stop"), [(0, 48), (16, 64), (31, 33), (1, 3), (0, 5)])
def test_a_share_that_would_cut_a_block_or_a_byte_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=f"columns {start}..{stop} cut an MXFP4 block"):
        mxfp4().columns(start, stop)


def test_rows_are_picked_with_their_scales() -> None:
    whole, index = mxfp4(), torch.tensor([4, 0])
    assert torch.equal(whole.rows(index).dense, whole.dense[:, index])


def test_a_random_checkpoint_is_a_checkpoint_and_depends_on_its_seed() -> None:
    first, again, other = (random_checkpoint(SMALL, seed).tensors for seed in (1, 1, 2))
    assert expected_tensors(SMALL).keys() <= first.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first[NORM], other[NORM])
