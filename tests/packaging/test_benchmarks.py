"""What benchmarks promise: a missed target or a peer that is not there ends them with status 1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    import _report

    return _report


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    import _peers

    return _peers


def test_a_cost_is_better_when_it_is_less(report: Any) -> None:
    figure = report.Figure(what="w", unit="ms", ours=2.0, peer="p", theirs=20.0, at_least=10)
    assert (figure.ratio, figure.reached) == (10.0, True)
    missed = report.Figure(what="w", unit="ms", ours=2.1, peer="p", theirs=20.0, at_least=10)
    assert missed.reached is False


def test_a_rate_is_better_when_it_is_more(report: Any) -> None:
    rate = {"what": "w", "unit": "1/s", "more_is_better": True, "peer": "p", "theirs": 10.0}
    assert report.Figure(ours=30.0, at_least=3, **rate).reached is True
    assert report.Figure(ours=29.0, at_least=3, **rate).reached is False


def test_both_targets_count(report: Any) -> None:
    both = {"what": "w", "unit": "ms", "theirs": 9.0, "at_least": 2, "at_most": 3.0}
    assert report.Figure(ours=3.0, **both).reached is True
    assert report.Figure(ours=3.5, **both).reached is False
    assert report.Figure(ours=2.0, **{**both, "theirs": 3.0}).reached is False


def test_a_ratio_without_a_peer_is_missed(report: Any) -> None:
    assert report.Figure(what="w", unit="ms", ours=1.0, at_least=2).reached is False
    assert report.Figure(what="w", unit="ms", ours=1.0).reached is None


def test_finish_writes_json_and_says_what_was_missed(
    report: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = report.Figure(what="good", unit="ms", ours=1.0, at_most=2.0)
    bad = report.Figure(what="bad", unit="ms", ours=3.0, at_most=2.0)
    path = tmp_path / "figures.json"
    assert report.finish([good], None) == 0
    assert report.finish([good, bad], path) == 1
    assert "missed: bad" in capsys.readouterr().out
    figures = json.loads(path.read_text())["figures"]
    assert [figure["reached"] for figure in figures] == [True, False]


def test_results_that_are_written_do_not_make_the_commit_another(
    report: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script, results = tmp_path / "benchmarks" / "script.py", tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    monkeypatch.setattr(report, "__file__", str(script))
    assert report.commit() == ""
    for path in (script, results / "rows.jsonl"):
        path.write_text("1\n")
    author = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "m"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    clean = report.commit()
    assert len(clean) == 12
    (results / "rows.jsonl").write_text("2\n")
    (results / "new").write_text("2\n")
    assert report.commit() == f"{clean}-dirty"
    assert report.commit(but="benchmarks/results") == clean
    script.write_text("2\n")
    assert report.commit(but="benchmarks/results") == f"{clean}-dirty"


def test_an_unknown_peer_is_an_error(peers: Any) -> None:
    with pytest.raises(SystemExit, match="there is no peer 'nobody'; there are agentlightning"):
        peers.peer_python("nobody")


def test_a_peer_that_cannot_be_installed_ends_the_script(
    peers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    monkeypatch.setattr(peers, "PEERS", {"old": peers.Peer(("x",), python="2.6")})
    with pytest.raises(SystemExit, match=r"the peer old needs Python 2\.6, which was not found"):
        peers.peer_python("old")


@pytest.mark.parametrize(
    ("program", "complaint"),
    [
        ("raise RuntimeError('broken')", "failed with status 1.*broken"),
        ("print('no figures')", "printed no figures"),
    ],
)
def test_a_peer_that_fails_ends_the_script(
    peers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, complaint: str
) -> None:
    (tmp_path / "peer_x.py").write_text(program)
    monkeypatch.setattr(peers, "HERE", tmp_path)
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    monkeypatch.setattr(peers, "peer_python", lambda name: Path(sys.executable))
    with pytest.raises(SystemExit, match=f"(?s){complaint}") as ended:
        peers.run_peer("x", "peer_x.py")
    assert isinstance(ended.value, peers.PeerError)


def test_a_peer_s_error_is_exit_status_1() -> None:
    code = "from _peers import peer_python; peer_python('nobody')"
    environment = {**os.environ, "PYTHONPATH": str(FOLDER)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "there is no peer 'nobody'" in done.stderr


def test_the_exact_pins_of_the_peer_that_breaks_without_them(peers: Any) -> None:
    assert peers.PEERS["agentlightning-0.3.0"].requirements == (
        "agentlightning==0.3.0",
        "opentelemetry-sdk==1.39.1",
        "opentelemetry-exporter-otlp==1.39.1",
        "litellm[proxy]==1.80.11",
    )
