"""The whole journey on the real target: verdicts, reports, faults, repetition, a killed run, and bad input."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_k3 import write_model

from validation.cli.app import main
from validation.faults.catalogue import FAULTS
from validation.records.jsonio import digest
from validation.records.record import RunRecord, UnitRecord, stable_bytes
from validation.records.storage import RunFolder
from validation.run import environment
from validation.verdict import Verdict

PROFILE = """
description = "both gates on the real target, in seconds"
required = ["numerics", "parity"]

[target]
kind = "builtin"

[baseline]
decode_backend = "auto"

[candidate]
decode_backend = "latency_specialized"

[gates.numerics]
ops = ["route"]
rows = [2]
sequence_rows = [3]
shard_rows = [1]
shards = []
seeds = 1

[gates.parity]
prompt_length = 20
decode_length = 4
min_sequences = 16

[[gates.parity.cells]]
kv_cache_dtype = "fp8"
tensor_parallel = [1]
batches = [1, 2, 4, 8]
"""
"""One unit of numerics, which needs no workers, and four of parity, in which a run can be killed."""


@dataclass(frozen=True)
class Place:
    """A model, a profile and a folder of runs."""

    model: Path
    profile: Path
    runs: Path

    def words(self, *more: str, model: bool = True) -> list[str]:
        """`decodegate run` here, in one process unless `more` says otherwise."""
        where = ["--profile", str(self.profile), "--out", str(self.runs), "--workers", "1"]
        return ["run", *where, *(["--model", str(self.model)] if model else []), *more]

    def with_profile(self, text: str) -> Place:
        """The same place with another profile."""
        path = self.runs.with_name("other.toml")
        path.write_text(text)
        return replace(self, profile=path)

    def newest(self) -> RunFolder:
        """The run made last."""
        return RunFolder(max(self.runs.iterdir(), key=lambda path: path.stat().st_mtime_ns))

    def record(self) -> RunRecord:
        """The record of the newest run."""
        return self.newest().read_record()


@pytest.fixture(autouse=True, scope="module")
def _no_commits() -> Iterator[None]:
    """Someone may commit while the tests run, and a run is not resumed across commits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "git_state", lambda root: (None, None))
        patch.delenv("GITHUB_STEP_SUMMARY", raising=False)
        yield


@pytest.fixture(scope="module")
def whole_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small checkpoint; tests that spoil it take a copy."""
    return write_model(tmp_path_factory.mktemp("small-k3"))


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "tiny.toml"
    path.write_text(PROFILE)
    return path


@pytest.fixture
def place(whole_model: Path, profile: Path, tmp_path: Path) -> Place:
    return Place(whole_model, profile, tmp_path / "runs")


@pytest.fixture(scope="module")
def clean(whole_model: Path, profile: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run that nothing disturbed, on one process."""
    place = Place(whole_model, profile, tmp_path_factory.mktemp("clean") / "runs")
    assert main(place.words()) == 0
    return place.newest()


def reports(folder: RunFolder) -> dict[str, str]:
    """The reports that people read, by file name."""
    return {name: (folder.path / name).read_text() for name in ("report.html", "summary.md", "junit.xml")}


def test_the_embedded_model_passes_and_every_report_is_there(place: Place) -> None:
    text = PROFILE.replace("batches = [1, 2, 4, 8]", "batches = [2]").replace("min_sequences = 16", "min_sequences = 6")
    place = place.with_profile(text)
    assert main(place.words(model=False)) == 0
    record = place.record()
    assert record.status == "finished"
    assert record.stable.verdict is Verdict.PASS
    assert {doc.name: doc.verdict for doc in record.stable.gates} == {
        "numerics": Verdict.PASS,
        "parity": Verdict.PASS,
    }
    assert record.stable.target.fingerprint["model"] == "k3-mini"
    assert record.stable.counters["candidate"].steps["specialized"] == 3 * 4
    pages = reports(place.newest())
    for doc in record.stable.gates:
        assert doc.question in pages["report.html"].replace("&#39;", "'")
        assert doc.plots
        assert doc.tables
        for index in range(1, len(doc.plots) + 1):
            assert (place.newest().path / "plots" / f"{doc.name}-{index}.svg").read_text().startswith("<svg")
    assert pages["report.html"].count("<svg") == sum(len(doc.plots) for doc in record.stable.gates)
    suites = Xml.fromstring(pages["junit.xml"])
    assert [suite.get("name") for suite in suites] == ["numerics", "parity"]
    assert suites.get("failures") == suites.get("errors") == "0"
    assert "PASS" in pages["summary.md"].splitlines()[0]
    assert json.loads((place.newest().path / "record.json").read_bytes())["stable"]["verdict"] == "PASS"


