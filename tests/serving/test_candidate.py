"""Tests of `lightspan serve --candidate` as a process, with real LoRA weights and a real store."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

import lightspan
from lightspan.capture import sdk_instrumentation
from lightspan.capture.emit import agent
from lightspan.cli import main
from lightspan.errors import ConfigError
from lightspan.schema import semconv as c
from lightspan.schema.routing import Route, Routing, Rule, Target
from lightspan.schema.spans import SpanKind
from lightspan.stores import open_store
from lightspan_gateway import candidate_command
from lightspan_gateway.serving.candidate.sides import Mark, Side, read_mark, side_of
from lightspan_gateway.serving.candidate.state import CandidateState
from tests.serving.test_endpoint import MESSAGES, expected_ids, served_by, write_run

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.timeout(600),  # a test starts up to four servers
]

ROUTING = Routing(
    rules=[
        Rule("writer", Target(route=Route.POLICY, policy="policy")),
        Rule("checker", Target(route=Route.POLICY, policy="policy")),
    ],
    default=Target(route=Route.BASE, policy="base"),
)
ADMIN, CALLER = ("a" * 40, "c" * 40)
KEYS = {"CANDIDATE_ADMIN": ADMIN, "CANDIDATE_CALLER": CALLER}


# --- runs and servers -----------------------------------------------------------------------
def write_adapter(folder: Path, tiny: Path, seed: int) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    from lightspan_torch.engine.weights import load_model

    torch.manual_seed(seed)
    config = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    get_peft_model(load_model(tiny), config).save_pretrained(str(folder))


@pytest.fixture(scope="module")
def adapters(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return two folders, each with other LoRA weights for the tiny model."""
    folders = tuple(tmp_path_factory.mktemp("adapters") / name for name in ("old", "new"))
    for seed, folder in enumerate(folders):
        write_adapter(folder, tiny, seed)
    return folders  # type: ignore[return-value]


@pytest.fixture
def runs(tiny: Path, adapters: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """Return the folders of two complete runs, the current and the candidate."""
    folders = []
    for name, adapter in zip(("old", "new"), adapters, strict=True):
        served = served_by(tiny, ROUTING, policy=str(adapter))
        folders.append(write_run(tmp_path / name, served))
    return folders[0], folders[1]


class Served:
    """A process of `lightspan serve --candidate`."""

    def __init__(self, runs: tuple[Path, Path], *options: str, share: float = 0.5) -> None:
        arguments = [str(runs[0]), "--candidate", str(runs[1]), "--share", str(share), *options]
        command = [sys.executable, "-m", "lightspan.cli", "serve", "--port", "0", *arguments]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **KEYS},
        )
        self.lines: list[str] = []
        self.url = ""
        assert self.process.stdout is not None
        try:
            for line in self.process.stdout:
                self.lines.append(line.rstrip())
                if ready := re.match(r"serving .* at (http\S+)/v1 ", line):
                    self.url = ready[1]
                    return
            pytest.fail("\n".join(self.lines))
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            rest, _ = self.process.communicate(timeout=120)
            self.lines.extend(rest.splitlines())
            assert self.process.returncode == 0, self.lines


@contextmanager
def serving(runs: tuple[Path, Path], *options: str, share: float = 0.5) -> Iterator[Served]:
    served = Served(runs, *options, share=share)
    try:
        yield served
    finally:
        served.stop()


def command(*arguments: str) -> str:
    """Return what `lightspan candidate` prints."""
    parser = argparse.ArgumentParser()
    candidate_command.add(parser.add_subparsers())
    options = parser.parse_args(["candidate", *arguments])
    return str(options.run(options))


def client_of(url: str, path: str = "/agents/writer/v1", key: str = "-") -> openai.OpenAI:
    return openai.OpenAI(base_url=url + path, api_key=key, max_retries=0)


