"""One question asked of one arm, and what came back: the record that the runners write and the judge reads.

A runner gets requests from `plan_requests`, sends each to both arms in the order of `interleaved`, and keeps one
`Sample` per arm and request. Whoever produced them, `evals.judge.judge_samples` decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Annotated, Literal, Protocol

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue

BASELINE, CANDIDATE = "baseline", "candidate"
ARMS = (BASELINE, CANDIDATE)

ECHOED = ("seed", "temperature", "top_p", "max_tokens")
"""Keys of `Response.effective` that must equal the request's field where a server says them."""

SHARED = ("prompt_tokens", "prompt_sha256")
"""Keys of `Response.effective` that must agree between the arms of one request: both read the same prompt."""

LASTING = ("model", "system_fingerprint")
"""Keys of `Response.effective` that must be the same in all answers of one arm: they come from one server."""


def clean(value: object) -> object:
    """Text that UTF-8 can carry: bytes are decoded, what is invalid becomes U+FFFD, and so do lone surrogates.

    In lists and tables each text is cleaned.
    """
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    if isinstance(value, dict):
        return {clean(key): clean(entry) for key, entry in value.items()}
    return [clean(entry) for entry in value] if isinstance(value, list) else value


Text = Annotated[str, BeforeValidator(clean)]
Table = Annotated[dict[str, JsonValue], BeforeValidator(clean)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:+-]{1,128}$")]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Message(_Model):
    """One turn of a chat."""

    role: Literal["system", "user", "assistant"]
    content: Text


class Request(_Model):
    """One question, the same for both arms: same messages, same seed, same sampling."""

    task: Name
    item: Name
    repeat: Annotated[int, Field(ge=0)]
    messages: tuple[Message, ...] = Field(min_length=1)
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    temperature: Annotated[float, Field(ge=0)]
    top_p: Annotated[float, Field(gt=0, le=1)]
    max_tokens: Annotated[int, Field(ge=1)]

    @property
    def key(self) -> str:
        """`task/item/repeat`; names hold no slash, so two requests share a key only if they are the same."""
        return f"{self.task}/{self.item}/{self.repeat}"


class Response(_Model):
    """What an arm returned.

    `finish_reason` is `stop`, `length` or whatever the server said; `error` is not empty where no answer came (then
    `text` is what had arrived). `tokens` counts the answer's tokens, None where the server does not say. `effective`
    is what the server says it used: keys of `ECHOED` and `SHARED`, and others, which are kept but not compared. `raw`
    is the server's whole reply. `drafts_accepted` is the mean number of accepted drafts per step.
    """

    text: Text = ""
    finish_reason: Text = ""
    tokens: Annotated[int, Field(ge=0)] | None = None
    error: Text = ""
    seconds: Annotated[float, Field(ge=0)] = 0.0
    effective: Table = {}
    raw: Table | None = None
    drafts_accepted: float | None = None


class Sample(_Model):
    """One arm's response to one request."""

    arm: Name
    request: Request
    response: Response

    @property
    def key(self) -> str:
        """`arm/task/item/repeat`: one sample of a run has it."""
        return f"{self.arm}/{self.request.key}"


class Planned(Protocol):
    """What `plan_requests` needs of a task; `evals.tasks.EvalTask` is one."""

    @property
    def name(self) -> str: ...
    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def item_ids(self) -> Sequence[str]: ...
    def messages(self, item_id: str, repeat: int) -> Sequence[Mapping[str, str]]: ...


def seed_of(seed: int, task: str, item: str, repeat: int) -> int:
    """The seed of one request, below 2**31: a function of the run's seed and the request's key alone."""
    digest = sha256(f"{seed}/{task}/{item}/{repeat}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def plan_requests(tasks: Sequence[Planned], repeats: int | Mapping[str, int], seed: int) -> list[Request]:
    """Every item of every task, `repeats` times (or by task name); all items once before any item again.

    A plan with more repeats begins with the same requests, task by task, so a run can be extended.

    Raises:
        ValueError: two tasks or items of one name, or a task without items or repeats.
    """
    names = [task.name for task in tasks]
    if len(set(names)) != len(names):
        raise ValueError(f"tasks are {', '.join(names)}; each may be asked once")
    planned = []
    for task in tasks:
        count = repeats if isinstance(repeats, int) else repeats.get(task.name, 0)
        if count < 1 or not task.item_ids or len(set(task.item_ids)) != len(task.item_ids):
            raise ValueError(
                f"task {task.name}: {count} repeats of {len(task.item_ids)} items, {len(set(task.item_ids))} of them "
                "different; at least one repeat of at least one item is needed, and no item twice"
            )
        planned += [
            Request(
                task=task.name,
                item=item,
                repeat=repeat,
                messages=tuple(Message.model_validate(dict(m)) for m in task.messages(item, repeat)),
                seed=seed_of(seed, task.name, item, repeat),
                temperature=task.temperature,
                top_p=task.top_p,
                max_tokens=task.max_tokens,
            )
            for repeat in range(count)
            for item in task.item_ids
        ]
    return planned


def interleaved(requests: Sequence[Request], arms: Sequence[str] = ARMS) -> Iterator[tuple[str, Request]]:
    """Who is asked what, in order: A B B A A B B A ..., so that a slow drift of a server falls on both arms alike."""
    for place, request in enumerate(requests):
        yield from ((arm, request) for arm in (arms if place % 2 == 0 else tuple(reversed(arms))))
