"""Tests of serving a run: the run's folder, the output, and the process."""

from __future__ import annotations

import functools
import json
import shlex
import socket
import threading
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from serve_process import serving  # type: ignore[import-not-found]

from lightspan import LoRA, Optimizer, Trainer
from lightspan.cli import main
from lightspan.errors import ConfigError, ModelError
from lightspan.schema.llm import LLM
from lightspan.schema.routing import Route, Routing, Rule, Target
from lightspan.training.manifest import KEY, ServedPolicy, ServedRun
from lightspan_gateway.serving.endpoint import ServeOptions, describe, load_served, serve

POLICY = Target(route=Route.POLICY, policy="policy")
MESSAGES: Any = [{"role": "user", "content": "What is 12 + 7 * 3?"}]


def write_run(folder: Path, served: ServedRun | None, **result: Any) -> Path:
    """Write the folder of a complete run; return it.

    Args:
        folder: the folder.
        served: description of the served run; None for none.
        result: fields of the run's result.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    if served is not None:
        result[KEY] = msgspec.to_builtins(served)
    (folder / "result.json").write_text(json.dumps({"steps": 1, **result}))
    return folder


def served_by(model: Path, routing: Routing, **policies: str) -> ServedRun:
    """Return the description of a served run; `policies` is policy name → folder of its weights."""
    fields = {
        name: ServedPolicy(folder=folder, model=str(model), version=3)
        for name, folder in policies.items()
    }
    return ServedRun(policies=fields, base_model=str(model), routing=routing)


# --- the folder -----------------------------------------------------------------------------
def test_how_to_serve_survives_its_file(tmp_path: Path) -> None:
    judge = LLM(base_url="http://127.0.0.1:9/v1", model="m", api_key_env="K", sampling={"n": 1})
    routing = Routing(
        rules=[Rule("writer", POLICY), Rule("judge", Target(route=Route.ENDPOINT, endpoint=judge))],
        default=Target(route=Route.BASE, policy="base"),
    )
    written = served_by(tmp_path / "base", routing, policy="model")
    folder = write_run(tmp_path / "run", written)
    assert load_served(folder) == (written, folder)


def test_what_cannot_be_served_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no run of lightspan"):
        load_served(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is not complete.*resume=True, --resume"):
        load_served(tmp_path)
    bare = write_run(tmp_path / "bare", None)
    with pytest.raises(ConfigError, match="trained no policy, so it has no model"):
        load_served(bare)
    odd = write_run(tmp_path / "odd", None, **{KEY: {"policies": 3}})
    with pytest.raises(ConfigError, match=r"cannot be served, its result\.json is damaged"):
        load_served(odd)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "without a key anyone could use the model"),
        (["--api-key-env", "NO_SUCH_KEY"], "--api-key-env NO_SUCH_KEY: that variable is not set"),
        (["--upstream", "http://u/v1", "--upstream-key-env", "NO_SUCH_KEY"], "$NO_SUCH_KEY"),
        (["--upstream", "foo"], "--upstream 'foo' is not an http or https URL"),
        (["--port", "70000"], "--port 70000 is no port"),
        (["--device", "tpu"], 'device=\'tpu\' is unknown: use "cpu", or "cuda" for a GPU'),
        (["--max-tokens", "0"], "--max-tokens 0 must be at least 1"),
        (["--image-host", "https://a.example"], "'https://a.example' is not in a list of hosts"),
    ],
)
def test_options_are_checked_before_anything_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["serve", str(tmp_path / "nothing"), *arguments]) == 1
    assert message in capsys.readouterr().err


def test_a_taken_port_is_found_before_the_weights_load(tmp_path: Path) -> None:
    (tmp_path / "no-model").mkdir()
    folder = write_run(tmp_path / "run", served_by(tmp_path, Routing(), policy="../no-model"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*in use; give another"
        ):
            serve(folder, ServeOptions(port=port))
    with pytest.raises(ModelError):
        serve(folder, ServeOptions(port=port))


# --- endpoints of a run from elsewhere ------------------------------------------------------


def from_elsewhere(folder: Path, *urls: str, variable: str | None = "JUDGE_KEY") -> Path:
    """Write a run without weights with a judge at each URL; return its folder.

    Args:
        folder: folder of the run.
        urls: URLs of the judges.
        variable: environment variable of the judge's key; None for no key.
    """
    judges = [LLM(base_url=url, model="big", api_key_env=variable) for url in urls]
    targets = [Target(route=Route.ENDPOINT, endpoint=judge) for judge in judges]
    routing = Routing(rules=[Rule("judge", target) for target in targets])
    return write_run(folder, served_by(folder, routing, policy="model"))


def test_an_endpoint_of_a_run_from_elsewhere_has_to_be_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = from_elsewhere(tmp_path / "run", "https://one.test/v1", "http://two.test:8/v1")
    assert main(["serve", str(folder)]) == 1
    assert capsys.readouterr().err == (
        f"lightspan: the run in {folder} sends calls to these endpoints, with keys of your "
        "environment:\n"
        "  judge -> https://one.test/v1, with the key in $JUDGE_KEY\n"
        "  judge -> http://two.test:8/v1, with the key in $JUDGE_KEY\n"
        "if you trust each of them, add --allow-upstream https://one.test/v1 "
        "--allow-upstream http://two.test:8/v1\n"
    )
    one, two = "--allow-upstream=https://one.test/v1", "--allow-upstream=http://two.test:8/v1"
    assert main(["serve", str(folder), one]) == 1
    assert "add --allow-upstream http://two.test:8/v1\n" in capsys.readouterr().err
    assert main(["serve", str(folder), one, two]) == 1
    assert "is missing" in capsys.readouterr().err  # the weights: the endpoints are allowed


def test_the_endpoints_of_a_candidate_have_to_be_allowed_too(tmp_path: Path) -> None:
    old = from_elsewhere(tmp_path / "old", "https://one.test/v1")
    new = from_elsewhere(tmp_path / "new", "https://two.test/v1")
    one, two, other = (f"https://{name}.test/v1" for name in ("one", "two", "other"))
    for allowed, message in (
        ([two], f"{old} sends calls to these endpoints.*add --allow-upstream {one}"),
        ([one], f"{new} sends calls to these endpoints.*add --allow-upstream {two}"),
        ([one, two, other], f"{old} or {new} names no such endpoint; it names {one}, {two}"),
    ):
        with pytest.raises(ConfigError, match=f"(?s){message}"):
            serve(old, ServeOptions(candidate=new, allow_upstream=allowed))
    with pytest.raises(ConfigError, match="is missing"):  # the weights
        serve(old, ServeOptions(candidate=new, allow_upstream=[one, two]))


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("https://api.test/v1", "https://api.test/v1/"),
        ("https://api.test@evil.test/v1", "https://api.test/v1"),
    ],
)
def test_only_the_very_endpoint_is_allowed(tmp_path: Path, url: str, allowed: str) -> None:
    folder = from_elsewhere(tmp_path / "run", url)
    with pytest.raises(ConfigError, match="names no such endpoint; it names https://api"):
        serve(folder, ServeOptions(allow_upstream=[allowed]))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://api.test@evil.test/v1", "@evil.test/v1 (the host is evil.test), with no key"),
        ("https://\N{CYRILLIC SMALL LETTER A}pi.test/v1", r"https://\u0430pi.test/v1, with no key"),
    ],
)
def test_an_endpoint_is_shown_as_what_it_is(tmp_path: Path, url: str, shown: str) -> None:
    folder = from_elsewhere(tmp_path / "run", url, variable=None)
    with pytest.raises(ConfigError) as refused:
        serve(folder)
    assert shown in str(refused.value)
    [flag] = [word for word in shlex.split(str(refused.value)) if word.startswith("https")][-1:]
    with pytest.raises(ConfigError, match="is missing"):
        serve(folder, ServeOptions(allow_upstream=[flag]))


# --- what is printed ------------------------------------------------------------------------
def test_the_one_line_and_the_agents(tmp_path: Path) -> None:
    routing = Routing(
        rules=[
            Rule("writer", POLICY),
            Rule("team/*", POLICY),
            Rule("judge", Target(route=Route.SHARED, policy="policy")),
            Rule("{product} expert", POLICY),
            Rule("own", Target(route=Route.APP)),
        ],
        default=Target(route=Route.BASE, policy="base"),
    )
    served = served_by(tmp_path, routing, policy="model")
    lines = describe(served, Path("runs/x"), "http://127.0.0.1:8000", ServeOptions())
    assert lines == [
        "agents, as in training:",
        "  writer -> policy",
        "  team/* -> policy",
        "  judge -> policy (untrained, shared)",
        "  {product} expert -> policy",
        "  own -> where the app points (not answered here)",
        "  other agents -> the starting weights",
        "one line in an app whose agents lightspan knows (adapter, or `with lightspan.agent(…)`):",
        '  lightspan.connect("http://127.0.0.1:8000")',
        "without lightspan in the app, by environment alone:",
        "  writer: OPENAI_BASE_URL=http://127.0.0.1:8000/agents/writer/v1 OPENAI_API_KEY=unused",
        "  judge: OPENAI_BASE_URL=http://127.0.0.1:8000/agents/judge/v1 OPENAI_API_KEY=unused",
        "  {product} expert: "
        "OPENAI_BASE_URL=http://127.0.0.1:8000/agents/%7Bproduct%7D%20expert/v1 "
        "OPENAI_API_KEY=unused",
        "  agents of team/*, by their path: OPENAI_BASE_URL=http://127.0.0.1:8000/agents/PATH/v1 "
        "OPENAI_API_KEY=unused",
        "  or any OpenAI client: base_url=http://127.0.0.1:8000/v1, model=policy",
        "  or any Anthropic client: base_url=http://127.0.0.1:8000, model=policy",
        "serving runs/x at http://127.0.0.1:8000/v1 (Ctrl-C stops)",
    ]


# --- the real process -----------------------------------------------------------------------
def greedy(url: str, path: str, **fields: Any) -> list[int]:
    """Return the token ids of a greedy answer to `MESSAGES`."""
    with openai.OpenAI(base_url=f"{url}{path}", api_key="unused", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="policy",
            messages=MESSAGES,
            temperature=0,
            max_tokens=12,
            extra_body={"return_token_ids": True, **fields},
        )
    ids: list[int] = answer.choices[0].model_extra["token_ids"]  # type: ignore[index]
    return ids


def expected_ids(model: Any, tokenizer: Any) -> list[int]:
    """Return the token ids of the same greedy answer, computed by transformers."""
    inputs = tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    generated = model.generate(**inputs, do_sample=False, max_new_tokens=12)
    return list(generated[0, inputs["input_ids"].shape[1] :].tolist())


@pytest.fixture(scope="module")
def lora_run(tiny: Path, apps: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two policies with different LoRA weights; return the run's folder."""
    from lightspan import LightningRL

    algorithm = LightningRL(
        tiny,
        optimize={"writer": "writing", "checker": "checking"},
        frozen="base",
        group_size=4,
        tasks_per_step=2,
        optimizer=Optimizer(learning_rate=3e-2, max_grad_norm=None),
        lora=LoRA(rank=4),
    )
    folder = tmp_path_factory.mktemp("runs") / "lora"
    tasks = [{"q": f"question {number}"} for number in range(6)]
    Trainer(algorithm, runners=2, steps=2, folder=folder).fit(apps.two, tasks)
    return folder


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_of_two_policies_and_the_starting_weights(lora_run: Path, tiny: Path) -> None:
    """Check that each agent's answers equal those of PEFT with its LoRA weights."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    expected = {"helper": expected_ids(AutoModelForCausalLM.from_pretrained(tiny), tokenizer)}
    for agent, policy in {"writer": "writing", "checker": "checking"}.items():
        base = AutoModelForCausalLM.from_pretrained(tiny)
        adapted = PeftModel.from_pretrained(base, lora_run / "model" / policy).eval()
        expected[agent] = expected_ids(adapted, tokenizer)
    assert expected["writer"] != expected["helper"]
    options = ["--port", "0", "--max-tokens=5", "--dtype=float32"]
    with serving(lora_run, *options) as (url, lines):
        answered = {agent: greedy(url, f"/agents/{agent}/v1") for agent in expected}
        assert answered == expected
        port = url.rpartition(":")[2]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            serve(lora_run, ServeOptions(port=int(port)))
    assert any("merging the adapter of writing" in line for line in lines)
    assert lines[-2:] == [
        "stopping",
        "calls answered: checker 1 (checking), helper 1 (base), writer 1 (writing)",
    ]


def test_an_engine_that_has_died_ends_it(
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Check that a failed engine ends the process with the engine's error."""
    folder = write_run(tmp_path / "run", served_by(tiny, Routing(default=POLICY), policy=str(tiny)))

    def breaks(*arguments: Any) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr("lightspan_torch.engine._batcher.Batcher._step", breaks)
    threads: list[threading.Thread] = []

    def ready(gateway: Any) -> None:
        def ask() -> None:
            with pytest.raises(openai.InternalServerError, match="the device is gone"):
                greedy(gateway.url, "/v1")

        threads.append(threading.Thread(target=ask))
        threads[0].start()

    monkeypatch.setattr(
        "lightspan_gateway.serving.endpoint.serve", functools.partial(serve, ready=ready)
    )
    assert main(["serve", str(folder), "--port", "0"]) == 1
    threads[0].join()
    output = capsys.readouterr().err.splitlines()
    stopped = "lightspan: the generation thread of policy policy stopped: the device is gone"
    assert output[-1] == stopped