def ask(
    url: str, attempt: str | None = None, path: str = "/agents/writer/v1", **fields: Any
) -> tuple[Mark, str]:
    """Return the weights that answered a chat, and the answer. No recording sees the call."""
    body = {"model": "policy", "messages": MESSAGES, "temperature": 0, "max_tokens": 6, **fields}
    call = urllib.request.Request(
        f"{url}{path}/chat/completions",
        data=json.dumps(body).encode(),
        headers={} if attempt is None else {c.HEADER_ATTEMPT: attempt},
    )
    with urllib.request.urlopen(call, timeout=120) as response:
        answer = json.loads(response.read())
    mark = read_mark(answer["model"])
    assert mark is not None, answer
    return mark, str(answer["choices"][0]["message"]["content"])


def expected_side(run: Path, attempt: str) -> Side:
    state = CandidateState(run / "candidate.db", create=False)
    comparison = state.latest()
    state.close()
    return side_of(f"attempt {attempt}", comparison.salt, comparison.share)


def attempts_on(run: Path, count: int) -> list[str]:
    """Return ids of attempts, `count` for each side."""
    ids = [f"at-{number}" for number in range(200)]
    sides = {attempt: expected_side(run, attempt) for attempt in ids}
    return [each for side in Side for each in [i for i in ids if sides[i] is side][:count]]


# --- one server -----------------------------------------------------------------------------
@pytest.mark.slow
def test_each_side_answers_with_its_weights_in_every_api(
    runs: tuple[Path, Path], tiny: Path, adapters: tuple[Path, Path]
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    expected = {}
    for side, adapter in zip((Side.CURRENT, Side.CANDIDATE), adapters, strict=True):
        base = AutoModelForCausalLM.from_pretrained(tiny)
        expected[side] = expected_ids(PeftModel.from_pretrained(base, adapter).eval(), tokenizer)
    assert expected[Side.CURRENT] != expected[Side.CANDIDATE]
    with serving(runs, "--dtype=float32") as served:
        for attempt in attempts_on(runs[0], 2):
            headers = {c.HEADER_ATTEMPT: attempt}
            with client_of(served.url) as client:
                answer = client.chat.completions.create(
                    model="policy",
                    messages=MESSAGES,
                    temperature=0,
                    max_tokens=12,
                    extra_body={"return_token_ids": True},
                    extra_headers=headers,
                )
                chunks = list(
                    client.chat.completions.create(
                        model="policy",
                        messages=MESSAGES,
                        max_tokens=2,
                        stream=True,
                        extra_headers=headers,
                    )
                )
                response = client.responses.create(
                    model="policy", input="Hi", max_output_tokens=2, extra_headers=headers
                )
            with anthropic.Anthropic(
                base_url=f"{served.url}/agents/writer", api_key="-", max_retries=0
            ) as other:
                message = other.messages.create(
                    model="policy", messages=MESSAGES, max_tokens=2, extra_headers=headers
                )
            mark = read_mark(answer.model)
            assert mark is not None
            side = expected_side(runs[0], attempt)
            assert mark.side is side
            assert answer.choices[0].model_extra["token_ids"] == expected[side]  # type: ignore[index]
            assert {chunks[0].model, response.model, message.model} == {str(mark)}
            # another agent, with the starting weights, and the policy by its name
            assert ask(served.url, attempt, "/agents/helper/v1")[0] == mark._replace(policy="base")
            assert ask(served.url, attempt, "/v1")[0] == mark
        with client_of(served.url, "/v1") as client:
            names = [model.id for model in client.models.list()]
            assert names == ["base", "policy", "writer", "checker"]
            with pytest.raises(openai.NotFoundError, match="unknown model 'candidate/policy'"):
                client.chat.completions.create(
                    model="candidate/policy", messages=MESSAGES, extra_headers=headers
                )
    assert sum("merging the adapter of" in line for line in served.lines) == 2
    text = "\n".join(served.lines)
    assert f"the candidate {runs[1]} answers 0.5 of attempts (comparison " in text
    assert "each call its own" in text
    assert "(candidate/policy)" in served.lines[-1]


@pytest.mark.slow
def test_calls_without_an_id_are_grouped_by_conversation_and_user(runs: tuple[Path, Path]) -> None:
    with serving(runs) as served:
        alone = {ask(served.url)[0].side for _ in range(20)}
        assert alone == {*Side}
        for user in ("ann", "bob"):
            assert len({ask(served.url, user=user)[0].side for _ in range(5)}) == 1
        for number in range(6):
            chat: list[Any] = [{"role": "user", "content": f"Question {number}"}]
            first, text = ask(served.url, messages=chat)
            chat += [{"role": "assistant", "content": text}, {"role": "user", "content": "And?"}]
            assert {ask(served.url, messages=chat)[0].side for _ in range(4)} == {first.side}
        with client_of(served.url) as client:
            for _ in range(6):
                response = client.responses.create(model="policy", input="Hi", max_output_tokens=2)
                later = client.responses.create(
                    model="policy",
                    input="And?",
                    previous_response_id=response.id,
                    max_output_tokens=2,
                )
                assert later.model == response.model
        # without a key of an administrator, nothing is decided over HTTP
        status, body = post(served.url, "", comparison_id="00000000")
        assert status == 403
        assert "--admin-key-env NAME" in body["error"]["message"]


# --- restarts, decisions, feedback ----------------------------------------------------------
@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    yield f"sqlite:{tmp_path / 'production.db'}"
    sdk_instrumentation.uninstall()
    sdk_instrumentation.close()


@pytest.fixture
def start(runs: tuple[Path, Path]) -> Iterator[Callable[[], Served]]:
    """Return a function that starts a server, which a test may kill."""
    servers: list[Served] = []

    def begin() -> Served:
        servers.append(Served(runs))
        return servers[-1]

    yield begin
    for server in servers:
        server.stop()


def run_app(url: str, *, fails: bool = False) -> str:
    """Run an app with two agents and three calls, as a recorded attempt; return its id."""
    with openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="-", max_retries=0) as client:
        try:
            with agent("team"):
                for name in ("writer", "checker", "writer"):
                    with agent(name):
                        client.chat.completions.create(
                            model="any", messages=MESSAGES, max_tokens=2, temperature=0
                        )
                attempt_id = str(lightspan.current_attempt_id())
                if fails:
                    raise RuntimeError("the app fails")
        except RuntimeError:
            pass
    return attempt_id


