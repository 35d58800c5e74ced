"""Run pytest and benchmarks in the virtualenvs of the nox sessions."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

import nox

from tests.packaging import environments as envs

RESULTS = envs.ROOT / "benchmarks/results"
ISOLATED = {"PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "", "TOKENIZERS_PARALLELISM": "false"}
PATHS = os.pathsep.join(str(envs.ROOT / "tests" / name) for name in ("apps", "faults"))
TESTING = {**ISOLATED, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
TESTING |= {"PYTHONPATH": PATHS}  # tests start programs as scripts, which import their neighbours


def run_pytest(
    session: nox.Session,
    *arguments: str,
    environment: str = "",
    expected: Iterable[str] = (),
    writes_result: bool = False,
) -> None:
    """Run pytest; fail where an expected module is missing, whose tests would be skipped.

    Args:
        environment: session that made the virtualenv; the session's own without.
        writes_result: write the result of the whole session into benchmarks/results.
    """
    env = {**TESTING, "LIGHTSPAN_EXPECTED": ",".join(expected)}
    if writes_result and not session.posargs:
        name = re.sub(r"\W+", "_", session.name).strip("_")
        env["LIGHTSPAN_RESULT"] = str(RESULTS / f"{name}.json")
    python = envs.python_of(environment) if environment else "python"
    command = ("-m", "pytest", "--durations=5", *arguments, *session.posargs)
    session.run(python, *command, env=env, external=bool(environment))


def run_benchmark(session: nox.Session, python: str, *arguments: str) -> None:
    """Run a script of benchmarks/, whose modules it may import."""
    env = {**ISOLATED, "PYTHONPATH": str(envs.ROOT / "benchmarks")}
    session.run(python, *arguments, env=env, external=python != "python")
