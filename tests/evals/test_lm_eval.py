"""The tasks load in lm-evaluation-harness by --include_path and score golden answers there as they do here."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from evals.tasks import load_task
from evals.tasks.lm_eval import FOLDER
from evals.tasks.lm_eval.functions import graded, text_of

needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed: pip install 'decodegate[evals]'"
)

ITEMS, REPEATS = 3, 2


def evaluated(name: str, answers: dict[str, str]) -> dict[str, Any]:
    """What the harness reports for a model that answers each question as told."""
    import lm_eval
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    class Told(LM):
        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            assert all(request.args[1]["max_gen_toks"] >= 32_768 for request in requests)
            assert {request.args[1]["temperature"] for request in requests} == {1.0}
            return [answers[request.args[0]] for request in requests]

        def loglikelihood(self, requests: list[Any]) -> list[Any]:
            raise AssertionError("the tasks ask for generated text alone")

        loglikelihood_rolling = loglikelihood

    manager = TaskManager(
        include_path=str(FOLDER),
        include_defaults=False,
        metadata={"origin": "generated", "items": ITEMS, "repeats": REPEATS},
    )
    results = lm_eval.simple_evaluate(
        model=Told(), tasks=[name], task_manager=manager, bootstrap_iters=0, log_samples=False
    )
    assert results is not None
    found: dict[str, Any] = results["results"][name]
    return found


def golden(name: str, right: bool = True) -> dict[str, str]:
    task = load_task(name, "generated", ITEMS)
    wrap = {"aime25": "So \\boxed{{{}}}.", "gpqa_diamond": "Answer: {}", "mrcr": "\n\n{}"}[name]
    told = {}
    for repeat in range(REPEATS):
        for item in task.item_ids:
            answer = task.expected(item, repeat) if right else "Z"
            told[text_of(task.messages(item, repeat))] = wrap.format(answer)
    return told


@needs_lm_eval
@pytest.mark.parametrize("name", ["aime25", "gpqa_diamond", "mrcr"])
def test_lm_eval_loads_the_task_by_include_path_and_scores_golden_answers(name: str) -> None:
    right = evaluated(name, golden(name))
    assert right["score,none"] == 1.0
    assert right["parsed,none"] == 1.0
    assert evaluated(name, golden(name, right=False))["score,none"] == 0.0


@needs_lm_eval
def test_lm_eval_takes_our_aime25_before_its_own() -> None:
    """Its own folder comes first, as its defaults do; only that folder, because scanning all takes half a minute."""
    from lm_eval import tasks

    own = Path(tasks.__file__).parent / "aime"
    assert str(own) in str(tasks.TaskManager(include_path=str(own), include_defaults=False).task_index["aime25"])
    both = tasks.TaskManager(include_path=[str(own), str(FOLDER)], include_defaults=False)
    assert str(FOLDER) in str(both.task_index["aime25"])


@needs_lm_eval
def test_in_lm_eval_too_every_repeat_counts_and_not_the_first_alone() -> None:
    """The third answer of one row is right: its score is a third, whichever comes first."""
    from evals.tasks.lm_eval import functions

    functions.aime25(origin="generated", items=1)
    task = load_task("aime25", "generated", 1)
    doc = {"task": "aime25", "item": task.item_ids[0], "repeat": 0}
    right = f"\\boxed{{{task.expected(task.item_ids[0], 0)}}}"
    assert graded(doc, [["", "\\boxed{x}", right]])["score"] == pytest.approx(1 / 3)
    assert graded(doc, [[right, "", ""]])["score"] == pytest.approx(1 / 3)


def test_the_task_files_ship_with_the_package() -> None:
    assert {path.stem for path in Path(FOLDER).glob("*.yaml")} == {"aime25", "gpqa_diamond", "mrcr"}
