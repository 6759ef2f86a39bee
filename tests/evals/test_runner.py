"""The runner's promises, on a server that misbehaves: no answer lost, none counted twice, none asked for twice."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_openai import FakeServer, Fault, chat_reply, serving

from evals.runner.client import Client, EndpointDown
from evals.runner.endpoint import Endpoint, EndpointError, Limits
from evals.runner.journal import Journal, JournalError
from evals.runner.replies import hidden, response_from
from evals.runner.run import run_requests
from evals.samples import Request, Sample

QUICK = Limits(connect=2, answer=5, patience=1, tries=3, first_pause=0.01, longest_pause=0.02, reply_bytes=2**20)


def requests(count: int = 6) -> list[Request]:
    return [
        Request(
            task="sums",
            item=str(i),
            repeat=0,
            messages=({"role": "user", "content": f"{i} + 1?"},),
            seed=i,
            temperature=0.5,
            top_p=0.9,
            max_tokens=16,
        )
        for i in range(count)
    ]


def run(a: FakeServer, b: FakeServer, journal: Path, count: int = 6, **options: Any) -> list[Sample]:
    endpoints = {"baseline": Endpoint(a.url), "candidate": Endpoint(b.url)}
    return run_requests(requests(count), endpoints, journal, **{"limits": QUICK, "concurrency": 3, **options})


def asked(server: FakeServer) -> Counter[str]:
    return Counter(json.loads(body)["messages"][0]["content"] for body in server.seen)


def one(fault: Fault, tmp_path: Path) -> tuple[FakeServer, Sample]:
    """A candidate with one fault, asked one question; and the candidate's sample."""
    with serving(FakeServer()) as a, serving(FakeServer(faults=[fault])) as b:
        samples = run(a, b, tmp_path / "j", 1)
    assert not samples[0].response.error
    return b, samples[1]


def test_both_arms_are_asked_the_same_bytes_and_seed(tmp_path: Path) -> None:
    with serving(FakeServer()) as a, serving(FakeServer()) as b:
        samples = run(a, b, tmp_path / "j")
    assert sorted(a.seen) == sorted(b.seen)
    assert {json.loads(body)["seed"] for body in a.seen} == set(range(6))
    assert [s.key for s in samples] == [f"{arm}/sums/{i}/0" for i in range(6) for arm in ("baseline", "candidate")]


def test_arms_are_interleaved_a_b_b_a(tmp_path: Path) -> None:
    order: list[str] = []

    def noting(name: str) -> FakeServer:
        return FakeServer(answer=lambda asked: order.append(name) or chat_reply("x", asked))  # type: ignore[func-returns-value]

    with serving(noting("A")) as a, serving(noting("B")) as b:
        run(a, b, tmp_path / "j", 4, concurrency=1)
    assert "".join(order) == "ABBAABBA"


def test_no_more_questions_are_on_their_way_than_allowed(tmp_path: Path) -> None:
    def slow(asked: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.02)
        return chat_reply("x", asked)

    with serving(FakeServer(answer=slow)) as server:
        endpoints = {"baseline": Endpoint(server.url), "candidate": Endpoint(server.url)}
        run_requests(requests(8), endpoints, tmp_path / "j", limits=QUICK, concurrency=3)
    assert 2 <= server.most <= 3


@pytest.mark.parametrize(
    "fault",
    [Fault("reset"), Fault("cut"), Fault("status", 500), Fault("status", 502), Fault("status", 503)],
    ids=lambda fault: f"{fault.kind}-{fault.status}",
)
def test_a_question_that_got_no_answer_is_asked_again(fault: Fault, tmp_path: Path) -> None:
    server, sample = one(fault, tmp_path)
    assert (sample.response.text, sample.response.error) == ("right", "")
    assert len(server.seen) == 2


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b'{"choices": [{"mess', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a":' + b"[" * 200 + b"]" * 200 + b"}", "not JSON"),
        (b'{"usage": {"completion_tokens": NaN}}', "not JSON"),
        (b'{"choices": [{"text": "x", "logprob": 1e999}]}', "recorded"),
        (b"[]", "no JSON object"),
        (b'{"choices": []}', "exactly one choice"),
        (b'{"choices": [{"message": {"content": 5}, "finish_reason": "stop"}]}', "no text"),
        (b'{"choices": [{"message": {"content": null}, "finish_reason": "stop"}]}', "no text"),
    ],
)
def test_a_bad_answer_is_kept_and_never_asked_for_again(body: bytes, error: str, tmp_path: Path) -> None:
    server, sample = one(Fault("body", body=body), tmp_path)
    assert error in sample.response.error
    assert sample.response.raw
    assert len(server.seen) == 1


