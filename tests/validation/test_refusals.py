"""Input that once crashed, hung or was judged for something else is refused, or read for what it is."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from toy_commandline import CommandLine

from decode_impl.config import read_config
from decode_impl.config_fields import ConfigError
from decode_impl.presets import K3_MINI
from validation.errors import UsageError
from validation.profile import load_profile
from validation.records.storage import RunFolder
from validation.run import version


def config_error(folder: Path, text: str) -> str:
    (folder / "config.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_config(folder)
    return str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("num_experts", 10**12),
        ("activation_situ_beta", 10**400),
        ("bos_token_id", 10**30),
    ],
)
def test_a_size_beyond_reason_is_refused_at_once(tmp_path: Path, field: str, value: int) -> None:
    fields: dict[str, Any] = {**K3_MINI.to_hf(), field: value}
    message = config_error(tmp_path, json.dumps(fields))
    assert field in message
    assert len(message) < 400


def test_json_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    assert "nested too deeply" in config_error(tmp_path, "[" * 100_000)


def test_toml_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.toml"
    path.write_text("x = " + "[" * 100_000)
    with pytest.raises(UsageError, match="nested too deeply"):
        load_profile(str(path))


def test_arms_with_one_backend_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "same.toml"
    sections = "".join(f'[{arm}]\ndecode_backend = "auto"\n' for arm in ("baseline", "candidate"))
    head = 'description = "x"\nrequired = ["numerics"]\n[target]\nkind = "builtin"\n'
    path.write_text(f"{head}{sections}[gates.numerics]\nrows = [1]\n")
    with pytest.raises(UsageError, match="there is nothing to compare"):
        load_profile(str(path))


def test_a_unit_file_nested_too_deeply_is_measured_again(decodegate: CommandLine) -> None:
    assert decodegate.run() == 0
    folder = decodegate.newest()
    unit = sorted(folder.path.glob("units/*/*.json"))[0]
    unit.write_bytes(b"[" * 100_000)
    assert RunFolder(folder.path).read_unit(unit.parent.name, unit.stem, "any") is None


@pytest.mark.parametrize("threads", ["257", "2000000000", "100000000000"])
def test_absurd_numbers_of_threads_are_refused(decodegate: CommandLine, threads: str) -> None:
    assert decodegate.run("--threads", threads) == 2
    assert "Traceback" not in decodegate.err


def test_a_wrong_command_stops_a_bisect_instead_of_blaming_a_commit(decodegate: CommandLine) -> None:
    assert decodegate.run("--gate", "none-such", "--bisect-exit") == 129
    assert decodegate.run("--gate", "none-such") == 2


def test_a_folder_called_like_the_embedded_model_is_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from validation.cli.app import main

    (tmp_path / "embedded").mkdir()
    (tmp_path / "embedded" / "config.json").write_text("{")
    monkeypatch.chdir(tmp_path)
    for name in ("embedded", os.path.join(".", "embedded")):
        assert main(["run", "--profile", "smoke", "--model", name]) == 2
        assert "config.json: not valid JSON, line 1" in capsys.readouterr().err


def test_an_edit_of_the_code_changes_the_version_that_results_are_kept_under(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = version.code_version()
    for package in version.PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "module.py").write_text("x = 1\n")
    monkeypatch.setattr(version, "__file__", str(tmp_path / "validation" / "run" / "version.py"))
    seen = []
    for text in ("x = 1\n", "x = 2\n", "x = 1\n"):
        (tmp_path / "numerics" / "module.py").write_text(text)
        version.code_version.cache_clear()
        seen.append(version.code_version())
    version.code_version.cache_clear()
    assert seen[0] == seen[2] != seen[1]
    assert before not in seen
