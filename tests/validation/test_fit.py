"""`decodegate fit`: every example deployment gets the right answer with every reason; steps count as planners count."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
import yaml
from fit_expected import EXPECTED, NVIDIA
from toy_commandline import CommandLine

from validation.documents import checked
from validation.errors import UsageError
from validation.fit.answer import Applies, PathAnswer, answers, gain_bound
from validation.fit.deployment import DeploymentFile, load_deployment
from validation.fit.own import MEASURED, measured
from validation.fit.upstream import amd_fallback, nvidia_fallback
from validation.targets import own_path

EXAMPLES = Path(__file__).parents[2] / "examples" / "deployments"
DOCS = Path(__file__).parents[2] / "docs"


def test_there_are_ten_examples_half_of_them_supported() -> None:
    assert {path.stem for path in EXAMPLES.glob("*")} == set(EXPECTED)
    assert [code for code, _ in EXPECTED.values()].count(0) == 5
    assert len(EXPECTED) == 10


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_gets_the_right_answer_with_every_reason(decodegate: CommandLine, name: str) -> None:
    code, reasons = EXPECTED[name]
    found = {answer.path: answer for answer in answers(load_deployment(EXAMPLES / f"{name}.yaml"))}
    assert {path: {item.reason for item in answer.unmet} for path, answer in found.items()} == reasons
    assert decodegate("fit", str(EXAMPLES / f"{name}.yaml")) == code
    for answer in found.values():
        assert f"{answer.path}: applies: {answer.applies}" in decodegate.out
        assert all(item.reason in decodegate.out for item in answer.unmet)


def deployment(**changes: object) -> DeploymentFile:
    content: dict[str, object] = {
        "name": "x",
        "hardware": {"gpu": "GB300", "count": 16, "nvlink_domain": 16},
        "parallel": {"tensor": 16},
        "cache": {"kv": "fp8"},
        "traffic": {"batch": {1: 1.0}, "context": {1000: 1.0}},
    }
    return checked({**content, **changes}, DeploymentFile, "test")


def nvidia_answer(given: DeploymentFile) -> PathAnswer:
    return next(answer for answer in answers(given) if answer.path == NVIDIA)


def test_shares_of_steps_follow_the_batch_distribution() -> None:
    traffic = {"batch": {1: 0.5, 64: 0.25, 65: 0.25}, "context": {1000: 1.0}, "steps_with_prefill": 0.2}
    answer = nvidia_answer(deployment(traffic=traffic))
    assert list(answer.fallbacks.values()) == pytest.approx([0.2, 0.8 * 0.25])
    assert answer.specialised == pytest.approx(0.6)
    drafts = {"method": "dspark", "drafts": 7}
    answer = nvidia_answer(deployment(traffic={**traffic, "ragged_verify": 0.5}, speculation=drafts))
    # 1 request is 8 rows; 64 and 65 are over 500.
    assert answer.specialised == pytest.approx(0.8 * 0.5 * 0.5)


@pytest.mark.parametrize(
    ("requests", "drafts", "captures", "runs"),
    [
        (1, 0, None, True),
        (64, 0, None, True),
        (65, 0, None, False),
        (8, 7, None, True),
        (9, 7, None, False),
        # 10 requests of 6 rows: the next captured size, 64, rounds up to 66 rows.
        (10, 5, [64], False),
        (10, 5, [60], True),
        (3, 0, [2], False),
    ],
)
def test_a_step_is_padded_to_a_captured_graph_of_whole_requests(
    requests: int, drafts: int, captures: list[int] | None, runs: bool
) -> None:
    speculation = {"method": "dspark", "drafts": drafts} if drafts else None
    given = deployment(speculation=speculation, engine={"capture_sizes": captures})
    assert (nvidia_fallback(given, requests) is None) is runs


def test_the_amd_form_takes_eight_rows() -> None:
    given = deployment(speculation={"method": "dspark", "drafts": 3})
    assert amd_fallback(given, 2) is None
    assert amd_fallback(given, 3) is not None


def test_our_own_path_answers_with_its_planner() -> None:
    assert own_path.fallback(64, 0) is None
    assert own_path.fallback(65, 0) == "more than 64 rows"
    assert own_path.fallback(8, 7) is None
    assert own_path.fallback(9, 7) == "more than 64 rows"
    assert own_path.fallback(1, 2) == "drafts outside 3..7"


def test_the_gain_is_bounded_by_what_falls_back() -> None:
    assert gain_bound(1.0, 1.88) == pytest.approx(1.88)
    assert gain_bound(0.0, 1.88) == 1.0
    assert gain_bound(0.5, 1.88) < 1.31


def test_a_gain_says_whose_figure_it_rests_on(decodegate: CommandLine) -> None:
    assert decodegate("fit", str(EXAMPLES / "gb300-tp8-batch64.yaml")) == 0
    assert "1.88 times as fast (the largest that vLLM published, on GB300, TP16, batch 1, claim C3" in decodegate.out
    assert decodegate("fit", str(EXAMPLES / "h200-k3-mini.yaml")) == 0
    assert "1.12 times as fast (our own figure, on one H200, a TP16 share of K3, batch 1; 1.09" in decodegate.out
    assert "vLLM published" not in decodegate.out


def test_our_own_figures_are_those_that_were_measured() -> None:
    found: dict[int, list[tuple[int, float]]] = {}
    for line in (DOCS / "measurements" / "2026-11-30-bench.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if cells[1:2] in (["decode step"], ["verify step"]):
            found.setdefault(int(cells[3] or 0), []).append((int(cells[2]), float(cells[8].split()[0])))
    assert {drafts: (dict(lines)[1], min(ratio for _, ratio in lines)) for drafts, lines in found.items()} == MEASURED
    assert all(max(ratio for _, ratio in lines) == dict(lines)[1] for lines in found.values())
    assert measured(4) == MEASURED[3]


def test_the_example_of_k3_mini_has_the_acceptance_of_its_model_card() -> None:
    card = (DOCS.parent / "decode_impl" / "assets" / "k3-mini" / "MODEL_CARD.md").read_text()
    rows = [line for line in card.partition("Tokens committed per verify step")[2].splitlines() if "-like" in line]
    aime, gpqa, *mrcr = (float(row.split("|")[5]) for row in rows if row.startswith("|"))
    speculation = load_deployment(EXAMPLES / "h200-k3-mini.yaml").speculation
    assert speculation is not None
    assert speculation.drafts == 7
    assert speculation.acceptance_length == round(fmean((aime, gpqa, fmean(mrcr))), 1)


def test_a_model_that_cannot_fit_is_refused_whatever_else_holds() -> None:
    few = deployment(hardware={"gpu": "GB300", "count": 4, "nvlink_domain": 4}, parallel={"tensor": 8})
    assert "4 GPUs, 8 ranks need one each" in {item.reason for item in nvidia_answer(few).unmet}
    small = deployment(hardware={"gpu": "B200", "count": 8, "nvlink_domain": 8}, parallel={"tensor": 8})
    answer = nvidia_answer(small)
    assert answer.applies is Applies.NO
    # 1.56 TB of weights over 8 GPUs are 195 GB each, before any cache.
    assert any(item.reason.startswith("at least 195 GB a GPU") for item in answer.unmet)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: x", "'hardware' is missing"),
        ("name: x\nname: y", "key 'name' is there twice"),
        ("a: &a [1]\nb: *a", "aliases are not allowed"),
        ("!!python/object/apply:os.system ['true']", "not valid YAML"),
        ("[" * 3000, "YAML"),
        ("- 1", "a table of named values is needed"),
        ("hardware: {gpu: GB400, count: 1}", "no GPU is called 'GB400'; known are GB300"),
        ("traffic: {batch: {1: 0.5}, context: {1: 1}}", "the shares add up to 0.5"),
        ("traffic: {batch: {0: 1}, context: {1: 1}}", "traffic.batch"),
        ("traffic: {batch: {1: .nan}, context: {1: 1}}", "traffic.batch"),
        ("speculation: {method: dspark, drafts: 3, acceptance_length: 5}", "3 drafts allow 4"),
        ("hardwear: 1", "did you mean 'hardware'?"),
        ("name: !!bool maybe", "tags are not allowed"),
        ("name: ! x", "tags are not allowed"),
        ("hardware: {gpu: GB300, count: yes}", "hardware.count: a number is needed, not true"),
        ("traffic: {batch: {true: 1}, context: {1: 1}}", "a number is needed, not true"),
        ("hardware: {gpu: GB300, count: 0x" + "f" * 5000 + "}", "a number of more digits than Python prints"),
        ("name: " + "1:" * 300 + "1.5", "not valid YAML"),
        ("engine: {capture_sizes: []}", "engine.capture_sizes"),
    ],
)
def test_a_wrong_deployment_file_is_one_line(decodegate: CommandLine, text: str, said: str) -> None:
    path = decodegate.folder / "deployment.yaml"
    path.write_text(text)
    assert decodegate("fit", str(path)) == 2
    assert decodegate.err.count("\n") == 1
    assert said.replace("YAML", "") in decodegate.err


def test_a_batch_that_the_engine_does_not_admit_is_no_traffic() -> None:
    with pytest.raises(UsageError, match=r"engine\.max_batch is 8, traffic\.batch has steps of 64 requests"):
        deployment(traffic={"batch": {64: 1.0}, "context": {1000: 1.0}}, engine={"max_batch": 8})


def test_a_file_of_many_keys_is_refused_in_linear_time(tmp_path: Path) -> None:
    path = tmp_path / "many.yaml"
    keys = 2000
    path.write_text("name: x\n" + "".join(f"a{i}: 1\n" for i in range(keys)) + "a0: 2\n")
    compared = 0

    class Counted(str):
        """A key that counts its comparisons."""

        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    with pytest.MonkeyPatch.context() as patch:
        scalar = yaml.ScalarNode.__init__

        def counted(node: yaml.ScalarNode, tag: str, value: str, *more: object, **named: object) -> None:
            scalar(node, tag, Counted(value), *more, **named)

        patch.setattr(yaml.ScalarNode, "__init__", counted)
        with pytest.raises(UsageError, match="key 'a0' is there twice"):
            load_deployment(path)
    assert compared < 10 * keys


def test_a_number_in_toml_that_python_does_not_read_is_called_toml(decodegate: CommandLine) -> None:
    path = decodegate.folder / "deployment.toml"
    path.write_text("name = " + "9" * 5000)
    assert decodegate("fit", str(path)) == 2
    assert "not valid TOML" in decodegate.err


def test_a_model_of_another_family_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UsageError, match="not one of the K3 family"):
        answers(deployment(model=str(tmp_path / "config.json")))
    with pytest.raises(UsageError, match=r"k3, k3-mini, or the path of a config\.json"):
        answers(deployment(model="gpt"))
