"""`python -m validation.records.schema` prints the JSON schema of `record.json`, as kept in docs/record.schema.json."""

from __future__ import annotations

import json
from typing import Any

from validation.records.record import RunRecord


def record_schema() -> dict[str, Any]:
    """JSON schema of a run record, as it is written."""
    return RunRecord.model_json_schema(mode="serialization")


def schema_text() -> str:
    """The schema as the file in docs/ holds it."""
    return json.dumps(record_schema(), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    print(schema_text(), end="")