@pytest.mark.parametrize("status", [301, 400, 401, 404, 418])
def test_a_refusal_is_an_error_of_its_arm_and_not_asked_again(status: int, tmp_path: Path) -> None:
    server, sample = one(Fault("status", status), tmp_path)
    assert sample.response.error == f"HTTP {status}: no"
    assert len(server.seen) == 1


def test_a_wrong_answer_is_not_asked_for_again(tmp_path: Path) -> None:
    with serving(FakeServer()) as a, serving(FakeServer(answer=lambda asked: chat_reply("", asked))) as b:
        samples = run(a, b, tmp_path / "j")
    assert {s.response.text for s in samples if s.arm == "candidate"} == {""}
    assert set(asked(b).values()) == {1}


def test_an_answer_that_takes_too_long_is_an_error_of_its_arm(tmp_path: Path) -> None:
    with serving(FakeServer()) as a, serving(FakeServer(faults=[Fault("body", seconds=0.6)])) as b:
        samples = run(a, b, tmp_path / "j", 1, limits=Limits(answer=0.2))
    assert samples[1].response.error == "no answer within 0.2 s"
    assert len(b.seen) == 1


def test_a_reply_without_end_is_cut_off(tmp_path: Path) -> None:
    _, sample = one(Fault("body", body=b" " * (2**20 + 1)), tmp_path)
    assert "larger than" in sample.response.error


def test_a_question_that_always_kills_its_connection_is_given_up_while_the_server_is_there(tmp_path: Path) -> None:
    with serving(FakeServer()) as a, serving(FakeServer(faults=[Fault("reset")] * 3)) as b:
        samples = run(a, b, tmp_path / "j", 2, concurrency=1)
    errors = [s.response.error for s in samples if s.arm == "candidate"]
    assert sorted(bool(error) for error in errors) == [False, True]
    assert "no answer in 3 tries" in "".join(errors)


def test_hostile_bytes_are_kept_as_text_and_break_nothing(tmp_path: Path) -> None:
    body = b'{"choices": [{"message": {"content": "\xff\\u001b[2J<script>\\ud800\\u0000"}, "finish_reason": "stop"}]}'
    _, sample = one(Fault("body", body=body), tmp_path)
    assert sample.response.text == "\ufffd\x1b[2J<script>\ufffd\ufffd\ufffd\x00"
    with Journal(tmp_path / "j", _plan(tmp_path / "j")) as journal:
        assert journal.samples[sample.key] == sample


def test_a_server_that_ends_in_its_thoughts_gave_an_empty_answer_and_no_error(tmp_path: Path) -> None:
    """An end of text drawn too early is damage: as an error its pair would be left out of the scores."""
    body = b'{"choices": [{"message": {"content": null, "reasoning_content": "so"}, "finish_reason": "stop"}]}'
    _, sample = one(Fault("body", body=body), tmp_path)
    assert (sample.response.text, sample.response.error) == ("", "")


def test_patience_is_counted_from_when_a_server_went_away_and_not_from_the_question(tmp_path: Path) -> None:
    """An answer of twice the patience, cut short by a restart: the server is waited for, and asked again."""
    slow = Fault("reset", seconds=0.8)
    with serving(FakeServer()) as a, serving(FakeServer(faults=[slow, Fault("status", 503)])) as b:
        patient = Limits(connect=2, answer=5, patience=0.4, first_pause=0.01, longest_pause=0.02)
        samples = run(a, b, tmp_path / "j", 1, limits=patient)
    assert [s.response.text for s in samples] == ["right", "right"]


