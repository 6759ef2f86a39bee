"""The builtin target takes a device, and refuses one that it does not have in a line."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from small_k3 import small_target

from validation.errors import UsageError
from validation.profile import profile_from
from validation.targets.registry import load_target


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "target.options.device is 'tpu', allowed are cpu and cuda"),
        ({"device": 0}, "target.options.device is 0, allowed are cpu and cuda"),
        ({"devices": "cpu"}, "target.options.devices: target builtin has no such option; allowed is device"),
    ],
)
def test_options_that_it_does_not_have_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_target("builtin", None, options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_a_device_that_is_not_here_is_refused() -> None:
    with pytest.raises(UsageError, match="device is cuda, but torch finds no CUDA device here"):
        load_target("builtin", None, {"device": "cuda"})


def test_a_worker_gets_a_target_on_the_same_device() -> None:
    again = pickle.loads(pickle.dumps(load_target("builtin", None, {"device": "cpu"})))
    assert again.fingerprint() == load_target("builtin", None).fingerprint()
    assert small_target().fingerprint()["device"] == "cpu"


def test_a_device_does_not_make_two_arms_of_one_backend_worth_comparing() -> None:
    profile = {
        "description": "One path, twice.",
        "required": ["numerics"],
        "target": {"kind": "builtin", "options": {"device": "cpu"}},
        "baseline": {"decode_backend": "auto"},
        "candidate": {"decode_backend": "auto"},
        "gates": {"numerics": {}},
    }
    with pytest.raises(UsageError, match="there is nothing to compare"):
        profile_from(profile, "profile")
