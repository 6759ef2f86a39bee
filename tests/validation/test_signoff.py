"""A sign-off fails closed, shows its reasons, and no later change of any byte escapes `decodegate verify`."""

from __future__ import annotations

import json
import re
import shutil
from base64 import b64decode
from datetime import UTC, date, datetime, timedelta
from typing import Any

import decodegate_toy as toy
import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from securesystemslib.dsse import Envelope
from securesystemslib.signer import CryptoSigner
from toy_commandline import CommandLine

from validation.jsonio import canonical, pretty
from validation.record import RunRecord
from validation.signoff.decision import decide
from validation.signoff.document import not_judged
from validation.signoff.keys import read_private_key
from validation.signoff.mutation import Mutation
from validation.signoff.policy import Policy
from validation.signoff.ruling import Outcome

TODAY = datetime.now(UTC).date()
POLICY = 'name = "toy release"\nrequired = ["error", "costly"]\nprofiles = ["toy"]\n'


class Signing:
    """A finished toy run, a key pair, a policy, and the commands over them."""

    def __init__(self, decodegate: CommandLine) -> None:
        self.command = decodegate
        self.home = decodegate.folder
        assert decodegate("keygen", str(self.home / "release.pem")) == 0
        self.policy(POLICY)

    def policy(self, text: str) -> None:
        (self.home / "policy.toml").write_text(text)

    def sign(self, *more: str, runs: tuple[str, ...] = ()) -> int:
        shutil.rmtree(self.home / "so", ignore_errors=True)
        chosen = runs or (self.command.newest().run_id,)
        words = (
            "--policy",
            str(self.home / "policy.toml"),
            "--to",
            str(self.home / "so"),
            "--out",
            str(self.command.runs),
        )
        return self.command("signoff", *chosen, *words, *(more or ("--key", str(self.home / "release.pem"))))

    def verify(self, key: str = "release.pub.pem") -> int:
        words = ("--key", str(self.home / key), "--out", str(self.command.runs))
        return self.command("verify", str(self.home / "so"), *words)

    @property
    def document(self) -> str:
        return (self.home / "so" / "signoff.html").read_text()


@pytest.fixture
def signing(decodegate: CommandLine) -> Signing:
    decodegate.write_profile(toy.PROFILE_WITH_PLOT)
    assert decodegate.run() == 0
    return Signing(decodegate)


def failed(signing: Signing) -> None:
    """Make the newest run one in which the error gate failed, without its being a run with faults."""
    folder = signing.command.newest()
    path = folder.path / "record.json"
    document = json.loads(path.read_bytes())
    finding = {"component": "projection", "message": "too large", "unit": ""}
    document["stable"]["gates"][0].update(verdict="FAIL", counts_as="FAIL", findings=[finding])
    document["stable"]["verdict"] = "FAIL"
    path.write_text(json.dumps(document))


def test_a_whole_green_run_is_a_signed_go_that_verifies(signing: Signing) -> None:
    assert signing.sign() == 0
    assert "GO (signed)" in signing.command.out
    assert signing.verify() == 0
    assert "none changed, added or removed" in signing.command.out


def test_without_a_key_nothing_exits_as_a_signed_go(signing: Signing) -> None:
    assert signing.sign("--mutation", signing.command.newest().run_id) == 2, "a run without a matrix has no score"
    words = ("signoff", signing.command.newest().run_id, "--policy", str(signing.home / "policy.toml"))
    assert signing.command(*words, "--to", str(signing.home / "so"), "--out", str(signing.command.runs)) == 3
    assert "NOT SIGNED" in signing.command.out
    assert "NOT SIGNED" in signing.document
    assert signing.verify() == 2


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
    assert (
        signing.command("verify", str(signing.home / "so"), str(moved), "--key", str(signing.home / "release.pub.pem"))
        == 0
    )


