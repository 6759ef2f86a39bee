"""What both implementations decode: seeded windows of held-out text, and held-out items of three kinds with a limit.

python -m benchmarks.vllm_reference.cases cases.json
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from decode_impl.embedded import EMBEDDED_MODEL

SEED = 17
SEQUENCES, LENGTH = 24, 160
PROMPT_LENGTH = 8
"""Tokens prefilled before the forced decode. A short prompt leaves nearly all of a sequence's history to decode steps,
so that what is compared is decode; one token would be no prefill at all."""

ANSWERS_PER_KIND = 8
MRCR_NEEDLES, MRCR_CHARACTERS = 2, 700
SPARE_TOKENS = 40
"""Tokens that an answer may be longer than the right one."""


@dataclass(frozen=True)
class Question:
    """One item to answer greedily: its prompt's token ids, and the most tokens that the answer may have."""

    kind: str
    prompt: list[int]
    limit: int


@dataclass(frozen=True)
class Cases:
    """`sequences` are all of one length; their first `prompt_length` tokens are prefilled."""

    seed: int
    prompt_length: int
    eos: int
    sequences: list[list[int]]
    questions: list[Question]

    @property
    def length(self) -> int:
        """Tokens of one sequence."""
        return len(self.sequences[0])


def build(sequences: int = SEQUENCES, length: int = LENGTH, answers: int = ANSWERS_PER_KIND, seed: int = SEED) -> Cases:
    """The cases of the embedded model, a function of the arguments alone."""
    from evals.items.shards import EOS
    from validation.gates.parity.measure import windows
    from validation.targets.builtin import BuiltinTarget

    text = windows(BuiltinTarget.load(EMBEDDED_MODEL), sequences, length, seed)
    return Cases(seed, PROMPT_LENGTH, EOS, text, questions(answers))


def questions(count: int) -> list[Question]:
    """The first `count` held-out items of every kind, as the model's chat tokens."""
    from evals.items import aime, gpqa, mrcr
    from evals.items.shards import WEIGHT, chat_tokens

    asked = []
    for kind in ("aime", "gpqa", "mrcr"):
        for index in range(count):
            if kind == "mrcr":
                item = mrcr.item("eval", index, MRCR_NEEDLES, MRCR_CHARACTERS)
                chat = mrcr.messages(item.row)
            elif kind == "gpqa":
                item = gpqa.item("eval", index)
                chat = gpqa.messages(item.row, 0)
            else:
                item = aime.item("eval", index)
                chat = aime.messages(item.row)
            prompt = [int(token) % WEIGHT for part in chat_tokens(chat, 0) for token in part]
            asked.append(Question(kind, prompt, len(item.target.encode()) + SPARE_TOKENS))
    return asked


def write(cases: Cases, file: Path) -> None:
    """Write the cases as JSON."""
    file.write_text(json.dumps(asdict(cases)) + "\n", encoding="utf-8")


def read(file: Path) -> Cases:
    """Read cases that `write` wrote.

    Raises:
        ValueError: the file is no cases file, or its sequences differ in length.
    """
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        fields["questions"] = [Question(**question) for question in fields["questions"]]
        cases = Cases(**fields)
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file}: not a cases file ({error}); make one with `cases.py FILE`") from None
    if len({len(sequence) for sequence in cases.sequences}) != 1:
        raise ValueError(f"{file}: sequences of one length are needed")
    return cases


def main() -> None:
    """Write the cases."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path)
    write(build(), parser.parse_args().file)


if __name__ == "__main__":
    main()
