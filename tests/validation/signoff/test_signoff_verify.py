"""A signed sign-off verifies with its key alone, and no later change of any byte escapes."""

from __future__ import annotations

import json
from base64 import b64decode
from datetime import UTC, datetime, timedelta
from typing import Any

import decodegate_toy as toy
import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from securesystemslib.dsse import Envelope
from securesystemslib.signer import CryptoSigner
from signing import POLICY, TODAY, Signing, failed
from toy_commandline import CommandLine

from validation.records.jsonio import canonical, pretty
from validation.signoff.keys import read_private_key


@pytest.fixture
def signing(decodegate: CommandLine) -> Signing:
    decodegate.write_profile(toy.PROFILE_WITH_PLOT)
    assert decodegate.run() == 0
    return Signing(decodegate)


def test_a_whole_green_run_is_a_signed_go_that_verifies(signing: Signing) -> None:
    assert signing.sign() == 0
    assert "GO (signed)" in signing.command.out
    assert signing.verify() == 0
    assert "none changed, added or removed" in signing.command.out


def test_one_changed_byte_of_any_evidence_file_is_detected(signing: Signing) -> None:
    assert signing.sign() == 0
    run = signing.command.newest().path
    files = [path for path in (*run.rglob("*"), *(signing.home / "so").rglob("*")) if path.is_file()]
    assert {"record.json", "signoff.html", "policy.toml", "signoff.dsse.json"} <= {path.name for path in files}
    for path in files:
        whole = path.read_bytes()
        if path.name == "lock":
            continue
        for place in {0, len(whole) - 1}:
            changed = bytearray(whole)
            changed[place] ^= 1
            path.write_bytes(bytes(changed))
            # A broken envelope is no envelope at all, which is bad input.
            assert signing.verify() in ((1, 2) if path.name == "signoff.dsse.json" else (1,)), (path, place)
        path.write_bytes(whole)
    assert signing.verify() == 0


def test_added_removed_and_moved_files_are_detected(signing: Signing) -> None:
    assert signing.sign() == 0
    run = signing.command.newest().path
    (signing.home / "so" / "lock").write_text("a lock of a run says nothing, one of a sign-off is an added file")
    assert signing.verify() == 1
    (signing.home / "so" / "lock").unlink()
    for folder in (run, run / "units" / "error", signing.home / "so"):
        added = folder / "added.txt"
        added.write_text("")
        assert signing.verify() == 1
        assert "added.txt: added" in signing.command.out
        added.unlink()
    summary = run / "summary.md"
    summary.rename(run / "summary2.md")
    assert signing.verify() == 1
    assert "summary.md: removed" in signing.command.out
    summary.symlink_to(run / "summary2.md")
    assert signing.verify() == 1
    summary.unlink()
    (run / "summary2.md").rename(summary)
    assert signing.verify() == 0
    run.rename(run.with_name("elsewhere"))
    assert signing.verify() == 1
    assert "the folder is missing" in signing.command.out
    moved = signing.home / "archive" / run.name
    moved.parent.mkdir()
    run.with_name("elsewhere").rename(moved)
    words = ("verify", str(signing.home / "so"), str(moved), "--key", str(signing.home / "release.pub.pem"))
    assert signing.command(*words) == 0
    assert signing.command(*words, str(signing.home / "stranger")) == 2
    assert "run 'stranger' is not one of this sign-off's" in signing.command.err
    assert signing.command(*words, str(signing.home / "copy" / run.name)) == 2
    assert "two folders of one run" in signing.command.err


