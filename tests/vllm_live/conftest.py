"""A real vLLM on tiny checkpoints. `make test-vllm` names the Python that has it; elsewhere these tests skip."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from servers import ENVIRONMENT, ITEMS, SEED, LiveServer, Servers

from evals.tasks import load_task

VARIABLE = "DECODEGATE_VLLM_PYTHON"


@pytest.fixture(scope="session")
def vllm_python() -> str:
    python = os.environ.get(VARIABLE)
    if not python:
        pytest.skip(f"{VARIABLE} names no Python with vLLM; make test-vllm does")
    return str(Path(python).absolute())


@pytest.fixture(scope="session")
def checkpoints(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `sound` and `damaged`, which know the generated AIME items of seed 0 by heart."""
    folder = tmp_path_factory.mktemp("checkpoints")
    task = load_task("aime25", "generated", ITEMS, SEED, None)
    learnt = [[task.messages(item, 0)[0]["content"], f"\\boxed{{{task.items[item].answer}}}"] for item in task.item_ids]
    (folder / "task.json").write_text(json.dumps(learnt), encoding="utf-8")
    maker = Path(__file__).with_name("make_tiny.py")
    subprocess.run(
        [vllm_python, str(maker), str(folder / "task.json"), str(folder)],
        check=True,
        timeout=900,
        env={**os.environ, **ENVIRONMENT},
    )
    return folder


@pytest.fixture(scope="session")
def servers(vllm_python: str, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Three servers, started together."""
    logs = tmp_path_factory.mktemp("logs")
    found = Servers(
        *(
            LiveServer(vllm_python, checkpoints / model, logs / f"{name}.log")
            for name, model in (("baseline", "sound"), ("equal", "sound"), ("damaged", "damaged"))
        )
    )
    with ExitStack() as stack:
        for server in vars(found).values():
            stack.callback(server.kill)
            server.start()
        for server in vars(found).values():
            server.wait()
        yield found
