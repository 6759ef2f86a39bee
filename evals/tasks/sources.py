"""Where the published sets are, under which licence, at which revision and digests. No content is here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Source:
    """A data set on the Hugging Face Hub, pinned.

    `files` maps a file's path to its accepted digests, `sha256:...` or `git:...` (the id of the file's blob, which the
    Hub shows). `revision` is a commit of the data set's repository; where it is None nobody has pinned the set here,
    and it is only read from a local folder.
    """

    repository: str
    revision: str | None
    files: Mapping[str, tuple[str, ...]]
    rows: int
    licence: str
    renamed: Mapping[str, str] = field(default_factory=dict)

    @property
    def page(self) -> str:
        """The page with the licence, and where access is asked for."""
        return f"https://huggingface.co/datasets/{self.repository}"


AIME25 = Source(
    repository="math-ai/aime25",
    revision="563bb8404243c5f09de6ec262f2db674fe5bce9b",
    files={"test.jsonl": ("sha256:b4e273c02d3e7fe1b74b59eae768fc8230bfb0f79539890cb56f4361caac0331",)},
    rows=30,
    licence="Apache-2.0 by its card; the problems are the Mathematical Association of America's",
)

AIME26 = Source(
    repository="math-ai/aime26",
    revision="79037aebdb6580008fb960d17cb21fd3099083e3",
    files={"aime2026.jsonl": ()},
    rows=30,
    licence="Apache-2.0 by its card; the problems are the Mathematical Association of America's",
)

HMMT26 = Source(
    repository="MathArena/hmmt_feb_2026",
    revision=None,
    files={"data/train-00000-of-00001.parquet": ()},
    rows=33,
    licence="CC BY-NC-SA 4.0",
    renamed={"problem_idx": "id"},
)

GPQA_DIAMOND = Source(
    repository="Idavidrein/gpqa",
    revision="83022cefff930aea54f654c0b282e74b9eeda5c6",
    files={
        "gpqa_diamond.csv": (
            "git:7589e3e467d69a1dceb126a60c4108d6d4f1d166",
            # The same table in the authors' archive and in OpenAI's copy.
            "sha256:41d1213cd7a4998605a26c2798500652572007161b3a92817ba46b35befcd305",
        )
    },
    rows=198,
    licence="CC BY 4.0, gated: the terms ask not to publish examples",
)

MRCR = Source(
    repository="openai/mrcr",
    # The correction of December 2025.
    revision="f4c69fae7cf81f7ca26b9fee34b392a50f6b8a1d",
    files={
        "2needle/2needle_0.parquet": ("sha256:1c297b254bf64a31856b74918cd7db889a214503e0b67daa834e84f20df6aa93",),
        "2needle/2needle_1.parquet": ("sha256:a5a1dc9ccc945623253d04d33c03d89aee2d676c88955ce368da2ab16a0ce94d",),
        "4needle/4needle_0.parquet": ("sha256:4d4fa3d11ce064749de3cd039eef1a621e30a81c2c9b3e64f1df37f8afeaf312",),
        "4needle/4needle_1.parquet": ("sha256:8dfdb94a208cf3eee73c4e7ac6ee8a5ccb7236c6934c13c6c5f67c0a9928cdf3",),
        "8needle/8needle_0.parquet": ("sha256:65df601a2e0ae4a3cfb56920a6ef99f26c0de37c6b1018695e8aed684e6a94c1",),
        "8needle/8needle_1.parquet": ("sha256:c80b19573bff1d38e1c157d6a0bdf9cfd1a8ab6372296174c9a7015e164189e3",),
    },
    rows=2400,
    licence="MIT",
)
