"""The environments of the peers that the benchmarks compare with, and how a script runs in one.

    python benchmarks/_peers.py agentlightning-0.3.0    makes it if need be, prints its interpreter
    python benchmarks/_peers.py --list                  what there is

Each peer has a virtualenv of its own in `.nox/peers/`, made once and again when its requirements
change. The pins are those with which the peer works. A peer that cannot be installed or run ends
the benchmark with exit status 1: a ratio is never left out. Making an environment needs a package
index; measuring needs nothing but loopback.

From a script of this folder:

    from _peers import peer_python, run_peer

    figures = run_peer("agentlightning-0.3.0", "peer_transitions.py", "--turns", "16")
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from _pythons import find_interpreter, variable

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parent
FOLDER: Final = ROOT / ".nox" / "peers"
CORE: Final = str(ROOT / "packages" / "core")
GATEWAY: Final = str(ROOT / "packages" / "gateway")
LANGGRAPH: Final = str(ROOT / "packages" / "langgraph")
AUTOGEN: Final = str(ROOT / "packages" / "autogen")
CREWAI: Final = str(ROOT / "packages" / "crewai")
OPENAI_AGENTS: Final = str(ROOT / "packages" / "openai_agents")
FRAMEWORK: Final = ("langgraph", "langchain-openai")
"""The packages that a LangGraph app has without lightspan."""

OFFLINE: Final = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "AGENTOPS_API_KEY": "none",
    "AGENTOPS_FAIL_SAFE": "True",
    "OTEL_SDK_DISABLED": "false",
    "LANGSMITH_TRACING": "false",
    "LANGCHAIN_TRACING_V2": "false",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "no_proxy": "127.0.0.1,localhost",
    "NO_PROXY": "127.0.0.1,localhost",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_DISABLE_TRACKING": "true",
    "CREWAI_TRACING_ENABLED": "false",
}
"""Environment variables that keep a peer from fetching or sending anything while it is measured."""


@dataclass(frozen=True)
class Peer:
    """The packages of a peer's environment, and its Python version."""

    requirements: tuple[str, ...]
    python: str | None = None
    """Version of Python, such as "3.12"; None for the interpreter that runs the benchmark."""
    ours: tuple[str, ...] = ()
    """Packages of this repository to install in addition, in editable mode."""


PEERS: Final[Mapping[str, Peer]] = {
    # With newer OpenTelemetry it loses spans, with newer LiteLLM its proxy does not start.
    "agentlightning-0.3.0": Peer(
        (
            "agentlightning==0.3.0",
            "opentelemetry-sdk==1.39.1",
            "opentelemetry-exporter-otlp==1.39.1",
            "litellm[proxy]==1.80.11",
        )
    ),
    # It asks for Python 3.12.
    "agentlightning-1.0.2": Peer(("agentlightning==1.0.2",), python="3.12"),
    # What the issue of size is about: a LangGraph app's own environment, and with lightspan added.
    "langgraph": Peer(FRAMEWORK),
    "langgraph-lightspan": Peer(FRAMEWORK, ours=(CORE, LANGGRAPH)),
    "openinference": Peer(
        (
            *FRAMEWORK,
            "openinference-instrumentation-langchain==0.1.80",
            "openinference-instrumentation-openai==0.1.66",
        ),
        ours=(CORE, GATEWAY, LANGGRAPH),
    ),
    "openinference-autogen": Peer(
        (
            "autogen-agentchat==0.7.5",
            "autogen-ext[openai]==0.7.5",
            "openai==3.52.0",
            "openinference-instrumentation-autogen-agentchat==0.1.22",
        ),
        ours=(CORE, GATEWAY, AUTOGEN),
    ),
    "openinference-crewai": Peer(
        (
            "crewai==1.15.30",
            "openai==2.54.0",
            "openinference-instrumentation-crewai==1.1.21",
            "openinference-instrumentation-openai==0.1.66",
        ),
        ours=(CORE, GATEWAY, CREWAI),
    ),
    "openinference-openai-agents": Peer(
        (
            "openai-agents==0.24.0",
            "openai==3.52.0",
            "openinference-instrumentation-openai-agents==2.6.0",
        ),
        ours=(CORE, GATEWAY, OPENAI_AGENTS),
    ),
    "mlflow-3.17.2": Peer(("mlflow==3.17.2",)),
    "phoenix-20.26.1": Peer(("arize-phoenix==20.26.1",)),
    # On Linux an index may give a torch with CUDA, which is run on the CPU all the same.
    "trl-1.16.0": Peer(
        (
            "trl==1.16.0",
            "torch==2.13.0",
            "transformers==5.23.0",
            "accelerate==1.15.0",
            "datasets==5.2.0",
        )
    ),
    "trl-1.16.0-images": Peer(
        (
            "trl==1.16.0",
            "torch==2.13.0",
            "transformers==5.23.0",
            "accelerate==1.15.0",
            "datasets==5.2.0",
            "pillow==13.0.0",
        )
    ),
    "trl-1.16.0-learning": Peer(
        (
            "trl==1.16.0",
            "torch==2.13.0",
            "transformers==5.23.0",
            "accelerate==1.15.0",
            "datasets==5.2.0",
            "peft==0.21.2",
            "reasoning-gym==0.1.25",
        )
    ),
}