@pytest.mark.parametrize(
    "fault",
    ["kda-state-transposed", "mla-fp8-scale-dropped", "moe-bias-in-weights", "mla-lse-base", "kda-delta-dropped"],
)
def test_a_fault_fails_the_run_and_every_report_names_its_component(place: Place, fault: str) -> None:
    component = FAULTS[fault].component
    place = place.with_profile(PROFILE.replace('ops = ["route"]', f'ops = ["{component}"]'))
    assert main(place.words("--fault", fault)) == 1
    record = place.record()
    assert record.stable.verdict is Verdict.FAIL
    numerics, parity = record.stable.gates
    assert (numerics.verdict, parity.verdict) == (Verdict.FAIL, Verdict.SKIPPED)
    assert {finding.component for finding in numerics.findings} == {component}
    message = numerics.findings[0].message
    pages = reports(place.newest())
    assert f"<strong>{component}</strong>: {message.split(' > ')[0]}" in pages["report.html"]
    assert f"- **numerics, {component.replace('_', chr(92) + '_')}**: " in pages["summary.md"]
    failures = Xml.fromstring(pages["junit.xml"]).findall("./testsuite[@name='numerics']/testcase/failure")
    assert any((failure.text or "").startswith(f"{component}: {message}") for failure in failures)
    assert "FAIL" in pages["summary.md"].splitlines()[0]


def test_a_fault_that_decoding_shows_fails_parity_alone_too(place: Place) -> None:
    assert main(place.words("--fault", "kda-state-transposed", "--gate", "parity")) == 1
    (parity,) = place.record().stable.gates
    assert parity.verdict is Verdict.FAIL
    assert {"logits", "state cache"} <= {finding.component for finding in parity.findings}
    assert all("state cache" in page for page in reports(place.newest()).values())


def test_the_same_seed_gives_the_same_bytes_twice(place: Place, clean: RunFolder) -> None:
    assert main(place.words()) == 0
    assert place.record().run.id != clean.run_id
    assert stable_bytes(place.record()) == stable_bytes(clean.read_record())


def test_another_seed_measures_other_draws(place: Place, clean: RunFolder) -> None:
    assert main(place.words("--seed", "1", "--gate", "numerics")) == 0
    assert place.record().stable.gates[0].metrics != clean.read_record().stable.gates[0].metrics


@pytest.mark.parametrize(
    ("kill", "workers"), [(os.killpg, "2"), (os.kill, "1")], ids=["the whole group", "the parent alone"]
)
def test_a_run_killed_in_parity_on_two_processes_resumes_to_the_bytes_of_one(
    place: Place, clean: RunFolder, kill: Callable[[int, int], None], workers: str
) -> None:
    driver = Path(__file__).with_name("builtin_driver.py")
    command = [sys.executable, str(driver), *place.words("--workers", "2")]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        wait_for(lambda: any(place.runs.glob("*/units/parity/*.json")) or child.poll() is not None)
        kill(child.pid, signal.SIGKILL)
        assert child.wait(timeout=60) == -signal.SIGKILL
        wait_for(lambda: not running_in_group(child.pid))
    finally:
        if running_in_group(child.pid):
            os.killpg(child.pid, signal.SIGKILL)

    killed = place.newest()
    assert killed.read_record().status == "running"
    assert killed.read_record().stable.verdict is None
    kept = {path: path.stat().st_mtime_ns for path in killed.path.glob("units/*/*.json")}
    for path in kept:
        document = json.loads(path.read_bytes())
        assert UnitRecord.model_validate(document).sha256 == digest(document["content"])
    assert 1 <= sum(path.parent.name == "parity" for path in kept) < 4

    assert main(["run", "--resume", killed.run_id, "--out", str(place.runs), "--workers", workers]) == 0
    assert all(path.stat().st_mtime_ns == written for path, written in kept.items())
    assert not list(killed.path.rglob("*.tmp"))
    assert killed.read_record().stable.verdict is Verdict.PASS
    assert stable_bytes(killed.read_record()) == stable_bytes(clean.read_record())
    assert (killed.path / "samples" / "parity.jsonl").read_bytes() == (
        clean.path / "samples" / "parity.jsonl"
    ).read_bytes()


def wait_for(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds} s")
        time.sleep(0.01)


