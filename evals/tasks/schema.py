"""Items of the three kinds of eval, by the field names of the published sets; generated items have the same."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from evals.samples import Message


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


AsText = Annotated[str, BeforeValidator(_text), Field(min_length=1)]
"""A text; a number in the file is read as its digits."""


class _Item(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True)


class MathItem(_Item):
    """A problem with one boxed answer: an integer (AIME) or an expression (HMMT)."""

    problem: AsText
    answer: AsText
    id: AsText


class ChoiceItem(_Item):
    """A question with one right and three wrong answers, as in GPQA."""

    id: AsText = Field(alias="Record ID")
    question: AsText = Field(alias="Question")
    right: AsText = Field(alias="Correct Answer")
    wrong1: AsText = Field(alias="Incorrect Answer 1")
    wrong2: AsText = Field(alias="Incorrect Answer 2")
    wrong3: AsText = Field(alias="Incorrect Answer 3")
    domain: str = Field(default="", alias="High-level domain")

    def row(self) -> dict[str, Any]:
        """The item by the published names."""
        return self.model_dump(by_alias=True)


class NeedleItem(_Item):
    """A chat in which one request was made `n_needles` times, as in OpenAI's MRCR; `prompt` is the chat as JSON."""

    prompt: str
    answer: AsText
    random_string_to_prepend: AsText
    n_needles: int = Field(ge=1)
    desired_msg_index: int = Field(ge=0)
    total_messages: int = Field(ge=1)
    n_chars: int = Field(ge=1)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.answer.startswith(self.random_string_to_prepend):
            raise ValueError("the answer does not start with random_string_to_prepend")
        if len(self.messages()) != self.total_messages:
            raise ValueError(f"total_messages is {self.total_messages}, the prompt has {len(self.messages())}")
        return self

    @property
    def id(self) -> str:
        """The published rows have none: a digest of the chat."""
        return sha256(self.prompt.encode()).hexdigest()[:16]

    def messages(self) -> list[Message]:
        """The chat."""
        return [Message.model_validate(message) for message in json.loads(self.prompt)]


AnyItem = MathItem | ChoiceItem | NeedleItem