def marks_of(store: str) -> dict[str, list[Mark]]:
    """Return for each recorded attempt the weights that answered its calls."""

    async def read() -> dict[str, list[Mark]]:
        async with open_store(store) as opened:
            rows = (await opened.summaries()).rows
            spans = await opened.spans([str(row.attempt_id) for row in rows])
        marks = {
            attempt_id: [
                read_mark(span.attributes.get(c.RESPONSE_MODEL))
                for span in each
                if span.kind is SpanKind.LLM
            ]
            for attempt_id, each in spans.items()
        }
        assert all(None not in each for each in marks.values())
        return marks  # type: ignore[return-value]

    return asyncio.run(read())


@pytest.mark.slow
def test_a_kill_in_between_changes_neither_sides_nor_numbers(
    runs: tuple[Path, Path], store: str, start: Callable[[], Served]
) -> None:
    """Record, kill, restart, compare, promote, restart; feedback counts for what answered."""
    served = start()
    attempts: list[str] = []
    with lightspan.record(store) as recording:
        with lightspan.connect(served.url):
            attempts += [run_app(served.url, fails=number == 0) for number in range(12)]
        under_way = attempts_on(runs[0], 4)
        half = [ask(served.url, attempt)[0] for attempt in under_way]
        served.kill()
        served = start()
        assert [ask(served.url, attempt)[0] for attempt in under_way] == half
        with lightspan.connect(served.url):
            attempts += [run_app(served.url) for _ in range(12)]
        assert recording.flush()
        marks = marks_of(store)
        assert marks.keys() == {*attempts}
        for attempt_id, each in marks.items():
            assert len(each) == 3
            assert {mark.side for mark in each} == {expected_side(runs[0], attempt_id)}
        sides = {attempt_id: each[0].side for attempt_id, each in marks.items()}
        with pytest.raises(ConfigError, match="the candidate is not compared"):
            command("promote", str(runs[0]))
        # the candidate's attempts are rated well, half of the current ones badly
        for number, attempt_id in enumerate(attempts[2:]):
            is_good = sides[attempt_id] is Side.CANDIDATE
            lightspan.feedback(attempt_id, is_good or number % 2 == 0, store=store)
        before = json.loads(command("status", served.url, "--store", store, "--json"))
        count = {side: sum(each is side for each in sides.values()) for side in Side}
        for side in Side:
            shown = before["result"]["sides"][side]
            rated = sum(sides[attempt_id] is side for attempt_id in attempts[2:])
            assert (shown["attempts"], shown["rated"]) == (count[side], rated)
            assert shown["failed"] == (sides[attempts[0]] is side)
        served.kill()
        served = start()
        after = json.loads(command("status", str(runs[0]), "--store", store, "--json"))
        assert after["result"] == before["result"]
        assert after["server"] == before["server"]
        # promote; the attempts that have begun stay, also after another kill
        assert "promoted: " in command("promote", str(runs[0]), "--store", store)
        candidate = next(mark for mark in half if mark.side is Side.CANDIDATE)
        new = Mark("policy", candidate.digest, None, "")
        assert [ask(served.url, attempt)[0] for attempt in under_way] == half
        assert {ask(served.url, f"after-{number}")[0] for number in range(8)} == {new}
        served.kill()
        served = start()
        assert any("was promoted: it answers all new attempts" in line for line in served.lines)
        assert [ask(served.url, attempt)[0] for attempt in under_way] == half
        assert ask(served.url, "after-restart")[0] == new
        with lightspan.connect(served.url):
            run_app(served.url)
        assert recording.flush()
        # late feedback counts for the side that answered; attempts after the decision do not
        lightspan.feedback(attempts[0], 0.0, store=store)
        late = json.loads(command("status", str(runs[0]), "--store", store, "--json"))["result"]
        for side in Side:
            more = sides[attempts[0]] is side
            assert late["sides"][side]["rated"] == before["result"]["sides"][side]["rated"] + more
            assert late["sides"][side]["attempts"] == count[side]
        assert "rolled back: " in command("roll-back", str(runs[0]), "--store", store)
        assert ask(served.url, "later")[0].digest != candidate.digest