def test_another_key_does_not_verify_and_another_kind_is_refused(signing: Signing) -> None:
    assert signing.sign() == 0
    assert signing.command("keygen", str(signing.home / "other.pem")) == 0
    assert signing.verify("other.pub.pem") == 1
    assert "not by this key" in signing.command.out
    assert signing.verify("release.pem") == 2
    assert "give the .pub.pem" in signing.command.err
    pem = generate_private_key(SECP256R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (signing.home / "ec.pem").write_bytes(pem)
    assert signing.sign("--key", str(signing.home / "ec.pem")) == 2
    assert "an ed25519 key is needed" in signing.command.err


def test_keys_are_private_never_overwritten_and_may_have_a_passphrase(
    signing: Signing, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = signing.home / "release.pem"
    assert private.stat().st_mode & 0o077 == 0
    assert signing.command("keygen", str(private)) == 2
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


def test_a_failed_gate_is_a_no_go_unless_someone_answers_for_it_until_a_day(signing: Signing) -> None:
    failed(signing)
    assert signing.sign() == 1
    waiver = '\n[[waivers]]\ngate = "error"\nowner = "A. Person"\nreason = "known"\nexpires = '
    signing.policy(POLICY + waiver + str(TODAY))
    assert signing.sign() == 0
    assert "GO (waived): gate error" in signing.command.out
    assert re.search("waived by <strong>A. Person</strong> until", signing.document)
    signing.policy(POLICY + waiver + str(TODAY - timedelta(days=1)))
    assert signing.sign() == 1
    assert "expired, so it waives nothing" in signing.command.out
    assert "expired, so it waives nothing" in signing.document


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


def test_a_waiver_of_one_component_covers_no_other(signing: Signing) -> None:
    failed(signing)
    waiver = f'\n[[waivers]]\ngate = "error"\nowner = "x"\nreason = "y"\nexpires = {TODAY}\ncomponent = '
    for component, code in (('"projection"', 0), ('"proj*"', 0), ('"router"', 1)):
        signing.policy(POLICY + waiver + component)
        assert signing.sign() == code, component


@pytest.mark.parametrize(
    ("policy", "code", "said"),
    [
        ('required = ["error", "ranks"]', 1, "gate ranks: required, and judged in no record"),
        ('required = ["error"]\nprofiles = ["nightly"]', 1, "profile nightly: asked for, and no record is of it"),
        ('required = ["error"]\nmin_mutation_score = 0.9', 1, "no mutation record was given"),
        ('required = ["error"]\n[[margins]]\ngate = "error"\nmetric = "worst"\nmax = 0.001', 1, "0.001 is asked for"),
        ('required = ["error"]\n[[margins]]\ngate = "error"\nmetric = "ratios.*"\nmax = 3', 0, "(n = 5)"),
        (
            'required = ["error"]\n[[margins]]\ngate = "error"\nmetric = "none"\nmax = 3',
            3,
            "no record has such a figure",
        ),
    ],
)
def test_every_demand_of_the_policy_counts(signing: Signing, policy: str, code: int, said: str) -> None:
    signing.policy(f'name = "toy"\n{policy}\n')
    assert signing.sign() == code
    assert said in signing.command.out


def test_a_run_with_faults_put_in_is_never_signed_off(signing: Signing) -> None:
    assert signing.command.run("--fault", "toy.column") == 1
    assert signing.sign() == 1
    assert "faults were injected on purpose: toy.column" in signing.command.out


def test_records_of_different_things_and_a_partial_run_are_no_go(
    signing: Signing, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = signing.command.newest().run_id
    monkeypatch.setattr(toy.ToyTarget, "fingerprint", lambda self: {"model": "another toy"})
    assert signing.command.run("--gate", "error") == 0
    assert signing.sign(runs=(first, signing.command.newest().run_id)) == 1
    assert "judged different things: model (toy, another toy)" in signing.command.out
    assert signing.sign() == 1
    assert "run only for gates named with --gate" in signing.command.out
    assert signing.sign(runs=(first, first)) == 2
    assert "was given twice" in signing.command.err


def test_a_record_whose_evidence_is_gone_or_edited_is_refused(signing: Signing) -> None:
    unit = signing.command.newest().path / "units" / "error" / "rows-1.json"
    whole = unit.read_bytes()
    unit.write_bytes(whole.replace(b'"candidate":', b'"candidate":0'))
    assert signing.sign() == 2
    assert "'rows-1' of gate 'error' is missing, torn or edited" in signing.command.err
    unit.unlink()
    assert signing.sign() == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'name' is missing"),
        ('name = "x"\nrequired = []', "required"),
        ('name = "x"\nrequire = ["a"]', "unknown key 'require'; did you mean 'required'?"),
        (
            'name = "x"\nrequired = ["a"]\n[[waivers]]\ngate = "a"\nreason = "r"\nexpires = 2030-01-01',
            "waivers.0.owner",
        ),
        (
            'name = "x"\nrequired = ["a"]\n[[waivers]]\ngate = "a"\nowner = "o"\nreason = "r"\nexpires = "soon"',
            "expires",
        ),
        ('name = "x"\nrequired = ["a"]\n[[margins]]\ngate = "a"\nmetric = "m"', "neither max nor min"),
        ('name = "x"\nrequired = ["a"]\nmin_mutation_score = 95', "min_mutation_score"),
        ("name = ", "not valid TOML"),
    ],
)
def test_a_wrong_policy_is_one_line(signing: Signing, text: str, said: str) -> None:
    signing.policy(text)
    assert signing.sign() == 2
    assert signing.command.err.count("\n") == 1
    assert said in signing.command.err


def test_a_sign_off_is_never_overwritten(signing: Signing) -> None:
    assert signing.sign() == 0
    words = ("signoff", signing.command.newest().run_id, "--policy", str(signing.home / "policy.toml"))
    assert signing.command(*words, "--to", str(signing.home / "so"), "--out", str(signing.command.runs)) == 2
    assert "never overwritten" in signing.command.err


def test_the_document_has_the_decision_first_and_loads_nothing(signing: Signing) -> None:
    assert signing.sign() == 0
    page = signing.document
    order = [
        "Decision",
        "Waivers",
        "What was not judged",
        "What this rests on",
        "Noise floors",
        "Mutation score",
        "Environment",
    ]
    places = [page.index(f"<h2>{title}</h2>") for title in order]
    assert places == sorted(places)
    assert "<script" not in page
    assert re.findall(r'(?:src|href)="(?!#|data:,)[^"]*"', page) == []
    assert "default-src 'none'" in page
    assert "n = 5 units" in page
    assert "@media print" in page


def test_the_worst_record_of_a_gate_counts_so_that_no_retry_hides_a_failure(signing: Signing) -> None:
    record = signing.command.record()
    document = record.model_dump()
    document["stable"]["gates"][0].update(verdict="FAIL", counts_as="FAIL")
    document["stable"]["verdict"] = "FAIL"
    document["run"]["id"] = "another"
    bad = RunRecord.model_validate(document)
    policy = Policy(name="x", required=["error"])
    for records in ([record, bad], [bad, record]):
        assert decide(policy, records, None, TODAY).outcome is Outcome.NO_GO
    assert decide(policy, [record], None, TODAY).outcome is Outcome.GO


def test_the_mutation_score_is_judged_and_unsound_ones_decide_nothing(signing: Signing) -> None:
    record = signing.command.record()
    content = {"run": "m", "created": "2026-01-01", "profile": "toy", "scores": {}, "counts": {}}
    policy = Policy(name="x", required=["error"], min_mutation_score=0.9)
    for caught, sound, outcome in (
        (95, True, Outcome.GO),
        (80, True, Outcome.NO_GO),
        (95, False, Outcome.INCONCLUSIVE),
    ):
        mutation = Mutation.model_validate({**content, "sound": sound, "score": {"caught": caught, "asked": 100}})
        assert decide(policy, [record], mutation, TODAY).outcome is outcome
    assert decide(policy, [record], None, date(2000, 1, 1)).outcome is Outcome.NO_GO


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
    path.write_bytes(whole + b" ")
    assert signing.verify() == 1, "a change around the statement is a change"
    path.write_bytes(whole)
    assert signing.verify() == 0


def test_what_no_gate_decided_is_named(signing: Signing) -> None:
    found = not_judged([signing.command.record()])
    assert found["evals"] == "no gate of layer 5 decided"
    assert {"races between ranks", "performance", "crash", "idle", "ranks"} <= found.keys()
    assert "each op's accuracy" not in found, "the toy gate of layer 1 passed"
    document = signing.command.record().model_dump()
    document["stable"]["target"]["fingerprint"]["specialised path"] = "emulation"
    assert "fused kernels" in not_judged([RunRecord.model_validate(document)])
    assert "fused kernels" not in found
