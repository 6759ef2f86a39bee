"""The target `openai`: two servers that speak OpenAI's protocol, asked over HTTP.

What decodes there is not seen. What a server says of itself (its configuration, its metrics, its log) decides whether
an arm counts as having run the backend that it was asked for.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from evals.runner.client import Client, EndpointDown
from evals.runner.endpoint import Endpoint, EndpointError, Limits
from evals.runner.journal import JournalError
from evals.runner.run import CONCURRENCY, run_requests
from evals.samples import Request, Sample
from validation.errors import one_line
from validation.targets.base import ArmConfig, Capability, TargetError
from validation.targets.openai_arm import OpenAIArm
from validation.targets.openai_evidence import SPECIALIZED, Evidence, gather, place
from validation.targets.openai_forced import (
    OpenAIForcedDecode,
    can_be_forced,
    forced_logits,
    tokens_of,
)

HOW_TO_SHOW = (
    "start vLLM with VLLM_SERVER_DEV_MODE=1, name a sign that its log or metrics then hold, or compare it as it is "
    "(decode_backend 'auto' in both arms)"
)


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ServerOptions(_Options):
    """One arm's server. `sign` is a text that its log or its metrics hold only if it decodes by its own path; `log` is
    the file that its log is written to, if it can be read here."""

    url: str
    model: str = ""
    api: str = "chat"
    key_variable: str = ""
    extra: dict[str, JsonValue] = {}
    log: str = ""
    sign: str = ""

    def endpoint(self) -> Endpoint:
        """Where this arm is asked."""
        return Endpoint(self.url, self.model, self.api, self.key_variable, self.extra)


class OpenAIOptions(_Options):
    """`[target.options]` of a profile. Times are in seconds, see `evals.runner.endpoint.Limits`."""

    baseline: ServerOptions
    candidate: ServerOptions
    concurrency: int = Field(default=CONCURRENCY, ge=1, le=4096)
    connect_seconds: float = Field(default=10, gt=0)
    answer_seconds: float = Field(default=1800, gt=0)
    patience_seconds: float = Field(default=600, ge=0)


class OpenAITarget:
    """Two servers, one for each arm."""

    name = "openai"
    capabilities = frozenset({Capability.CONVERSE})
    """Of every pair of servers. Two that can be forced have more, see `openai_forced`."""

    def __init__(self, options: OpenAIOptions) -> None:
        self.options = options
        self._limits = Limits(
            connect=options.connect_seconds, answer=options.answer_seconds, patience=options.patience_seconds
        )
        self._folder: Path | None = None
        self._arms: dict[ArmConfig, OpenAIArm] = {}
        self._evidence: dict[str, Evidence] = {}
        self._tokens: dict[str, list[int]] = {}
        try:
            self._endpoints = {arm: self.server(arm).endpoint() for arm in ("baseline", "candidate")}
            for arm, endpoint in self._endpoints.items():
                self._evidence[arm] = self._gather(arm, endpoint)
            if all(self._can_be_forced(arm) for arm in self._endpoints):
                self.capabilities |= {Capability.TEACHER_FORCED, Capability.FULL_LOGITS}
        except (EndpointError, EndpointDown) as error:
            raise TargetError(str(error)) from None

    @classmethod
    def configured(cls, model_path: Path | None, options: Mapping[str, Any]) -> OpenAITarget:
        """The target of a profile. A model's folder is of no use here: the servers have loaded theirs.

        Raises:
            TargetError: the options are not those of `OpenAIOptions`, or a server cannot be reached.
        """
        if model_path is not None:
            raise TargetError("target 'openai' loads no model; leave --model out, servers are named by their address")
        try:
            return cls(OpenAIOptions.model_validate(dict(options)))
        except ValidationError as error:
            first = error.errors()[0]
            raise TargetError(f"target.options.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None

    def server(self, arm: str) -> ServerOptions:
        """The server of an arm.

        Raises:
            TargetError: no arm is called so.
        """
        if arm not in ("baseline", "candidate"):
            raise TargetError(f"arm {arm} has no server; there is one for the baseline and one for the candidate")
        server: ServerOptions = getattr(self.options, arm)
        return server

    def keep_in(self, folder: Path) -> None:
        """Keep every answer in this folder as it comes, and use those that are there."""
        self._folder = folder

    def fingerprint(self) -> dict[str, str]:
        """What each server says that it is."""
        return {
            f"{arm} {name}": value
            for arm, evidence in self._evidence.items()
            for name, value in evidence.identity.items()
        }

    def open(self, config: ArmConfig) -> OpenAIArm:
        """The arm of this name; how its server decodes was decided when that was started.

        Raises:
            TargetError: there is no such server, or it was started otherwise than the arm says.
        """
        self.server(config.name)
        if config.faults:
            raise TargetError(f"arm {config.name}: faults cannot be put into a server")
        evidence = self._evidence[config.name]
        reason = evidence.contradicts(config)
        if (
            not reason
            and config.decode_backend == SPECIALIZED
            and not (evidence.shown or self.server(config.name).sign)
        ):
            reason = f"nothing would show that its server runs {SPECIALIZED}: {HOW_TO_SHOW}"
        if not reason and config.decode_backend == SPECIALIZED and self._one_server():
            reason = "its server is the baseline's too, so nothing would be compared; start two"
        if reason:
            raise TargetError(f"arm {config.name}: {reason}")
        return self._arms.setdefault(config, OpenAIArm(config, self))

    def samples(self, requests: Sequence[Request], arms: Sequence[ArmConfig]) -> list[Sample]:
        """Ask both servers, interleaved; every answer is kept before the next is waited for.

        Raises:
            TargetError: a server stayed away, became another one in between, or its answers cannot be kept.
        """
        endpoints = {arm.name: self._endpoints[arm.name] for arm in arms}
        for arm in arms:
            self.open(arm)
        key = sha256(json.dumps([request.model_dump(mode="json") for request in requests]).encode()).hexdigest()
        journal = (self._folder or Path()) / f"{key[:32]}.jsonl"
        if self._folder is None:
            raise TargetError("target 'openai' has no folder to keep answers in; it is used through a run")
        try:
            samples = run_requests(
                requests, endpoints, journal, concurrency=self.options.concurrency, limits=self._limits
            )
            self._same_servers(journal)
        except (EndpointDown, EndpointError, JournalError) as error:
            raise TargetError(one_line(error)) from None
        for arm in arms:
            answers = sum(sample.arm == arm.name for sample in samples)
            self._arms[arm].count(answers, self._evidence[arm.name], self._one_path())
        return samples

    def forced_decode(
        self, arm: OpenAIArm, sequences: Sequence[Sequence[int]], prompt_length: int
    ) -> OpenAIForcedDecode:
        """Decode fixed tokens on an arm's server."""
        name = arm.config.name
        logits = forced_logits(self._endpoints[name], *self._asked(name), sequences, prompt_length)
        path = arm.count(len(logits), self._evidence[name], self._one_path())
        return OpenAIForcedDecode(logits, path, prompt_length)

    def _can_be_forced(self, arm: str) -> bool:
        return self._evidence[arm].is_vllm and can_be_forced(self._endpoints[arm], *self._asked(arm))

    def _asked(self, arm: str) -> tuple[str, Limits]:
        return self._evidence[arm].identity["model"], self._limits

    def _gather(self, arm: str, endpoint: Endpoint, patience: float = 0.0) -> Evidence:
        server = self.server(arm)

        async def run() -> Evidence:
            async with Client(endpoint, self._limits) as client:
                return await gather(client, server.log, server.sign or self.options.candidate.sign)

        until = time.monotonic() + patience
        while True:
            try:
                return asyncio.run(run())
            except EndpointDown:
                if time.monotonic() >= until:
                    raise
                time.sleep(self._limits.longest_pause)

    def _one_server(self) -> bool:
        return len({(place(e.identity["url"]), e.identity["model"]) for e in self._evidence.values()}) == 1

    def _one_path(self) -> bool:
        """Whether the baseline's server shows the candidate's sign, though its arm is not asked for that path."""
        asked = {arm.decode_backend for arm in self._arms if arm.name == "baseline"}
        return self._evidence["baseline"].shown and SPECIALIZED not in asked

    def _same_servers(self, journal: Path) -> None:
        """A server may be restarted in mid-run, but not become another one: its answers are then put aside."""
        for arm, endpoint in self._endpoints.items():
            now = self._gather(arm, endpoint, self._limits.patience)
            changed = now.changed_from(self._evidence[arm])
            if changed:
                journal.replace(journal.with_suffix(".mixed"))
                raise TargetError(f"the {arm}'s server is no longer what it was: {changed}; start a new run")
            self._evidence[arm] = now

    def tokens(self, text: str) -> list[int]:
        """Token ids of `text` by the baseline's server, in pieces that it surely takes.

        Raises:
            TargetError: it does not tell, as only vLLM does.
        """
        if text not in self._tokens:
            model, limits = self._asked("baseline")
            self._tokens[text] = tokens_of(self._endpoints["baseline"], model, limits, text)
        return self._tokens[text]

    def text(self, tokens: Sequence[int]) -> NoReturn:
        raise TargetError("the servers' tokenizers are not used; text goes in and comes out")

    def chat(self, messages: Sequence[Mapping[str, str]]) -> NoReturn:
        raise TargetError("the servers' chat templates are used where they are")

    def stop_tokens(self) -> list[int]:
        """None: servers end answers by themselves."""
        return []

    def dims(self) -> Mapping[str, int]:
        """None: the servers' models are not seen."""
        return {}
