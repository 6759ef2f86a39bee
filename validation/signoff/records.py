"""What a sign-off demands of the records themselves: finished, honest, recent, and all of one thing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from typing import Any

from validation.errors import UsageError
from validation.profile import load_profile, profile_names
from validation.records.record import RunRecord
from validation.signoff.policy import Policy
from validation.signoff.ruling import Outcome, Ruling

_ARMS = ("baseline", "candidate")


def record_rulings(policy: Policy, records: Sequence[RunRecord], day: date) -> Iterator[Ruling]:
    """Rulings about each record, what they share, and the profiles asked for. None of them can be waived."""
    for record in records:
        yield _record_ruling(policy, record, day)
    yield _one_thing(records)
    for name in dict.fromkeys(policy.profiles):
        yield _profile_ruling(policy, name, records)


def _record_ruling(policy: Policy, record: RunRecord, day: date) -> Ruling:
    subject = f"record {record.run.id}"
    stable = record.stable
    if stable.faults:
        names = ", ".join(fault.id for fault in stable.faults)
        return Ruling(
            subject, Outcome.NO_GO, f"faults were injected on purpose: {names}; it says nothing about the candidate"
        )
    if _one_arm(record):
        return Ruling(
            subject, Outcome.NO_GO, "both arms are one: the same backend of the same thing; nothing was compared"
        )
    if record.status != "finished":
        return Ruling(subject, Outcome.INCONCLUSIVE, "the run is not finished; resume it")
    if record.environment.git_dirty and not policy.allow_uncommitted:
        return Ruling(
            subject, Outcome.NO_GO, "made from a source tree with uncommitted changes, which nobody can check out"
        )
    # A resumed run keeps what was measured when it began.
    age = (day - _day(record, "created", record.run.created)).days
    if policy.max_age_days is not None and age > policy.max_age_days:
        return Ruling(subject, Outcome.NO_GO, f"begun {age} days ago; {policy.max_age_days} are allowed")
    ahead = max(-age, (_day(record, "finished", record.run.finished) - day).days)
    if ahead > 1:
        return Ruling(subject, Outcome.INCONCLUSIVE, f"dated {ahead} days from now; a clock is wrong")
    verdict = stable.verdict.value if stable.verdict else "none"
    return Ruling(
        subject, Outcome.GO, f"profile {stable.profile.name}, finished {record.run.finished}, verdict {verdict}"
    )


def _one_arm(record: RunRecord) -> bool:
    """Whether the arms differ in nothing but their names, neither as configured nor as the target says of each."""
    arms, said = record.stable.arms, record.stable.target.fingerprint
    configured = [{key: value for key, value in arms[arm].items() if key not in ("name", "faults")} for arm in _ARMS]
    told = [{n.removeprefix(f"{arm} "): s for n, s in said.items() if n.startswith(f"{arm} ")} for arm in _ARMS]
    return configured[0] == configured[1] and told[0] == told[1]


def _day(record: RunRecord, what: str, time: str | None) -> date:
    """A time of a run as a day in UTC.

    Raises:
        UsageError: it is no such time.
    """
    try:
        return datetime.fromisoformat(time or "").astimezone(UTC).date()
    except (ValueError, OverflowError) as error:
        raise UsageError(f"record {record.run.id!r}: run.{what} is {time!r}, no ISO 8601 time") from error


_MACHINE = frozenset({"device", "torch", "specialised path", "url", "engine", "max_model_len", "kv_cache_dtype"})
"""Ends of names in a target's fingerprint that say where and how it ran: a pair of records may differ there."""


def identity(record: RunRecord) -> dict[str, str]:
    """What all records of one sign-off must share: code, commit, what was judged, and the two backends."""
    stable = record.stable
    judged = {name: said for name, said in stable.target.fingerprint.items() if not _of_the_machine(name)}
    return {
        "decodegate": stable.decodegate,
        "commit": record.environment.git_commit or "unknown",
        "target": stable.target.kind,
        **judged,
        "baseline backend": str(stable.arms["baseline"]["decode_backend"]),
        "candidate backend": str(stable.arms["candidate"]["decode_backend"]),
    }


def _of_the_machine(name: str) -> bool:
    """Whether a part of a fingerprint, of one arm (`candidate url`) or of both (`device`), is the machine's."""
    return name in _MACHINE or name.partition(" ")[2] in _MACHINE


def _one_thing(records: Sequence[RunRecord]) -> Ruling:
    first = identity(records[0])
    for record in records[1:]:
        other = identity(record)
        differing = [name for name in first if first[name] != other.get(name)] + [n for n in other if n not in first]
        if differing:
            shown = ", ".join(
                f"{name} ({first.get(name, 'absent')}, {other.get(name, 'absent')})" for name in differing
            )
            said = f"{records[0].run.id} and {record.run.id} judged different things: {shown}"
            return Ruling("one thing judged", Outcome.NO_GO, said)
    return Ruling(
        "one thing judged",
        Outcome.GO,
        f"{first.get('model', first['target'])}, commit {first['commit'][:12]}, {first['decodegate']}",
    )


def _profile_ruling(policy: Policy, name: str, records: Sequence[RunRecord]) -> Ruling:
    subject = f"profile {name}"
    runs = [record for record in records if record.stable.profile.name == name]
    whole = [record for record in runs if record.stable.selected is None]
    if not whole:
        why = "run only for gates named with --gate" if runs else "asked for, and no record is of it"
        return Ruling(subject, Outcome.NO_GO, why)
    differing = [_unlike_shipped(name, record.stable.profile.content) for record in whole]
    if not policy.own_profiles and all(differing):
        said = f"{', '.join(differing[0][:5])} differ from the shipped profile; run that one, or allow own_profiles"
        return Ruling(subject, Outcome.NO_GO, said)
    return Ruling(subject, Outcome.GO, f"run in full: {', '.join(record.run.id for record in whole)}")


def _unlike_shipped(name: str, content: Mapping[str, Any]) -> list[str]:
    """Settings that differ from the shipped profile's: the model may be another, failed cases may be replayed first."""
    if name not in profile_names():
        return []
    given, shipped = _settings(content), _settings(load_profile(name)[1].content())
    absent = object()
    return [key for key in sorted({*given, *shipped}) if given.get(key, absent) != shipped.get(key, absent)]


def _settings(content: Mapping[str, Any]) -> dict[str, Any]:
    """Arms and required gates of a profile by name, its gates' settings as `gate.setting`."""
    found = {key: value for key, value in content.items() if key not in ("model", "description", "gates")}
    for gate, table in content["gates"].items():
        settings = table if isinstance(table, dict) else {"": table}
        found |= {f"{gate}.{key}": value for key, value in settings.items() if key != "replay"}
    return found
