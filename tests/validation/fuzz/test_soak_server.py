"""Soak of a server: what it gives is compared, what load leaves behind is seen, and the statement says what was not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from fake_openai import Body, FakeServer, Fault, chat_reply, serving

from evals.runner.endpoint import Endpoint, EndpointError, Limits
from validation.cli.app import main
from validation.soak.heard import Heard, difference
from validation.soak.server import Server, soak_server
from validation.soak.soak import CANARIES, TOKENS, Soaked

WORDS = 6


class Model:
    """A model of the fake server: an answer is a function of its question, and of what `spoil` does to it.

    Canaries are the questions that ask for TOKENS tokens; `canary` counts how often they were asked, `load` the rest.
    """

    def __init__(self, spoil: Callable[[Model, Body, list[Any]], list[Any]] | None = None, logs: bool = True) -> None:
        self.spoil, self.logs, self.load, self.canaries = spoil, logs, 0, 0

    def __call__(self, asked: Body) -> Body | bytes:
        is_canary = asked["max_tokens"] == TOKENS
        self.canaries, self.load = self.canaries + is_canary, self.load + (not is_canary)
        known = [asked["messages"], asked["seed"] if asked["temperature"] else 0]
        digest = hashlib.sha256(json.dumps(known).encode()).digest()
        tokens: list[Any] = [[f" w{byte}", -byte / 256.0] for byte in digest[:WORDS]]
        tokens = self.spoil(self, asked, tokens) if self.spoil and is_canary else tokens
        reply = chat_reply("".join(word for word, _ in tokens), asked)
        if asked.get("logprobs") and self.logs:
            content = [{"token": w, "logprob": p, "top_logprobs": [{"token": w, "logprob": p}]} for w, p in tokens]
            reply["choices"][0]["logprobs"] = {"content": content}
        return reply


def soaked(model: Callable[[Body], Body | bytes], rounds: int = 2, **server: Any) -> Soaked:
    left = count(rounds, -1)
    with serving(FakeServer(answer=model, **server)) as fake:
        limits = Limits(patience=0.0, tries=1, first_pause=0.01)
        return soak_server(Server(Endpoint(fake.url), 0, limits), lambda: next(left) > 0)


def test_a_server_that_repeats_itself_keeps_every_canary_and_the_statement_says_what_was_compared() -> None:
    seen = soaked(Model())
    assert (seen.rounds, seen.compared, seen.changed, seen.errors) == (2, 2 * CANARIES, [], 0)
    assert "compared: text and how it ended; log-probabilities of its tokens" in seen.summary()
    assert "no logits (a vLLM server gives them if you" in seen.summary()
    assert "memory" not in seen.summary()


def after_load(change: Callable[[list[Any]], list[Any]]) -> Callable[[Model, Body, list[Any]], list[Any]]:
    return lambda model, asked, tokens: change(tokens) if model.load else tokens


def test_a_text_that_changes_after_load_fails_and_its_place_is_told() -> None:
    seen = soaked(Model(after_load(lambda tokens: [*tokens[:-1], [" else", -1.0]])))
    assert seen.failed
    assert seen.changed[0].startswith("canary 0 in round 1: its text from character ")
    assert "'else'" in seen.changed[0]


def test_log_probabilities_that_change_in_one_bit_fail_though_the_text_is_the_same() -> None:
    seen = soaked(Model(after_load(lambda tokens: [[word, p * (1 + 2.0**-52)] for word, p in tokens])))
    assert seen.failed
    assert "the same text from other log-probabilities" in seen.changed[0]


def test_a_server_without_log_probabilities_is_compared_by_text_and_says_so() -> None:
    change = after_load(lambda tokens: [[word, 2 * p] for word, p in tokens])
    seen = soaked(Model(change, logs=False))
    assert not seen.failed
    assert "no log-probabilities (the server gives none" in seen.statement


def test_a_server_that_refuses_to_be_asked_for_log_probabilities_is_asked_without() -> None:
    model = Model()

    def refusing(asked: Body) -> Body | bytes:
        return {"error": "no"} if asked.get("logprobs") else model(asked)

    seen = soaked(refusing)
    assert not seen.failed
    assert "no log-probabilities" in seen.statement


def test_a_cold_answer_and_one_from_the_prefix_cache_are_both_references() -> None:
    """Every other canary is answered from other kernels, as after an eviction: the first two answers show both."""

    def spoil(model: Model, asked: Body, tokens: list[Any]) -> list[Any]:
        asked_before[str(asked["messages"])] = times = asked_before.get(str(asked["messages"]), 0) + 1
        return [[word, p - 0.001 * (times % 2)] for word, p in tokens]

    asked_before: dict[str, int] = {}
    assert soaked(Model(spoil), rounds=3).changed == []


def test_what_is_not_repeated_without_load_is_compared_by_text_alone_and_named() -> None:
    numbers = count()
    seen = soaked(Model(lambda model, asked, tokens: [[word, p - next(numbers) * 1e-6] for word, p in tokens]))
    assert not seen.failed
    assert "canary 0 by its text alone (without load too, " in seen.statement
    assert "no log-probabilities (the server gives none, or does not repeat them without load)" in seen.statement


def test_a_sampled_canary_without_seeds_is_left_out_and_a_greedy_one_that_wavers_is_a_finding() -> None:
    numbers = count()

    def unseeded(model: Model, asked: Body, tokens: list[Any]) -> list[Any]:
        return [[f" {next(numbers)}", p] for _, p in tokens] if asked["temperature"] else tokens

    seen = soaked(Model(unseeded))
    assert not seen.failed
    assert seen.compared == 2 * CANARIES // 2
    assert "canary 1 is left out (sampled, and the server does not repeat it by its seed)" in seen.statement
    wavering = soaked(Model(lambda model, asked, tokens: [[f" {next(numbers)}", p] for _, p in tokens]))
    assert "canary 0 before any load: its text" in wavering.changed[0]


def test_answers_that_end_in_an_error_fail_the_soak() -> None:
    model = Model()

    def broken(asked: Body) -> Body | bytes:
        return b"{" if model.load and asked["max_tokens"] == TOKENS else model(asked)

    seen = soaked(broken, rounds=1)
    assert seen.errors == CANARIES
    assert "it ended as 'the reply is not JSON" in seen.changed[0]


def test_another_model_behind_the_address_fails_the_soak() -> None:
    model = Model()
    pages = {"/version": json.dumps({"version": "1"})}

    def upgraded(asked: Body) -> Body | bytes:
        if model.load:
            pages["/version"] = json.dumps({"version": "2"})
        return model(asked)

    assert (
        "the server is no longer what it was: version was '1' and is '2'" in soaked(upgraded, pages=pages).changed[-1]
    )


def test_a_server_that_does_not_answer_at_all_is_bad_input() -> None:
    with pytest.raises(EndpointError, match="does not answer canary 0"):
        soaked(lambda asked: b"nothing")


def test_canaries_are_asked_alone_and_load_together() -> None:
    with serving(FakeServer(answer=Model(), faults=[Fault("wait", seconds=0.05)] * 64)) as fake:
        server = Server(Endpoint(fake.url), 3)
        server.canaries()
        assert fake.most == 1
        answers = [len(server.load()) for _ in range(2)]
        assert fake.most == max(answers) > 1


VOCAB = 260


def forceable(model: Model, drift: float) -> Callable[[Body], Body | bytes]:
    """As a vLLM that follows given tokens: its logits move by `drift` once it has had load."""

    def answer(asked: Body) -> Body | bytes:
        if asked["_path"] == "/tokenize":
            return {"tokens": [byte % VOCAB for byte in asked["prompt"].encode()]}
        if "vllm_xargs" not in asked:
            return model(asked)
        forced = asked["vllm_xargs"]["decodegate_forced"]
        steps = [{f"token_id:{t}": -t * (1 + drift * bool(model.load)) for t in range(VOCAB)} for _ in forced]
        told = {"tokens": [f"token_id:{t}" for t in forced], "top_logprobs": steps}
        return {"choices": [{"text": "", "logprobs": told}]}

    return answer


def test_logits_of_a_server_that_gives_them_are_compared_bit_for_bit() -> None:
    seen = soaked(forceable(Model(), 0.0), owned_by="vllm")
    assert seen.compared == 2 * (CANARIES + 1)
    assert not seen.failed
    assert "log-probabilities of the whole vocabulary along 32 given tokens, bit for bit" in seen.statement
    # One bit of FP32, in which they are kept.
    drifted = soaked(forceable(Model(), 2.0**-23), owned_by="vllm")
    assert drifted.changed[0].startswith("the given tokens in round 1: the same text from other log-probabilities")


TEXT = Heard("the right text", "stop", "", (-0.5, -1.25))


@pytest.mark.parametrize(
    ("again", "bits", "message"),
    [
        (TEXT, True, ""),
        (Heard("the right tint", "stop", "", TEXT.logs), True, "its text from character 11 on is 'int', it was 'ext'"),
        (Heard("the right", "stop", "", TEXT.logs), True, "from character 9 on is '', it was ' text'"),
        (Heard("the right text", "length", "", TEXT.logs), True, "it ended by 'length', before by 'stop'"),
        (Heard("", "", "HTTP 400", ()), True, "it ended as 'HTTP 400'"),
        (Heard(TEXT.text, "stop", "", (-0.5, -1.5)), True, "1 of 2 differ, by up to 0.25"),
        (Heard(TEXT.text, "stop", "", (-0.5,)), True, "1 of them, there were 2"),
        (Heard(TEXT.text, "stop", "", (-0.5, -1.5)), False, ""),
        (Heard("\x1b[2Jthe", "stop", "", TEXT.logs), True, "'\\x1b[2Jthe'"),
    ],
)
def test_the_difference_of_two_hearings_is_named(again: Heard, bits: bool, message: str) -> None:
    said = difference([TEXT], again, bits)
    assert message in said
    assert bool(said) == bool(message)
    assert difference([again, TEXT], TEXT, bits) == ""


def test_the_command_soaks_a_server_and_refuses_what_does_not_go_with_one(capsys: Any) -> None:
    with serving(FakeServer(answer=Model())) as fake:
        assert main(["soak", "--url", fake.url, "--minutes", "0.01"]) == 0
        assert "0 of " in (told := capsys.readouterr().out)
        assert "compared: text" in told
        assert main(["soak", "--url", fake.url, "--minutes", "0.01", "--fault", "conv-not-reset"]) == 2
        assert "leave --fault out" in capsys.readouterr().err
        assert main(["soak", "--url", fake.url, "--minutes", "0.01", "--model-name", "other"]) == 2
        assert "has no model 'other'" in capsys.readouterr().err
    assert main(["soak", "--url", fake.url, "--minutes", "0.01"]) == 2
    assert main(["soak", "--url", "ftp://x", "--minutes", "0.01"]) == 2
    assert "is not an address" in capsys.readouterr().err


def test_the_command_fails_where_load_leaves_something_behind(capsys: Any) -> None:
    with serving(FakeServer(answer=Model(after_load(lambda tokens: tokens[1:])))) as fake:
        assert main(["soak", "--url", fake.url, "--minutes", "0.02"]) == 1
    assert "canary 0 in round 1: its text" in capsys.readouterr().out
