"""The signed statement of a sign-off: in-toto's test-result predicate over every evidence file, in a DSSE envelope.

Formats: https://in-toto.io/Statement/v1, https://in-toto.io/attestation/test-result/v0.1 and DSSE v1. The library that
signs and checks is securesystemslib; keys are ed25519.
"""

from __future__ import annotations

import binascii
import json
from collections.abc import Mapping
from datetime import date
from typing import Any, Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import FormatError, VerificationError
from securesystemslib.signer import CryptoSigner, Signature, SSlibKey

from validation.errors import UsageError, one_line
from validation.records.jsonio import canonical, pretty
from validation.records.reading import objection
from validation.signoff.decision import Decision, Result
from validation.signoff.policy import Policy
from validation.signoff.ruling import Outcome

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://in-toto.io/attestation/test-result/v0.1"


class _Doc(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Digest(_Doc):
    """SHA-256 in hexadecimal."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Resource(_Doc):
    """A file by name and digest."""

    name: str
    digest: Digest


class WaiverDoc(_Doc):
    """A waiver that the decision rests on."""

    gate: str
    owner: str
    reason: str
    expires: date


class SignOff(_Doc):
    """What decodegate adds to the predicate."""

    decision: Outcome
    policy: str
    day: date
    waivers: list[WaiverDoc]


class Predicate(_Doc):
    """in-toto's test result: the tests are the rulings of the policy."""

    result: Result
    configuration: list[Resource]
    passed_tests: list[str] = Field(alias="passedTests")
    warned_tests: list[str] = Field(alias="warnedTests")
    failed_tests: list[str] = Field(alias="failedTests")
    sign_off: SignOff = Field(alias="decodegate")


class Statement(_Doc):
    """An in-toto statement whose subjects are all evidence files."""

    type_: Literal["https://in-toto.io/Statement/v1"] = Field(alias="_type")
    subject: list[Resource] = Field(min_length=1)
    predicate_type: Literal["https://in-toto.io/attestation/test-result/v0.1"] = Field(alias="predicateType")
    predicate: Predicate

    def digests(self) -> dict[str, str]:
        """SHA-256 of every subject by name."""
        return {resource.name: resource.digest.sha256 for resource in self.subject}


class WrongSignature(Exception):
    """An envelope that this key did not sign, or that was changed since."""


def statement(policy: Policy, decision: Decision, subjects: Mapping[str, str], policy_file: str) -> Statement:
    """The statement of a decision; `policy_file` names the subject that is the policy."""
    waived = decision.waived
    waivers = list(dict.fromkeys(waiver for ruling in waived for waiver in ruling.waivers))
    passed = [r.subject for r in decision.rulings if r.outcome is Outcome.GO and r not in waived]
    policy_digest = Resource(name=policy_file, digest=Digest(sha256=subjects[policy_file]))
    predicate = {
        "result": decision.result,
        "configuration": [policy_digest],
        "passedTests": passed,
        "warnedTests": [ruling.subject for ruling in waived],
        "failedTests": [r.subject for r in decision.rulings if r.outcome is not Outcome.GO],
        "decodegate": SignOff(
            decision=decision.outcome,
            policy=policy.name,
            day=decision.day,
            waivers=[WaiverDoc(gate=w.gate, owner=w.owner, reason=w.reason, expires=w.expires) for w in waivers],
        ),
    }
    subject = [Resource(name=name, digest=Digest(sha256=sha)) for name, sha in sorted(subjects.items())]
    return Statement.model_validate(
        {"_type": STATEMENT, "subject": subject, "predicateType": PREDICATE, "predicate": predicate}
    )


def sign(content: Statement, key: Ed25519PrivateKey) -> bytes:
    """The file with the signed statement."""
    payload = canonical(content.model_dump(mode="json", by_alias=True))
    envelope = Envelope(payload, PAYLOAD_TYPE, {})
    envelope.sign(CryptoSigner(key))
    return _bytes(envelope)


def opened(data: bytes, key: Ed25519PublicKey) -> Statement:
    """The statement in an envelope that `key` signed.

    Raises:
        UsageError: the bytes are no DSSE envelope with a statement of a sign-off.
        WrongSignature: another key signed it, or anything in it or around it was changed.
    """
    try:
        document: Any = json.loads(data)
        envelope = Envelope.from_dict(document)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, FormatError, binascii.Error) as error:
        raise UsageError("it is no DSSE envelope") from error
    if envelope.payload_type != PAYLOAD_TYPE:
        raise UsageError(f"it holds {one_line(repr(envelope.payload_type))[:60]}, not an in-toto statement")
    public = SSlibKey.from_crypto(key)
    try:
        envelope.verify([public], 1)
    except VerificationError as error:
        raise WrongSignature("the signature is not by this key (--key), or the statement was changed") from error
    own = Signature(public.keyid, envelope.signatures[public.keyid].signature)
    if _bytes(Envelope(envelope.payload, PAYLOAD_TYPE, {public.keyid: own})) != data:
        raise WrongSignature("the envelope was changed around its statement")
    try:
        return Statement.model_validate_json(envelope.payload)
    except (ValidationError, RecursionError) as error:
        raise UsageError(f"it holds no statement of a sign-off: {objection(error)}") from error


def key_id(key: Ed25519PublicKey) -> str:
    """The key's id in envelopes."""
    return str(SSlibKey.from_crypto(key).keyid)


def _bytes(envelope: Envelope) -> bytes:
    return pretty(envelope.to_dict())