@pytest.mark.slow
def test_a_candidate_that_loses_is_promoted_only_anyway(
    runs: tuple[Path, Path], store: str
) -> None:
    with serving(runs) as served, lightspan.record(store) as recording:
        with lightspan.connect(served.url):
            attempts = [run_app(served.url) for _ in range(16)]
        assert recording.flush()
        for attempt_id in attempts:
            is_good = expected_side(runs[0], attempt_id) is Side.CURRENT
            lightspan.feedback(attempt_id, is_good, store=store)
        assert "the candidate is worse by 1.000" in command("status", served.url, "--store", store)
        with pytest.raises(ConfigError, match=r"not promoted: the candidate is worse by 1\.000"):
            command("promote", str(runs[0]), "--store", store)
        assert ask(served.url, "still-compared")[0].side is not None
        command("promote", str(runs[0]), "--store", store, "--anyway")
        assert ask(served.url, "promoted")[0].side is None


@pytest.mark.slow
def test_no_call_is_lost_while_a_candidate_is_promoted(runs: tuple[Path, Path]) -> None:
    attempts: list[list[Mark]] = []
    failures: list[Exception] = []
    stop = threading.Event()
    with serving(runs) as served:

        def work(worker: int) -> None:
            number = 0
            while not stop.is_set():
                number += 1
                try:
                    attempts.append(
                        [ask(served.url, f"{worker}-{number}", stream=False)[0] for _ in range(3)]
                    )
                except Exception as error:
                    failures.append(error)

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for action in ("promote", "roll-back", "promote"):
            before = len(attempts)
            while len(attempts) < before + 12 and not failures:
                time.sleep(0.05)
            command(action, str(runs[0]), *["--anyway"] * (action == "promote"))
        before = len(attempts)
        while len(attempts) < before + 12 and not failures:
            time.sleep(0.05)
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures
    assert all(len(set(marks)) == 1 for marks in attempts)
    digests = {mark.digest for marks in attempts for mark in marks}
    assert len(digests) == 2