def test_another_key_does_not_verify_and_another_kind_is_refused(signing: Signing) -> None:
    assert signing.sign() == 0
    assert signing.command("keygen", str(signing.home / "other.pem")) == 0
    assert signing.verify("other.pub.pem") == 1
    assert "not by this key" in signing.command.out
    assert signing.verify("release.pem") == 2
    assert "holds a private key; the public one is needed" in signing.command.err
    pem = generate_private_key(SECP256R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (signing.home / "ec.pem").write_bytes(pem)
    assert signing.sign("--key", str(signing.home / "ec.pem")) == 2
    assert "an ed25519 key is needed" in signing.command.err


def test_verify_names_the_folder_and_the_key_that_it_needs(signing: Signing) -> None:
    assert signing.sign() == 0
    home, run = signing.home, signing.command.newest().path
    key = ("--key", str(home / "release.pub.pem"))
    (home / "empty").mkdir()
    wrong = {
        (str(home / "so"),): f"decodegate verify {home / 'so'} --key NAME.pub.pem",
        (str(home / "so"), "--key", str(home / "release.pem")): f"--key {home / 'release.pub.pem'}",
        (str(home / "so"), "--key", str(home / "policy.toml")): "give the .pub.pem of the signer",
        (str(run), *key): "is the folder of a run, which is not signed itself; give the folder that decodegate signoff",
        (str(home / "so" / "signoff.dsse.json"), *key): "is a file; give the folder that decodegate signoff wrote",
        (str(home / "nowhere"), *key): "there is no folder",
        (str(home / "empty"), *key): "so it is no sign-off; give the folder that decodegate signoff wrote",
    }
    for words, said in wrong.items():
        assert signing.command("verify", *words) == 2, words
        assert said in signing.command.err, words
        assert signing.command.err.count("\n") == 1
    assert signing.sign("--out", str(signing.command.runs)) == 3
    assert signing.verify() == 2
    assert "nobody signed it, so it cannot be verified; decodegate signoff --key NAME.pem signs" in signing.command.err


def test_keys_are_private_never_overwritten_and_may_have_a_passphrase(
    signing: Signing, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = signing.home / "release.pem"
    assert private.stat().st_mode & 0o077 == 0
    public = signing.home / "release.pub.pem"
    public.rename(signing.home / "away.pub.pem")
    assert signing.command("keygen", str(private)) == 2
    assert not public.exists(), "a public key of another pair would verify nothing"
    monkeypatch.setenv("DECODEGATE_KEY_PASSPHRASE", "secret")
    assert signing.command("keygen", str(signing.home / "locked.pem")) == 0
    assert signing.sign("--key", str(signing.home / "locked.pem")) == 0
    monkeypatch.delenv("DECODEGATE_KEY_PASSPHRASE")
    assert signing.sign("--key", str(signing.home / "locked.pem")) == 2
    assert "DECODEGATE_KEY_PASSPHRASE" in signing.command.err


def test_the_envelope_is_an_in_toto_test_result_that_anyone_can_check(signing: Signing) -> None:
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    assert signing.sign() == 0
    envelope = json.loads((signing.home / "so" / "signoff.dsse.json").read_bytes())
    payload, kind = b64decode(envelope["payload"]), envelope["payloadType"]
    assert kind == "application/vnd.in-toto+json"
    public = load_pem_public_key((signing.home / "release.pub.pem").read_bytes())
    message = b"DSSEv1 %d %b %d %b" % (len(kind), kind.encode(), len(payload), payload)
    public.verify(b64decode(envelope["signatures"][0]["sig"]), message)  # type: ignore[union-attr, call-arg]
    statement = json.loads(payload)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://in-toto.io/attestation/test-result/v0.1"
    assert statement["predicate"]["result"] == "PASSED"
    assert f"runs/{signing.command.newest().run_id}/record.json" in {
        subject["name"] for subject in statement["subject"]
    }


def test_a_waiver_that_expires_after_the_signing_no_longer_verifies(
    signing: Signing, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed(signing)
    signing.policy(POLICY + f'\n[[waivers]]\ngate = "error"\nowner = "x"\nreason = "y"\nexpires = {TODAY}')
    assert signing.sign() == 0
    assert signing.verify() == 0

    class Tomorrow(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime.now(UTC) + timedelta(days=1)

    monkeypatch.setattr("validation.cli.signing.datetime", Tomorrow)
    assert signing.verify() == 1
    assert "EXPIRED: waiver of error by x" in signing.command.out


def signed_by_us(signing: Signing, content: bytes, kind: str = "application/vnd.in-toto+json") -> bytes:
    """An envelope around any content, with a right signature."""
    envelope = Envelope(content, kind, {})
    envelope.sign(CryptoSigner(read_private_key(signing.home / "release.pem")))
    return pretty(envelope.to_dict())


def test_a_hostile_envelope_is_refused_in_one_line_even_if_signed(signing: Signing) -> None:
    assert signing.sign() == 0
    path = signing.home / "so" / "signoff.dsse.json"
    whole = path.read_bytes()
    payload: Any = json.loads(b64decode(json.loads(whole)["payload"]))
    hostile = [b"", b"{}", b"[" * 100_000, b"\xff", b'{"payload": 1, "payloadType": 2, "signatures": 3}', b"null"]
    hostile += [
        signed_by_us(signing, b"{}"),
        signed_by_us(signing, b"[" * 100_000),
        signed_by_us(signing, whole, "other"),
    ]
    for name in ("", "/etc/passwd", "runs/../../etc/passwd", "runs/x", "signoff", "elsewhere/x/y", "runs/.hidden/x"):
        payload["subject"][0]["name"] = name
        hostile.append(signed_by_us(signing, canonical(payload)))
    for data in hostile:
        path.write_bytes(data)
        assert signing.verify() == 2, data[:80]
        assert signing.command.err.count("\n") == 1
    envelope = json.loads(whole)
    for kind in (7, "\ud800", "x" * 10**6):
        path.write_bytes(pretty({**envelope, "payloadType": kind}))
        assert signing.verify() == 2
        assert len(signing.command.err) < 1000
    own = envelope["signatures"][0]
    around = [
        whole + b" ",
        pretty({**envelope, "note": "x"}),
        pretty({**envelope, "signatures": [{**own, "note": "x"}]}),
        pretty({**envelope, "signatures": [own, {**own, "keyid": "another"}]}),
        pretty({**envelope, "signatures": [{**own, "keyid": "another"}, own]}),
    ]
    for data in around:
        path.write_bytes(data)
        assert signing.verify() == 1, "a change around the statement is a change"
        assert "the envelope was changed around its statement" in signing.command.out
    path.write_bytes(whole)
    assert signing.verify() == 0
