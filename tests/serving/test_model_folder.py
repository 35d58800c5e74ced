"""Tests of serving a model without a run: its folder, and the process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import openai
import pytest
from serve_process import serving  # type: ignore[import-not-found]

from lightspan.cli import main
from lightspan.errors import ConfigError, ModelError
from lightspan.schema.routing import Route
from lightspan_gateway.serving.endpoint import ServeOptions, describe, load_served
from lightspan_gateway.serving.served_run import upstreams_of
from lightspan_testing.tiny import tiny_model

MESSAGES: Any = [{"role": "user", "content": "What is 12 + 7 * 3?"}]


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    """Return a copy of the tiny model that a test may damage."""
    folder = tmp_path / "SmolLM2-135M"
    shutil.copytree(tiny, folder)
    return folder


def test_a_model_answers_every_agent_under_its_folders_name(model: Path) -> None:
    served, folder = load_served(model)
    assert folder == model
    assert served.policies.keys() == {"SmolLM2-135M"}
    assert not upstreams_of(served)
    for agent in ("app", "writer", "team/checker"):
        target = served.routing.target(agent)
        assert (target.route, target.policy) == (Route.POLICY, "SmolLM2-135M")
    lines = describe(served, model, "http://127.0.0.1:8000", ServeOptions())
    assert lines[:2] == ["agents:", "  every agent -> SmolLM2-135M"]
    assert lines[-1] == f"serving {model} at http://127.0.0.1:8000/v1 (Ctrl-C stops)"


def test_a_link_is_served_under_its_own_name(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "small"
    link.symlink_to(model, target_is_directory=True)
    assert load_served(link)[0].policies.keys() == {"small"}
    monkeypatch.chdir(model)
    for here in (".", "../SmolLM2-135M"):
        assert load_served(here)[0].policies.keys() == {"SmolLM2-135M"}


@pytest.mark.parametrize("name", ["base", "a model"])
def test_a_name_that_could_be_misread_is_not_taken(model: Path, name: str) -> None:
    served, _ = load_served(model.rename(model.with_name(name)))
    assert served.policies.keys() == {"model"}


def test_what_is_neither_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run of lightspan and no model: there is no such"):
        load_served("Qwen/Qwen2.5-0.5B-Instruct")
    with pytest.raises(ConfigError, match=r"no run of lightspan and no model: it has no config"):
        load_served(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"has a LoRA adapter, .* serve the run in which it was"):
        load_served(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="no JSON object"):
        load_served(tmp_path)


def test_a_model_that_lacks_something_is_named_before_its_weights_load(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [weights] = model.glob("*.safetensors")
    weights.write_bytes(b"these are not looked at yet")
    load_served(model)
    weights.rename(model / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"has no weights .*pickles such as pytorch_model\.bin"):
        load_served(model)
    silent = tiny_model(tmp_path / "silent", seed=0, template=None)
    assert main(["serve", str(silent)]) == 1
    output = capsys.readouterr().err
    assert f"the tokenizer of {silent} has no chat template: use an instruction-tuned" in output
    for path in silent.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ModelError, match="there are no tokenizer files"):
        load_served(silent)


def test_its_own_code_is_never_run(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_bytes())
    del config["model_type"]
    config |= {"model_type": "unheard_of", "auto_map": {"AutoConfig": "evil.Config"}}
    (model / "config.json").write_text(json.dumps(config))
    (model / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ModelError):
        load_served(model)
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_the_process_answers_as_the_model_does(model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    inputs = tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        generated = AutoModelForCausalLM.from_pretrained(model).generate(
            **inputs, do_sample=False, max_new_tokens=8
        )
    expected = generated[0, inputs["input_ids"].shape[1] :].tolist()
    key = {"SERVE_KEY": "a-long-random-text"}
    with serving(model, "--port", "0", "--api-key-env", "SERVE_KEY", **key) as (origin, lines):

        def ask(path: str, name: str, api_key: str = key["SERVE_KEY"]) -> list[int]:
            url = f"{origin}{path}"
            with openai.OpenAI(base_url=url, api_key=api_key, max_retries=0) as client:
                answer = client.chat.completions.create(
                    model=name,
                    messages=MESSAGES,
                    temperature=0,
                    max_tokens=8,
                    extra_body={"return_token_ids": True},
                )
            ids: list[int] = answer.choices[0].model_extra["token_ids"]  # type: ignore[index]
            return ids

        assert ask("/v1", "SmolLM2-135M") == expected
        assert ask("/agents/app/v1", "gpt-4o") == expected
        with pytest.raises(openai.NotFoundError, match="this endpoint has the policies SmolLM2"):
            ask("/v1", "gpt-4o")
        with pytest.raises(openai.AuthenticationError):
            ask("/v1", "SmolLM2-135M", "wrong")
    assert lines[-1].startswith("calls answered: app 2 (SmolLM2-135M)")
    assert key["SERVE_KEY"] not in "\n".join(lines)
