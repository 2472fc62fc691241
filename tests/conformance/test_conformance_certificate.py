"""The certificate: written whole, read strictly, required before a launch and of every rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from miles_launcher import cli, devices
from miles_launcher.conformance import certificate as certificates
from miles_launcher.conformance import requirement
from miles_launcher.conformance.certificate import (
    CERTIFICATE_FILE,
    OP_NAMES,
    PARTIAL_FILE,
    Certificate,
    Machine,
)
from miles_launcher.conformance.live import check_live
from miles_launcher.conformance.properties import PROPERTIES, Result, Status
from miles_launcher.conformance.requirement import folder_digest
from miles_launcher.conformance.subject import text_digests
from miles_launcher.parity.gate import GateClosed
from miles_launcher.plan import read as read_plan

ROOT = Path(__file__).resolve().parents[2]
CPU = Machine(kind="cpu", name="cpu", capability=None, driver=None)
H200 = Machine(kind="cuda", name="NVIDIA H200", capability="9.0", driver="580.159.03")
VERSIONS = {
    "torch": devices.version_of("torch") or "",
    "triton": devices.version_of("triton") or "",
}


def results(**changed: Status) -> list[Result]:
    """Everything shown, but for `op__property=status`."""
    return [
        Result(
            op=op,
            property=name,
            status=changed.get(f"{op}__{name}", Status.OK),
            detail="text",
            compared=3,
            degrees=(2,) if name == "tp_ranks" else (),
        )
        for op in OP_NAMES
        for name in PROPERTIES
    ]


def made(of: list[Result] | None = None, **keywords: Any) -> Certificate:
    values: dict[str, Any] = {
        "date": "2026-12-01T00:00:00Z",
        "device": CPU,
        "versions": VERSIONS,
        "digests": text_digests(),
        "contracts": {},
        "setting": "full",
        "seconds": 1.0,
    }
    return certificates.make(results() if of is None else of, **{**values, **keywords})


def asked(path: Path, **keywords: Any) -> requirement.CertificatePlan:
    values: dict[str, Any] = {
        "row_linear_order": "segments",
        "device": "cpu",
        "degrees": (2, 1),
        "local": True,
    }
    return requirement.require(path, **{**values, **keywords})


# --- the file ---------------------------------------------------------------------------------


def test_round_trip(tmp_path: Path) -> None:
    whole = made()
    assert whole.ok and whole.complete
    certificates.write(made(results()[:20]), tmp_path, partial=True)
    path = certificates.write(whole, tmp_path, partial=False)
    assert path.name == CERTIFICATE_FILE and [p.name for p in tmp_path.iterdir()] == [path.name]
    assert certificates.read(path) == whole == certificates.read(tmp_path)


def test_what_is_not_shown_is_neither_a_failure_nor_complete() -> None:
    unshown = made(results(linear__split_k=Status.NOT_SHOWN))
    assert unshown.ok and not unshown.complete
    failed = made(results(linear__order=Status.FAILED))
    assert not failed.ok and not failed.complete
    assert made(setting="small").ok and not made(setting="small").complete
    assert not made(results()[:30]).complete and not made([]).ok


def test_a_half_written_certificate_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = certificates.write(made(), tmp_path, partial=False)
    text = path.read_text()
    for length in (0, 1, 200, len(text) // 2, len(text) - 3):
        path.write_text(text[:length])
        with pytest.raises(
            ValueError, match=f"{path}: half-written or edited.* run `miles conform`"
        ):
            certificates.read(path)


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (lambda d: d.update(format=7), "certificate format 7, this launcher reads 1"),
        (lambda d: d.pop("device"), "missing keys .'device'."),
        (lambda d: d.update(extra=1), "unknown keys .'extra'."),
        (lambda d: d["results"]["rope"]["order"].update(compared="3"), "rope.order.compared"),
        (lambda d: d["results"]["rope"]["order"].update(status="failed"), "not what its digest"),
        (lambda d: d.update(ops_digest="0" * 64), "not what its digest says"),
    ],
)
def test_an_edited_certificate_is_refused(
    tmp_path: Path, edit: Callable[[dict[str, Any]], object], complaint: str
) -> None:
    path = certificates.write(made(), tmp_path, partial=False)
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=complaint):
        certificates.read(path)


def test_ok_must_follow_from_the_results(tmp_path: Path) -> None:
    lie = replace(made(results(rope__order=Status.FAILED)), ok=True)
    path = certificates.write(
        replace(lie, digest=certificates._digest(lie)), tmp_path, partial=False
    )
    with pytest.raises(ValueError, match="do not follow from the results"):
        certificates.read(path)


def test_no_certificate_and_an_unfinished_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{tmp_path / CERTIFICATE_FILE}: cannot read"):
        certificates.read(tmp_path)
    certificates.write(made(results()[:20]), tmp_path, partial=True)
    with pytest.raises(ValueError, match=f"{PARTIAL_FILE}: the conformance run there did not come"):
        certificates.read(tmp_path)


# --- before a launch --------------------------------------------------------------------------


def required(tmp_path: Path, whole: Certificate) -> Path:
    return certificates.write(whole, tmp_path, partial=False)


def test_a_certificate_that_covers_the_plan(tmp_path: Path) -> None:
    plan = asked(required(tmp_path, made()))
    assert plan.device == "cpu" and plan.versions == VERSIONS
    assert plan.ops_digest == text_digests()["ops_digest"]
    package = ROOT / "sglang_patch"
    assert folder_digest(package / "ops") == text_digests()["ops_digest"]
    assert folder_digest(package / "schema") == text_digests()["schema_digest"]


@pytest.mark.parametrize(
    ("whole", "keywords", "complaint"),
    [
        (made(results(rope__order=Status.FAILED)), {}, "failed: rope order"),
        (made(results(rope__order=Status.NOT_SHOWN)), {}, "not shown: rope order"),
        (made(results()[:-1]), {}, "not in it: digest fault"),
        (made(setting="small"), {}, "made at small size, full is required"),
        (made(device=H200), {}, r"made on NVIDIA H200 \(cuda\), the plan runs on cpu"),
        (made(versions={**VERSIONS, "torch": "2.0"}), {}, "torch .* installed here, 2.0 was"),
        (
            made(digests={**text_digests(), "ops_digest": "0" * 64}),
            {},
            "sglang_patch/ops is .* here, 000000000000 was.*megatron_patch/ops is",
        ),
        (made(results(row_linear_v2__tp_ranks=Status.NOT_SHOWN)), {"degrees": (4, 1)}, "tp_ranks"),
    ],
)
def test_a_certificate_that_does_not(
    tmp_path: Path, whole: Certificate, keywords: dict[str, Any], complaint: str
) -> None:
    path = required(tmp_path, whole)
    with pytest.raises(ValueError, match=complaint) as refused:
        asked(path, **keywords)
    assert str(path) in str(refused.value) and "miles conform --device" in str(refused.value)


def test_what_the_plan_does_not_use_need_not_be_shown(tmp_path: Path) -> None:
    path = required(tmp_path, made(results(row_linear_v1__order=Status.NOT_SHOWN)))
    asked(path)
    with pytest.raises(ValueError, match="not shown: row_linear_v1 order"):
        asked(path, row_linear_order="tiles")
    (tmp_path / "ranks").mkdir()
    two = required(tmp_path / "ranks", made(results(row_linear_v2__tp_ranks=Status.NOT_SHOWN)))
    asked(two, degrees=(1, 2))


def test_another_driver_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"driver": "999.1", "capability": "9.0", "sgl_kernel": None}
    monkeypatch.setattr(requirement, "host_facts", lambda: facts)
    path = required(tmp_path, made(device=H200))
    with pytest.raises(ValueError, match=r"driver 999.1 here, 580.159.03 certified"):
        asked(path, device="cuda")
    # A cluster's machines are judged once they are up.
    asked(path, device="cuda", local=False)
    facts["driver"] = H200.driver
    asked(path, device="cuda")


def miles(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, list(arguments), env={"CUDA_VISIBLE_DEVICES": ""})


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("MILES_HOME", str(tmp_path / "home"))


@pytest.mark.usefixtures("elsewhere")
def test_launch_refuses_without_what_it_requires(tmp_path: Path) -> None:
    (tmp_path / "good").mkdir()
    good = required(tmp_path / "good", made())
    arguments = ["launch", "qwen3-tiny", "--tp", "2", "--device", "cpu", "--dry-run"]
    result = miles(*arguments, "--out", "a", "--require-certificate", str(good))
    assert result.exit_code == 0, result.output
    plan = read_plan(tmp_path / "a" / "plan.json")
    assert plan.certificate is not None and plan.certificate.digest == made().digest
    (tmp_path / "good" / CERTIFICATE_FILE).write_text(good.read_text()[:500])
    result = miles(*arguments, "--out", "b", "--require-certificate", "good")
    assert result.exit_code == 2 and "half-written" in result.stderr.replace("\n", " ")
    result = miles(*arguments, "--out", "c", "run.require_certificate=nowhere")
    assert result.exit_code == 2 and "nowhere: cannot read" in result.stderr.replace("\n", " ")
    off = [*arguments, "--contract", "off", "--require-certificate", "good"]
    result = miles(*off)
    assert result.exit_code == 2 and "no certified op" in result.stderr.replace("\n", " ")


# --- the ranks that are up --------------------------------------------------------------------

FINGERPRINT = {
    "device": "NVIDIA H200",
    "ops_digest": text_digests()["ops_digest"],
    "schema_digest": text_digests()["schema_digest"],
    "versions": VERSIONS,
}
FACTS = {"driver": "580.159.03", "capability": "9.0", "sgl_kernel": None}


def live(**changed: Any) -> None:
    plan = requirement.CertificatePlan(
        path="/c",
        digest="d",
        device=H200.name,
        capability=H200.capability,
        driver=H200.driver,
        sgl_kernel=None,
        ops_digest=FINGERPRINT["ops_digest"],
        schema_digest=FINGERPRINT["schema_digest"],
        versions=VERSIONS,
    )
    fingerprints = changed.get("fingerprints", {"rollout": FINGERPRINT, "trainer": FINGERPRINT})
    check_live(plan, fingerprints, changed.get("hosts", {"rollout": FACTS}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("device", "NVIDIA H100"),
        ("ops_digest", "0" * 64),
        ("schema_digest", "0" * 64),
        ("versions", {**VERSIONS, "triton": "0"}),
    ],
)
def test_a_rank_that_is_not_what_was_certified_closes_the_gate(key: str, value: Any) -> None:
    live()
    other = {**FINGERPRINT, key: value}
    with pytest.raises(GateClosed, match="trainer: "):
        live(fingerprints={"rollout": FINGERPRINT, "trainer": other})


def test_the_driver_of_every_role_counts() -> None:
    for facts in (
        {**FACTS, "driver": "1"},
        {**FACTS, "driver": None},
        {**FACTS, "capability": "8.0"},
    ):
        with pytest.raises(GateClosed, match="at trainer rank 0"):
            live(hosts={"rollout": FACTS, "trainer rank 0": facts})
    for nothing in ({"fingerprints": {}}, {"hosts": {}}):
        with pytest.raises(GateClosed, match="no r"):
            live(**nothing)


# --- the command ------------------------------------------------------------------------------


@pytest.mark.usefixtures("elsewhere")
def test_the_command_writes_a_certificate(tmp_path: Path) -> None:
    arguments = ["conform", "--device", "cpu", "--quick", "--op", "temperature", "--op", "digest"]
    result = miles(*arguments, "--out", "out")
    assert result.exit_code == 0, result.output
    for part in ("temperature", "digest", "neighbours", "not complete", "conformance.json"):
        assert part in result.output
    whole = certificates.read(tmp_path / "out")
    assert set(whole.results) == {"temperature", "digest"} and whole.ok and not whole.complete
    again = miles(*arguments, "--out", "out")
    assert again.exit_code == 2 and "holds a certificate already" in again.stderr
    near = miles("conform", "--op", "row_linar")
    assert near.exit_code == 2 and "did you mean row_linear_v2" in near.stderr.replace("\n", " ")
    no_gpu = miles("conform", "--device", "cuda")
    assert no_gpu.exit_code == 2 and "sees no GPU" in no_gpu.stderr.replace("\n", " ")


def test_torch_and_triton_are_enough(tmp_path: Path) -> None:
    """`python3 -m miles_launcher.conformance` where nothing else is installed."""
    absent = ("hydra", "rich", "typer", "ray", "sglang", "megatron", "omegaconf", "transformers")
    program = (
        "import runpy, sys\n"
        f"for name in {absent!r}: sys.modules[name] = None\n"
        f"sys.argv = ['conform', '--device', 'cpu', '--quick', '--op', 'silu_mul', "
        f"'--out', {str(tmp_path / 'out')!r}]\n"
        "runpy.run_module('miles_launcher.conformance', run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "silu_mul: 8 ok" in done.stdout and certificates.read(tmp_path / "out").ok


def test_an_interrupted_run_leaves_no_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from miles_launcher.conformance import run as running
    from miles_launcher.conformance.table import PlainView

    class Impatient(PlainView):
        def started(self, op: str, name: str) -> None:
            if op == "digest" and name == "shapes":
                raise KeyboardInterrupt

    code = running.conform(
        device="cpu", ops=["temperature", "digest"], out=tmp_path, quick=True, view=Impatient()
    )
    assert code == 130 and [p.name for p in tmp_path.iterdir()] == [PARTIAL_FILE]
    known = certificates.read(tmp_path / PARTIAL_FILE)
    assert set(known.results["temperature"]) == set(PROPERTIES)
    assert "interrupted" in capsys.readouterr().out


def test_a_failing_op_gives_exit_code_3(tmp_path: Path) -> None:
    from miles_launcher.conformance import run as running
    from miles_launcher.conformance.subject import cpu_subject
    from miles_launcher.conformance.table import PlainView

    code = running.conform(
        device="cpu",
        ops=["silu_mul"],
        out=tmp_path,
        quick=True,
        view=PlainView(),
        subject=cpu_subject().with_fault("silu_mul"),
    )
    whole = certificates.read(tmp_path)
    assert code == 3 and not whole.ok
    assert ("silu_mul", "order") in whole.cells(Status.FAILED)
