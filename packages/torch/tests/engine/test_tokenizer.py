"""Chat tokenizers: templates, end-of-turn ids, incremental decoding, errors."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from lightspan.errors import ModelError
from lightspan.protocols.decoding import IncrementalDecoder
from lightspan.protocols.engine import ChatTokenizer
from lightspan_testing.tiny import tiny_model
from lightspan_torch.engine.tokenizer import TransformersTokenizer, load_tokenizer

CALL = {
    "id": "call-1",
    "type": "function",
    "function": {"name": "execute", "arguments": '{"sql": "SELECT 1"}'},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("chat") / "model", seed=0, context=333)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> TransformersTokenizer:
    return load_tokenizer(folder)


def test_protocol(tokenizer: TransformersTokenizer) -> None:
    checked: ChatTokenizer = tokenizer
    assert checked.context_length == 333
    assert tokenizer.decode(sorted(tokenizer.eos_ids), skip_special_tokens=False) == "<|im_end|>"


def test_render(tokenizer: TransformersTokenizer) -> None:
    ids = tokenizer.render(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "One? 🙂"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call-1", "content": "1"},
        ]
    )
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nOne? 🙂<|im_end|>\n"
        '<|im_start|>assistant\n\n<tool_call>\n{"name": "execute", "arguments": '
        '{"sql": "SELECT 1"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n1\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_without_generation_prompt_and_with_options(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    messages = [{"role": "user", "content": "?"}]
    with_prompt = tokenizer.render(messages)
    without = tokenizer.render(messages, add_generation_prompt=False)
    assert with_prompt[: len(without)] == without
    assert len(with_prompt) > len(without)
    tokenizer.tokenizer.chat_template = "{{ 'thinking' if enable_thinking else 'plain' }}"
    ids = tokenizer.render(messages, template_options={"enable_thinking": True})
    assert tokenizer.decode(ids) == "thinking"


def test_a_missing_template_names_the_model_and_the_fix(tmp_path: Path) -> None:
    bare = load_tokenizer(tiny_model(tmp_path / "bare", seed=0, template=None))
    with pytest.raises(ModelError, match=r"bare has no chat template: .*chat_template"):
        bare.render([{"role": "user", "content": "?"}])


def test_a_refusing_template_says_why(tokenizer: TransformersTokenizer) -> None:
    with pytest.raises(ModelError, match=r"refuses these messages \(zebra\): .*unknown role zebra"):
        tokenizer.render([{"role": "zebra", "content": "?"}])


def test_end_of_turn_ids_from_everywhere(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model", seed=0)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [17, 18]}))
    tokenizer = load_tokenizer(folder)
    end = tokenizer.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.eos_ids == {17, 18, end}
    tokenizer.tokenizer.eos_token = "<|endoftext|>"  # as base models of the Qwen family say
    (folder / "generation_config.json").unlink()
    tokenizer.tokenizer.save_pretrained(folder)
    again = load_tokenizer(folder)
    assert again.eos_ids == {end, again.tokenizer.convert_tokens_to_ids("<|endoftext|>")}


def test_bytes_of_tokens_show_special_tokens(tokenizer: TransformersTokenizer) -> None:
    (end,) = tokenizer.eos_ids
    assert tokenizer.token_bytes(end) == b"<|im_end|>"
    assert tokenizer.decode([end]) == ""
    ids = tokenizer.encode("SELECT 1")
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == b"SELECT 1"


def decoded(tokenizer: TransformersTokenizer, pieces: list[list[int]], skip: bool) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip)
    deltas = [decoder.push(piece) for piece in pieces]
    return [*deltas, decoder.flush()]


quick = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@quick
@given(data=st.data())
def test_deltas_join_to_the_full_text(tokenizer: TransformersTokenizer, data: Any) -> None:
    """This holds for any ids, cut anywhere, with invalid UTF-8 and special tokens."""
    ids = data.draw(st.lists(st.integers(0, len(tokenizer.tokenizer) - 1), max_size=40))
    pieces, rest = [], list(ids)
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        pieces.append(rest[:size])
        rest = rest[size:]
    skip = data.draw(st.booleans())
    deltas = decoded(tokenizer, pieces, skip)
    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip)


@quick
@given(text=st.text(max_size=30))
def test_no_half_character_is_shown(tokenizer: TransformersTokenizer, text: str) -> None:
    text = unicodedata.normalize("NFC", text.replace("\ufffd", ""))
    deltas = decoded(tokenizer, [[i] for i in tokenizer.encode(text)], skip=False)
    assert not any("\ufffd" in delta for delta in deltas)
    assert "".join(deltas) == text
    assert deltas[-1] == ""


def test_a_settled_character_is_not_held_back(tokenizer: TransformersTokenizer) -> None:
    rocket = tokenizer.encode("ab🚀")
    assert len(rocket) > 3
    deltas = decoded(tokenizer, [[i] for i in rocket], skip=True)
    assert "".join(deltas[:2]) == "ab"
    assert deltas[-3:] == ["", "🚀", ""]


@pytest.mark.parametrize(
    ("path", "reason"), [("gone", "does not exist"), ("empty", "no config.json")]
)
def test_a_missing_folder_is_named(tmp_path: Path, path: str, reason: str) -> None:
    (tmp_path / "empty").mkdir()
    for source in (tmp_path / path, str(tmp_path / path)):
        with pytest.raises(ModelError, match=rf"{path}.*{reason}"):
            load_tokenizer(source)


def test_a_damaged_folder_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"configuration of .* from its folder"):
        load_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ModelError, match=r"tokenizer of .* from its folder"):
        load_tokenizer(tmp_path)


def test_remote_code_is_not_run(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "evil"
    config["auto_map"] = {"AutoConfig": "evil.EvilConfig"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ModelError):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()
