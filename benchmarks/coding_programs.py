"""Train coding agents as they are: which of their calls are recorded, trained and rejected?

    python benchmarks/coding_programs.py                        all programs that are left
    python benchmarks/coding_programs.py --programs codex pi --folder /tmp/runs

Each program that is on the PATH repairs a small git repository behind `CodingAgent`, in a dry run
of two sessions and one of the evaluation. The tokens are those of SmolLM2's tokenizer. The answers
are scripted, and every second session gives up, so that rewards vary. Each program is a line of
benchmarks/results/coding_programs.jsonl, so the same command continues where it stopped.
`benchmarks/tables.py` makes the table of docs/guides/coding-agents.md.

The programs are installed by their own package managers (`npm install -g …`, `pip install …`). It
needs the router example's model beside lightspan[train]: its tokenizer.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from _coding_programs_table import RESULTS, rows_of
from _report import circumstances
from learner_memory import default_model

from lightspan import CodingAgent, LightningRL, LocalRunners, Trainer
from lightspan.lightning.episode import Episode
from lightspan.lightning.rows import merge
from lightspan.lightning.selection import CallStatus, classify_calls
from lightspan.lightning.transitions import trained_transitions
from lightspan.protocols.engine import EngineCapabilities, GenerationRequest
from lightspan.schema import semconv as c
from lightspan.schema.records import Mode
from lightspan.schema.routing import make_routing
from lightspan.schema.spans import SpanKind
from lightspan.training.folder import RunFolder
from lightspan_testing.scripted_engine import ScriptedEngine
from lightspan_testing.stored_episodes import stored_episodes
from lightspan_testing.tiny import CHAT_TEMPLATE
from lightspan_torch.engine.tokenizer import TransformersTokenizer

CONTEXT: Final = 65_536
INSTRUCTION: Final = "The test in test_calc.py fails. Fix calc.py, and run the test."
BUG: Final = "def add(a, b):\n    return a - b\n"
FIXED: Final = BUG.replace("-", "+")
TEST: Final = "from calc import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n"
RUN_TEST: Final = "python3 -B test_calc.py"
COMMANDS: Final = ("cat calc.py", "sed -i s/-/+/ calc.py", RUN_TEST)
TEMPLATE: Final = CHAT_TEMPLATE.replace("'\\n<tool_call>\\n", "'<tool_call>\\n")
"""A chat template that writes a call without content as `call` does."""
_ASSISTANT: Final = "<|im_start|>assistant"


class Program(NamedTuple):
    """A program of the table, with the answers of a policy that repairs the repository."""

    name: str
    version: Sequence[str]
    """Command that prints the version."""
    answers: Sequence[str]
    """Answers of the main conversation, in order."""
    arguments: Sequence[str] = ()


def call(name: str, **arguments: Any) -> str:
    """Return an answer that calls a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def shell(tool: str, field: str = "command", **others: Any) -> list[str]:
    """Return the answers of a repair by a program's shell."""
    calls = [call(tool, **{field: command}, **others) for command in COMMANDS]
    return [*calls, "Fixed: add() adds now."]


EDIT: Final = (
    call("Read", file_path="$WORKSPACE/calc.py"),
    call("Edit", file_path="$WORKSPACE/calc.py", old_string="a - b", new_string="a + b"),
    call("Bash", command=RUN_TEST, description="Run the test"),
    "Fixed: add() adds now.",
)
SUBMIT: Final = call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
PROGRAMS: Final = (
    Program("codex", ("codex", "--version"), shell("exec_command", "cmd")),
    Program("pi", ("pi", "--version"), shell("bash")),
    Program(
        *("pi", ("pi", "--version"), shell("bash")),
        arguments=("--system-prompt", "You fix bugs.", "--tools", "bash", "--no-skills"),
    ),
    Program("mini-swe-agent", ("mini", "--help"), [*shell("bash")[:3], SUBMIT]),
    Program("aider", ("aider", "--version"), [f"calc.py\n```\n{FIXED}```\n"]),
    Program("opencode", ("opencode", "--version"), shell("bash", description="Repair")),
    Program(
        *("claude-code", ("claude", "--version"), EDIT),
        arguments=("--bare", "--tools", "Bash,Read,Edit"),
    ),
    Program("claude-code", ("claude", "--version"), EDIT),
    Program(
        *("qwen-code", ("qwen", "--version")),
        shell("run_shell_command", is_background=False),
    ),
)