# --- permissions and errors -----------------------------------------------------------------
def post(url: str, key: str, action: str = "promote", **fields: Any) -> tuple[int, Any]:
    call = urllib.request.Request(
        f"{url}/lightspan/candidate/{action}",
        data=json.dumps(fields).encode(),
        headers={"Authorization": f"Bearer {key}"},
    )
    try:
        with urllib.request.urlopen(call, timeout=30) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


@pytest.mark.slow
def test_only_the_administrator_decides_over_http(
    runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    options = [
        *("--api-key-env", "CANDIDATE_CALLER", "--admin-key-env", "CANDIDATE_ADMIN"),
    ]
    with serving(runs, *options) as served:
        for name in KEYS:
            assert "0.5 of new attempts" in command("status", served.url, "--key-env", name)
        shown = json.loads(command("status", served.url, "--key-env", "CANDIDATE_CALLER", "--json"))
        comparison = shown["server"]["comparison"]
        assert not comparison["salt"]
        comparison_id = comparison["comparison_id"]
        assert post(served.url, "wrong", comparison_id=comparison_id)[0] == 401
        status, body = post(served.url, CALLER, comparison_id=comparison_id)
        assert status == 403
        assert "only the administrator's key" in body["error"]["message"]
        assert post(served.url, ADMIN, "delete", comparison_id=comparison_id)[0] == 404
        assert post(served.url, ADMIN, comparison_id="00000000")[0] == 409
        assert post(served.url, ADMIN, comparison_id=3)[0] == 400
        with client_of(served.url, key=ADMIN) as client, pytest.raises(openai.AuthenticationError):
            client.models.list()  # it decides, and makes no calls
        with pytest.raises(ConfigError, match="only the administrator's key can promote"):
            command("promote", served.url, "--anyway", "--key-env", "CANDIDATE_CALLER")
        shown = command("promote", served.url, "--anyway", "--key-env", "CANDIDATE_ADMIN")
        assert f"{runs[1]} answers all new attempts (not compared)" in shown
        with client_of(served.url, key=CALLER) as client:
            answer = client.chat.completions.create(model="policy", messages=MESSAGES, max_tokens=2)
        mark = read_mark(answer.model)
        assert mark is not None
        assert mark.side is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--share", "0.5"], "--share applies to --candidate only"),
        (["--candidate", "{new}", "--share", "0"], "--share 0 must be above 0 and below 1"),
        (["--candidate", "{old}"], "answers with the same weights as"),
        (["--candidate", "{none}"], "is no run of lightspan and no model"),
        (["--candidate", "{other}"], "the candidate does not answer the calls of 'writer'"),
        (["--candidate", "{names}"], "the candidate has no policy 'policy', which apps may name"),
        (["--candidate", "{new}", "--admin-key-env", "NO_SUCH_KEY"], "that variable is not set"),
        (["--candidate", "{new}", "--reader-key-env", "X"], "--reader-key-env applies to a store"),
        (["--admin-key-env", "NO_SUCH_KEY"], "--admin-key-env applies to a store (--store) only"),
    ],
)
def test_what_cannot_be_served_is_an_error(
    runs: tuple[Path, Path],
    tiny: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    write_run(tmp_path / "other", served_by(tiny, Routing(), policy=str(tiny)))
    write_run(tmp_path / "names", served_by(tiny, ROUTING, a=str(tiny), b=str(tiny)))
    folders = {"none": "nothing", "other": "other", "names": "names", "old": "old", "new": "new"}
    paths = {name: str(tmp_path / folder) for name, folder in folders.items()}
    arguments = [option.format(**paths) for option in options]
    assert main(["serve", str(runs[0]), "--port", "0", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_commands_name_what_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIGHTSPAN_STORE", raising=False)
    with pytest.raises(ConfigError, match="no candidate has been served there"):
        command("status", str(tmp_path))
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9 is no `lightspan serve --candidate`"):
        command("status", "http://127.0.0.1:9")