def test_a_list_of_models_that_comes_late_is_asked_for_again_and_no_error_of_the_answer(tmp_path: Path) -> None:
    with serving(FakeServer()) as a, serving(FakeServer(list_seconds=[0.6])) as b:
        quick = Limits(connect=0.2, answer=5, patience=5, first_pause=0.01, longest_pause=0.02)
        samples = run(a, b, tmp_path / "j", 1, limits=quick)
    assert [s.response.error for s in samples] == ["", ""]


def test_what_the_server_says_it_used_is_kept_for_the_judge(tmp_path: Path) -> None:
    def echo(asked: dict[str, Any]) -> dict[str, Any]:
        return chat_reply("x", asked, parameters={"seed": 99, "temperature": 0.5}, prompt_token_ids=[1, 2, 3])

    with serving(FakeServer()) as a, serving(FakeServer(answer=echo)) as b:
        effective = run(a, b, tmp_path / "j", 1)[1].response.effective
    assert (effective["seed"], effective["temperature"], effective["prompt_tokens"]) == (99, 0.5, 7)
    assert len(str(effective["prompt_sha256"])) == 64


def test_a_server_that_was_restarted_in_mid_run_loses_and_doubles_nothing(tmp_path: Path) -> None:
    first = FakeServer()
    stop = threading.Event()

    def counting(asked: dict[str, Any]) -> dict[str, Any]:
        if len(first.seen) >= 5:
            stop.set()
            time.sleep(0.2)
        return chat_reply("right", asked)

    first.answer = counting
    result: list[list[Sample]] = []
    with serving(FakeServer()) as a:
        with serving(first):
            endpoints = {"baseline": Endpoint(a.url), "candidate": Endpoint(first.url)}
            patient = Limits(connect=1, answer=5, patience=20, first_pause=0.01, longest_pause=0.05)
            thread = threading.Thread(
                target=lambda: result.append(
                    run_requests(requests(12), endpoints, tmp_path / "j", limits=patient, concurrency=4)
                )
            )
            thread.start()
            assert stop.wait(10)
        time.sleep(0.3)
        with serving(FakeServer(port=first.port)):
            thread.join(20)
    assert len({s.key for s in result[0]}) == len(result[0]) == 24
    assert {s.response.text for s in result[0]} == {"right"}


def test_a_server_that_stays_away_ends_the_run_and_the_next_one_asks_only_what_is_left(tmp_path: Path) -> None:
    with serving(FakeServer()) as a:
        with serving(FakeServer()) as b:
            port = b.port
        gone = FakeServer(port=port)
        with pytest.raises(EndpointDown, match="has not answered"):
            run(a, gone, tmp_path / "j")
        answered = asked(a)
        with serving(gone):
            samples = run(a, gone, tmp_path / "j")
    assert answered
    assert set(asked(a).values()) == {1}
    assert len(samples) == 12
    assert not any(s.response.error for s in samples)


def test_a_run_killed_at_any_byte_resumes_without_loss_or_double(tmp_path: Path) -> None:
    with serving(FakeServer()) as a, serving(FakeServer()) as b:
        whole = run(a, b, tmp_path / "j", 2)
        data = (tmp_path / "j").read_bytes()
        ends = [i + 1 for i, byte in enumerate(data) if byte == 10]
        cuts = {0, 1, *ends, *(end - 1 for end in ends), *(end - 20 for end in ends)}
        for cut in sorted(cuts):
            (tmp_path / "cut").write_bytes(data[:cut])
            a.seen.clear()
            b.seen.clear()
            again = run(a, b, tmp_path / "cut", 2)
            kept = max(0, sum(end <= cut for end in ends) - 1)
            assert [s.key for s in again] == [s.key for s in whole]
            assert len(a.seen) + len(b.seen) == 4 - kept
            assert (tmp_path / "cut").read_bytes().count(b"\n") == 5


ANY_ESCAPE = re.compile(r"\\u([0-9a-f]{4})")


def _plan(path: Path) -> str:
    return str(json.loads(path.read_bytes().split(b"\n")[0])["content"]["plan"])