class Policy:
    """A policy that repairs the repository in every second session, and gives up in the others.

    Args:
        tokenizer: tokenizer of the prompts.
        answers: answers of the main conversation.
    """

    def __init__(self, tokenizer: TransformersTokenizer, answers: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._answers = answers
        self._sessions: dict[str, tuple[bool, int]] = {}
        """Attempt → whether it gives up, and the assistant's turns in its first prompt."""

    def __call__(self, request: GenerationRequest) -> str:
        """Return the next answer of a conversation."""
        text = self._tokenizer.tokenizer.decode(request.prompt_ids)  # with special tokens
        if request.policy == "base":
            return "Repair add"
        turns = text.count(_ASSISTANT)  # aider's first prompt has examples
        new = (len(self._sessions) % 2 == 1, turns)
        gives_up, first = self._sessions.setdefault(request.rollout, new)
        turn = turns - first
        if gives_up or turn >= len(self._answers):
            return "I cannot fix it."
        workspace = re.search(r"/[\w/.-]*/try[-\w]+/workspace", text)
        return self._answers[turn].replace("$WORKSPACE", workspace[0] if workspace else "")


def make_repository(folder: Path) -> Path:
    """Make a git repository with a bug and a failing test."""
    folder.mkdir()
    (folder / "calc.py").write_text(BUG)
    (folder / "test_calc.py").write_text(f"{TEST}\n\ntest_add()\n")
    name = ("-c", "user.name=bench", "-c", "user.email=bench@localhost")
    for command in (["init", "-q"], ["add", "."], [*name, "commit", "-q", "-m", "Add calc"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    for key in ("user.name", "user.email"):  # the HOME of a session has no identity
        subprocess.run(["git", "config", key, "bench@localhost"], cwd=folder, check=True)
    return folder


def make_model(source: Path, folder: Path) -> Path:
    """Save a tiny random model with the tokenizer of `source` and a template that has tools."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = TEMPLATE
    tokenizer.model_max_length = CONTEXT
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run(program: Program, model: Path, repository: Path, folder: Path) -> dict[str, Any]:
    """Run the sessions of a program; return its row of the table."""
    from lightspan_torch.engine.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(model))
    engine = ScriptedEngine(
        tokenizer,
        Policy(tokenizer, program.answers),
        policies={"policy": 0, "base": 0},
        capabilities=EngineCapabilities(exact_tokens=True),
        chunk=64,
    )
    app = CodingAgent(
        program.name,
        verify=[sys.executable, "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        protected=["test_calc.py"],
        arguments=program.arguments,
        timeout_s=600,
    )
    algorithm = LightningRL(
        model, optimize="app", frozen="base", group_size=2, max_tokens=2_000, timeout_s=900
    )
    trainer = Trainer(algorithm, runners=LocalRunners(1), steps=1, engine=engine)
    tasks = [
        {"instruction": INSTRUCTION, "workspace": str(repository), "id": split}
        for split in ("train", "val")
    ]
    report = trainer.dev(app, tasks[:1], tasks[1:], count=1, folder=folder, replay=False)
    breaks = {} if report.rows is None else report.rows.causes
    return {**row_of(folder), "breaks": breaks}


def row_of(folder: Path) -> dict[str, Any]:
    """Return what the store of a dry run says of its sessions."""
    every = stored_episodes(RunFolder(folder).store_url)
    episodes = [episode for episode in every if episode.mode is not Mode.VAL]
    routing = make_routing({"app": "policy"}, "base", "policy")
    coverages = [classify_calls(episode, routing, modes=(Mode.DEV,)) for episode in episodes]
    entries = [entry for coverage in coverages for entry in coverage.entries]
    solved = max(zip(episodes, coverages, strict=True), key=lambda pair: pair[0].reward or 0.0)
    transitions = trained_transitions(*solved)
    calls = [entry.call for entry in entries]
    return {
        "calls": len(calls),
        "recorded": sum(call.record is not None for call in calls),
        "trained": count(entries, CallStatus.TRAINED),
        "frozen": dict(
            Counter(e.call.agent_path for e in entries if e.status is CallStatus.FROZEN)
        ),
        "rejected": dict(Counter(str(e.rejection) for e in entries if e.rejection is not None)),
        "refused": sum(refused(episode) for episode in episodes),
        "prompt": min((len(t.record.prompt) // 4 for t in transitions), default=0),
        "session_calls": len(transitions),
        "session_rows": len(merge(transitions)),
        "rewards": sorted(episode.reward or 0.0 for episode in episodes),
        "evaluation_calls": sum(
            call.record is not None
            for episode in every
            if episode.mode is Mode.VAL
            for call in episode.calls
        ),
        "evaluation_rewards": sorted(e.reward or 0.0 for e in every if e.mode is Mode.VAL),
    }


def count(entries: Sequence[Any], status: CallStatus) -> int:
    """Return the number of calls with a status."""
    return sum(entry.status is status for entry in entries)


def refused(episode: Episode) -> int:
    """Return the number of requests that the gateway refused."""
    spans = [span for span in episode.spans if span.kind is SpanKind.LLM]
    return sum(c.ERROR_TYPE in span.attributes for span in spans)


def version_of(command: Sequence[str]) -> str:
    """Return the version that a program prints; of a Python program, its distribution's."""
    if command[0] == "mini":
        python = Path(shutil.which("mini") or "").resolve().parent / "python"
        script = "import importlib.metadata as m; print(m.version('mini-swe-agent'))"
        command = [str(python), "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return re.findall(r"\d+\.\d+[\w.]*", done.stdout + done.stderr)[-1]


def main() -> int:
    """Run the programs that are left; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--programs", nargs="*", help="names (all that are on the PATH)")
    parser.add_argument("--folder", type=Path, help="folder in which to keep the runs")
    parser.add_argument("--model", type=Path, help="folder with the tokenizer")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of the results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = options.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        model = make_model(options.model or default_model(), folder / "model")
        repository = make_repository(folder / "repository")
        for number, program in enumerate(PROGRAMS):
            if options.programs is not None and program.name not in options.programs:
                continue
            if shutil.which(program.version[0]) is None:
                print(f"{program.name}: not on the PATH")
                continue
            what = {
                "program": program.name,
                "version": version_of(program.version),
                "arguments": list(program.arguments),
            }
            if any(what.items() <= row.items() for row in rows_of(options.results)):
                continue
            row = {**what, **run(program, model, repository, folder / f"run{number}")}
            line = json.dumps({**row, **circumstances()})
            print(line, flush=True)
            with options.results.open("a") as file:
                file.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