def running_in_group(group: int) -> list[int]:
    """Processes of the group that still run; a zombie does not."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(pgrp) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


def without_config(model: Path) -> None:
    (model / "config.json").unlink()


def malformed_config(model: Path) -> None:
    lines = (model / "config.json").read_text().splitlines()
    lines[6] = lines[6].replace(":", "")
    (model / "config.json").write_text("\n".join(lines))


def unsupported_config(model: Path) -> None:
    fields = json.loads((model / "config.json").read_text())
    fields |= {"hidden_act": "silu", "mla_use_nope": False, "q_lora_rank": None, "topk_group": 2}
    fields["linear_attn_config"]["use_full_rank_gate"] = False
    (model / "config.json").write_text(json.dumps(fields))


def truncated_weights(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change_weights(model: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors")


def wrong_shape(model: Path) -> None:
    change_weights(model, lambda tensors: tensors.update({"model.norm.weight": torch.ones(65, dtype=torch.bfloat16)}))


def missing_tensor(model: Path) -> None:
    change_weights(model, lambda tensors: tensors.pop("lm_head.weight"))


def nan_tensor(model: Path) -> None:
    change_weights(model, lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))


def no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


def malformed_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text("{}")


def larger_vocabulary(model: Path) -> None:
    text = json.loads((model / "tokenizer.json").read_text())
    text["model"]["vocab"] |= {f"more{i}": 1000 + i for i in range(100)}
    (model / "tokenizer.json").write_text(json.dumps(text))


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        (shutil.rmtree, ["does not exist; --model takes the folder of a checkpoint"]),
        (without_config, ["config.json: not found"]),
        (malformed_config, ["config.json: not valid JSON, line 7: "]),
        (
            unsupported_config,
            [
                "hidden_act is 'silu', only 'situ' is supported",
                "mla_use_nope is False",
                "topk_group is 2",
                "use_full_rank_gate is False",
                "q_lora_rank is None, an integer from 1 to",
            ],
        ),
        (truncated_weights, ["model.safetensors: not a whole safetensors file"]),
        (no_weights, ["no *.safetensors file in it"]),
        (wrong_shape, ["tensor model.norm.weight is bfloat16 (65,), bfloat16 (64,) is needed"]),
        (missing_tensor, ["tensor lm_head.weight is missing"]),
        (nan_tensor, ["tensor model.norm.weight holds NaN or infinity"]),
        (no_tokenizer, ["no tokenizer.json beside config.json"]),
        (malformed_tokenizer, ["tokenizer.json: not a tokenizer file"]),
        (larger_vocabulary, ["tokens, the model's vocabulary 320"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_model_that_cannot_be_used_is_refused(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], None], parts: list[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(place.model, model)
    spoil(model)
    refused(replace(place, model=model), capsys, parts)


NARROW_AND_WIDE = """decode_backend = "latency_specialized"
state_dtype = "bf16"
max_batch = 65
tensor_parallel = 3
max_context = 9000
kv_cache_dtype = "fp8"
"""


def without_scales(model: Path) -> None:
    change_weights(model, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith("k_scale")])


def test_an_arm_is_refused_with_every_reason_at_once(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(place.model, model)
    without_scales(model)
    place = replace(place, model=model).with_profile(
        PROFILE.replace('decode_backend = "latency_specialized"\n', NARROW_AND_WIDE)
    )
    reasons = [
        "the candidate arm cannot be opened: ",
        "recurrent state is bf16, f32 is needed",
        "max batch is 65, at most 64 requests can decode specialised",
        "tensor parallelism is 3, allowed are (1, 2, 4, 8, 16)",
        "max_context is 9000, the model's max_position_embeddings is 8192",
        "kv_cache_dtype fp8 needs a positive k_scale and q_scale in the checkpoint: k_scale of layer 0 is None",
    ]
    refused(place, capsys, reasons)


def test_a_number_of_ranks_that_nothing_allows_is_refused_before_weights_are_cut(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = PROFILE.replace('"latency_specialized"\n', '"latency_specialized"\ntensor_parallel = 1000000\n')
    refused(place.with_profile(wide), capsys, ["tensor parallelism is 1000000, allowed are"])


def test_a_run_folder_that_cannot_be_made_is_refused(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.runs.write_text("precious")
    refused(place, capsys, [f"cannot write '{place.runs}/", "Not a directory", "choose another --out"], exists=True)
    assert place.runs.read_text() == "precious"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that even root cannot write: procfs")
def test_a_read_only_place_for_runs_is_refused(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    refused(replace(place, runs=Path("/proc/runs")), capsys, ["cannot write '/proc/runs/"])


def refused(place: Place, capsys: pytest.CaptureFixture[str], parts: list[str], exists: bool = False) -> None:
    """Assert exit code 2 and one line with these parts, and that nothing was written or lost."""
    folders = [place.runs.parent, place.profile.parent] if place.runs.parent != Path("/proc") else []
    before = [content(folder) for folder in folders]
    capsys.readouterr()
    assert main(place.words()) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("decodegate: ")
    assert captured.err.count("\n") == 1
    assert captured.err.endswith("\n")
    assert "Traceback" not in captured.err + captured.out
    for part in parts:
        assert part in captured.err
    assert place.runs.exists() is exists
    assert [content(folder) for folder in folders] == before


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