def _journal(tmp_path: Path) -> Path:
    with serving(FakeServer()) as a, serving(FakeServer()) as b:
        run(a, b, tmp_path / "j", 3)
    return tmp_path / "j"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: [lines[0], lines[1].replace(b"right", b"wrong"), *lines[2:]], "line 2 of 7 is damaged"),
        (lambda lines: [*lines[:3], lines[2], *lines[3:]], "twice"),
        (lambda lines: [lines[0].replace(b'"journal":1', b'"journal":2'), *lines[1:]], "line 1 of 7 is damaged"),
    ],
)
def test_a_journal_that_was_edited_is_refused(damage: Any, message: str, tmp_path: Path) -> None:
    path = _journal(tmp_path)
    plan = _plan(path)
    path.write_bytes(b"\n".join(damage(path.read_bytes().split(b"\n"))))
    with pytest.raises(JournalError, match=message):
        Journal(path, plan)


def test_a_journal_belongs_to_its_questions_and_arms(tmp_path: Path) -> None:
    path = _journal(tmp_path)
    with serving(FakeServer()) as a, serving(FakeServer()) as b, pytest.raises(JournalError, match="other questions"):
        run(a, b, path, 3)
    assert not a.seen


def test_two_processes_cannot_write_one_journal(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", "p"), pytest.raises(JournalError, match="another process"):
        Journal(tmp_path / "j", "p")


def test_the_key_comes_from_the_environment_and_goes_nowhere_but_the_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "sk-very-secret-0123"
    escaped = b'{"choices": [{"message": {"content": "sk\\u002dvery-secret-0123"}, "finish_reason": "stop"}]}'
    monkeypatch.setenv("MY_KEY", secret)
    leak = FakeServer(answer=lambda asked: chat_reply(f"your key is {secret}", asked))
    with serving(leak) as server:
        endpoint = Endpoint(server.url, key_variable="MY_KEY")
        samples = run_requests(requests(1), {"baseline": endpoint, "candidate": endpoint}, tmp_path / "j", limits=QUICK)
    assert all(headers["Authorization"] == f"Bearer {secret}" for headers in leak.headers)
    assert samples[0].response.text == "your key is ***"
    assert secret in ANY_ESCAPE.sub(lambda m: chr(int(m[1], 16)), escaped.decode())
    said = response_from(200, escaped, 0.0, secret)
    assert (said.text, secret in said.model_dump_json()) == ("***", False)
    assert b"a\\/b" not in hidden(b"no JSON: a\\/b-key-0123", "a/b-key-0123")
    assert secret not in repr(endpoint) + str(endpoint.public()) + (tmp_path / "j").read_text()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("localhost:8000", "not an address"),
        ("file:///etc/passwd", "not an address"),
        ("http://me:pw@host/v1", "carries a user"),
        ("http://host/v1?key=x", "carries a user, a query"),
        ("http://host:99999/", "not an address"),
        ("http://ho st/", "not an address"),
    ],
)
def test_an_address_that_is_none_or_carries_secrets_is_refused_without_repeating_them(url: str, message: str) -> None:
    with pytest.raises(EndpointError, match=message) as refused:
        Endpoint(url)
    assert "pw" not in str(refused.value)


def test_a_missing_key_and_a_model_that_must_be_named_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_KEY", raising=False)
    with pytest.raises(EndpointError, match="NO_KEY is not set"):
        Endpoint("http://localhost/v1", key_variable="NO_KEY").key()
    with serving(FakeServer(models=["a", "b"])) as server, pytest.raises(EndpointError, match="lists 2 models"):
        run(server, server, tmp_path / "j", 1)


def test_completions_are_asked_by_prompt(tmp_path: Path) -> None:
    server = FakeServer(answer=lambda asked: {"choices": [{"text": asked["prompt"], "finish_reason": "stop"}]})
    with serving(server):
        endpoint = Endpoint(server.url, api="completions")
        sample = run_requests(requests(1), {"baseline": endpoint}, tmp_path / "j", limits=QUICK)[0]
    assert sample.response.text == "0 + 1?"


def test_a_page_that_cannot_be_decoded_is_a_server_that_is_away() -> None:
    def broken(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"Content-Encoding": "gzip"}, stream=httpx.ByteStream(b"no gzip"))

    async def look() -> bool:
        async with Client(Endpoint("http://x"), QUICK, httpx.MockTransport(broken)) as client:
            with pytest.raises(EndpointDown, match="DecodingError"):
                await client.fetch("http://x/metrics")
            return await client.alive()

    assert not asyncio.run(look())
