"""Published figures are data, and no ratio is formed across a confounder."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from toy_commandline import CommandLine

from validation.claims.compare import comparable, confounders, ratio, refusal
from validation.claims.model import figures, find, published

KNOWN = figures(published())


def test_the_published_figures_are_all_there() -> None:
    values = {figure.name: figure.value for figure in KNOWN}
    assert values == {
        "C1.specialised": 842.0,
        "C1.generic": 488.0,
        "C2.specialised": 838.0,
        "C2.generic": 489.0,
        "C3.specialised": 256.4,
        "C4.specialised": 3606.1,
        "C5.specialised": 403.2,
        "C5.generic": 223.7,
        "C6.specialised": 69.0,
        "C6.generic": 130.0,
    }


def test_each_published_ratio_is_that_of_its_figures() -> None:
    for file in published():
        for claim in file.claims:
            if claim.specialised is None or claim.generic is None or claim.ratio is None:
                continue
            own = claim.specialised.value / claim.generic.value
            # The sources print two decimals (C5 one), so a ratio is within half a unit of the last.
            half = 0.05 if claim.id == "C5" else 0.005
            assert abs((own if claim.better == "higher" else 1 / own) - claim.ratio) <= half, claim.id


def test_only_the_two_arms_of_an_unconfounded_claim_may_be_compared() -> None:
    allowed = {(a.name, b.name) for a, b in combinations(KNOWN, 2) if not refusal(a, b)}
    assert allowed == {(f"{claim}.specialised", f"{claim}.generic") for claim in ("C1", "C2", "C6")}


@pytest.mark.parametrize(
    ("a", "b", "named"),
    [
        ("C5.specialised", "C5.generic", ["number of GPUs: 16 and 8"]),
        ("C1.specialised", "C2.generic", ["published in"]),
        (
            "C1.specialised",
            "C4.specialised",
            ["batch: 1 and 64", "speculation: DSpark, 7 drafts and none", "acceptance"],
        ),
        ("C3.specialised", "C4.specialised", ["batch: 1 and 64", "number of GPUs: stated by neither C3 nor C4"]),
        ("C1.generic", "C6.generic", ["metric", "workload"]),
    ],
)
def test_a_refusal_names_every_confounder(a: str, b: str, named: list[str]) -> None:
    found = confounders(find(KNOWN, a), find(KNOWN, b))
    for name in named:
        assert any(line.startswith(name) for line in found), (name, found)
    with pytest.raises(ValueError, match=named[0][:10]):
        ratio(find(KNOWN, a), find(KNOWN, b))


def test_a_lower_time_is_better() -> None:
    assert ratio(find(KNOWN, "C6.specialised"), find(KNOWN, "C6.generic")) == pytest.approx(130 / 69)


OWN = """
sources = { here = "measured here" }
[[claims]]
id = "MINE"
metric = "aggregate decode throughput, prefill excluded"
unit = "tokens/s"
better = "higher"
source = "here"
reads_as = "ours"
conditions = { gpu = "GB300", gpus = 16 }
specialised = { value = 800 }
generic = { value = 500 }
"""


def test_a_measurement_of_ones_own_is_held_to_the_same_rules(decodegate: CommandLine) -> None:
    path = decodegate.folder / "mine.toml"
    path.write_text(OWN)
    assert decodegate("claims", "compare", "MINE.specialised", "MINE.generic", "--file", str(path)) == 0
    assert "1.60 times" in decodegate.out
    assert decodegate("claims", "compare", "C1", "MINE.generic", "--file", str(path)) == 1
    assert "batch: 1 and not stated" in decodegate.out
    path.write_text(OWN.replace("MINE", "C1"))
    assert decodegate("claims", "--file", str(path)) == 2
    assert "that of a published claim" in decodegate.err


def test_the_commands_show_compare_refuse_and_reject(decodegate: CommandLine) -> None:
    assert decodegate("claims") == 0
    for text in ("C1.specialised: 842 tokens/s", "may be compared with C1.generic", "number of GPUs: 16 and 8"):
        assert text in decodegate.out
    assert decodegate("claims", "compare", "C1.specialised", "C1.generic") == 0
    assert "1.73 times" in decodegate.out
    assert decodegate("claims", "compare", "C5.specialised", "C5.generic") == 1
    assert "number of GPUs: 16 and 8" in decodegate.out
    assert decodegate("claims", "compare", "C1", "C9") == 2
    assert decodegate.err.count("\n") == 1


def test_every_claims_file_ships_in_the_package() -> None:
    import tomllib

    root = Path(__file__).parents[2]
    packaged = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["validation"]
    assert "claims/*.toml" in packaged
    assert comparable(find(KNOWN, "C1"), KNOWN)