class PeerError(SystemExit):
    """Ends the benchmark with exit status 1: a peer cannot be installed or run."""


def peer_python(name: str) -> Path:
    """Return the interpreter of a peer's virtualenv, which is created if necessary.

    Raises:
        PeerError: the peer is unknown, or cannot be installed.
    """
    if name not in PEERS:
        raise PeerError(f"there is no peer {name!r}; there are {', '.join(PEERS)}")
    peer, folder = PEERS[name], FOLDER / name
    python, made = folder / "bin" / "python", folder / "made.txt"
    wanted = _fingerprint(peer)
    with _locked(name):
        if not (python.exists() and made.exists() and made.read_text() == wanted):
            print(f"making the environment of {name}: {folder}", file=sys.stderr, flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            _install(name, peer, folder, python)
            made.write_text(wanted)
    return python


def peer_environment(**more: str) -> dict[str, str]:
    """Return the environment variables of a peer's process.

    They are this process's without those of its Python, with settings that keep packages offline,
    and `more`.
    """
    mine = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        and not name.startswith(("OTEL_", "OPENAI_", "LANGCHAIN_", "LANGSMITH_", "AGL_"))
    }
    return {**mine, **OFFLINE, **more}


def run_peer(name: str, script: str, *arguments: str, timeout_s: float = 600.0) -> Any:
    """Run a script of this folder in a peer's environment; return its last output line, from JSON.

    Raises:
        PeerError: the script failed, took longer than `timeout_s`, or printed no JSON.
    """
    command = [str(peer_python(name)), "-I", str(HERE / script), *arguments]
    try:
        done = subprocess.run(
            command,
            env=peer_environment(),
            cwd=FOLDER,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise PeerError(f"{name}: {script} did not end within {timeout_s:g} s") from error
    if done.returncode:
        tail = (done.stderr or done.stdout)[-3000:]
        raise PeerError(f"{name}: {script} failed with status {done.returncode}:\n{tail}")
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError) as error:
        raise PeerError(f"{name}: {script} printed no figures:\n{done.stdout[-2000:]}") from error


def distributions(name: str) -> dict[str, str]:
    """Return name → version of the distributions of a peer's environment, without its pip."""
    done = subprocess.run(
        [str(peer_python(name)), "-I", "-m", "pip", "list", "--format", "json"],
        env=peer_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    versions = {item["name"].lower(): item["version"] for item in json.loads(done.stdout)}
    return {key: versions[key] for key in sorted(versions) if key not in ("pip", "setuptools")}


# --- making one -----------------------------------------------------------------------------
def _fingerprint(peer: Peer) -> str:
    """Return a hash of what determines a peer's environment, by which a change is noticed."""
    parts = [*peer.requirements, str(peer.python), sys.version]
    for path in peer.ours:
        parts += [path, *_declared(path)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _declared(path: str) -> list[str]:
    """Return the requirements of a package of ours, with those of the extras in `path`."""
    folder, _, extras = path.partition("[")
    project = tomllib.loads((Path(folder) / "pyproject.toml").read_text())["project"]
    optional = project.get("optional-dependencies", {})
    more = [optional[extra] for extra in extras.rstrip("]").split(",") if extra]
    return [*project["dependencies"], *itertools.chain.from_iterable(more)]


def _install(name: str, peer: Peer, folder: Path, python: Path) -> None:
    wanted = list(peer.requirements)
    for path in peer.ours:
        wanted += ["-e", path]
    _do(name, [_interpreter(name, peer), "-m", "venv", str(folder)])
    _do(name, [str(python), "-m", "pip", "install", "--quiet", *wanted])


def _do(name: str, command: list[str]) -> None:
    done = subprocess.run(
        command, env=peer_environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        tail = (done.stderr or done.stdout)[-3000:]
        raise PeerError(f"the peer {name} cannot be installed:\n{' '.join(command)}\n{tail}")


def _interpreter(name: str, peer: Peer) -> str:
    """Return the path of an interpreter of the Python version that a peer needs."""
    if peer.python is None or sys.version.startswith(f"{peer.python}."):
        return sys.executable
    interpreter = find_interpreter(peer.python)
    if interpreter is not None:
        return interpreter
    raise PeerError(
        f"the peer {name} needs Python {peer.python}, which was not found on the PATH or among "
        f"pyenv's; {variable(peer.python)} may name its interpreter"
    )


@contextmanager
def _locked(name: str) -> Iterator[None]:
    """Hold a file lock in the block, so that one process at a time creates an environment."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Create the environments that are named on the command line."""
    parser = argparse.ArgumentParser(description="Make the environment of a peer.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PEERS))
    parser.add_argument("--list", action="store_true", help="print the peers and their pins")
    options = parser.parse_args()
    if options.list:
        for name, peer in PEERS.items():
            print(f"{name}: {' '.join(peer.requirements)}")
    for name in options.names:
        print(peer_python(name))


if __name__ == "__main__":
    main()
