"""Test tiny random models of Qwen2.5 and Llama 3.2 with the chat templates that are published.

Template, tool calls, streaming, rows, engine and training are real. Only the model's text is
scripted, where a test must know it.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lightspan import LightningRL, LoRA, Trainer
from lightspan.errors import ConfigError, ModelError
from lightspan.lightning.rows import merge
from lightspan.lightning.transitions import Transition
from lightspan.schema.token_records import TokenRecord
from lightspan.stores import open_store
from lightspan_gateway.tools import ParsedCall, tool_parser
from lightspan_testing.engine_suite import TOLERANCE, generate, of_tokens, reference
from lightspan_testing.gateway_suite import Answered, Reading, Rig
from lightspan_testing.scripted_engine import ScriptedEngine
from lightspan_testing.tiny import Family, tiny_model
from lightspan_torch.engine.tokenizer import TransformersTokenizer, load_tokenizer
from lightspan_torch.engine.transformers import TransformersEngine
from lightspan_torch.engine.weights import load_model
from lightspan_torch.learner.policy_model import merge_adapter
from packages.core.tests.published import published_template

FAMILIES: list[Family] = ["qwen2", "llama"]
PUBLISHED = {"qwen2": "qwen2_5", "llama": "llama3_2"}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "execute",
        "description": "Run a query.",
        "parameters": {"type": "object", "properties": {"sql": {"type": "string"}}},
    },
}
SAID = {
    "qwen2": '<tool_call>\n{"name": "execute", "arguments": {"sql": "SELECT 1"}}\n</tool_call>',
    "llama": '{"name": "execute", "parameters": {"sql": "SELECT 1"}}',
}
"""Family → a tool call exactly as the family's template renders it."""
SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = {"role": "user", "content": "One?"}
CALL = {
    "id": "call-1",
    "type": "function",
    "function": {"name": "execute", "arguments": {"sql": "SELECT 1"}},
}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call-1", "content": "1"}


@functools.cache
def _folder(base: Path, family: Family) -> Path:
    template = published_template(PUBLISHED[family])
    return tiny_model(
        base / family, seed=0, family=family, key_heads=2, context=1024, template=template
    )


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Path]:
    """Return a function from a family to the folder of its tiny model with the published
    template.
    """
    torch.set_num_threads(1)
    return functools.partial(_folder, tmp_path_factory.mktemp("families"))


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    found: Family = request.param
    return found


@pytest.fixture
def folder(models: Callable[[Family], Path], family: Family) -> Path:
    return models(family)


@pytest.fixture
def tokenizer(folder: Path) -> TransformersTokenizer:
    return load_tokenizer(folder)


def text_of(tokenizer: TransformersTokenizer, messages: list[Any], *tools: Any) -> str:
    ids = tokenizer.render(messages, list(tools) or None)
    return tokenizer.decode(ids, skip_special_tokens=False)


# --- templates ------------------------------------------------------------------------------
CHAT: list[Any] = [SYSTEM, QUESTION, CALLING, RESULT, {"role": "assistant", "content": "One."}]


def test_qwen_s_chat(models: Callable[[Family], Path]) -> None:
    tokenizer = load_tokenizer(models("qwen2"))
    assert text_of(tokenizer, [QUESTION]) == (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
        "<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n"
    )
    text = text_of(tokenizer, CHAT, TOOL)
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in text
    assert text.endswith(
        "<|im_start|>user\nOne?<|im_end|>\n"
        f"<|im_start|>assistant\n{SAID['qwen2']}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n1\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nOne.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_llama_s_chat(models: Callable[[Family], Path]) -> None:
    tokenizer = load_tokenizer(models("llama"))
    assert text_of(tokenizer, [SYSTEM, QUESTION]) == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
        "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nOne?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    text = text_of(tokenizer, CHAT, TOOL)
    assert "<|end_header_id|>\n\nEnvironment: ipython\nCutting Knowledge" in text
    assert text.endswith(
        f"{json.dumps(TOOL, indent=4)}\n\nOne?<|eot_id|>"
        f"<|start_header_id|>assistant<|end_header_id|>\n\n{SAID['llama']}<|eot_id|>"
        '<|start_header_id|>ipython<|end_header_id|>\n\n"1"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\nOne.<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_llama_s_text_begins_once(models: Callable[[Family], Path]) -> None:
    tokenizer = load_tokenizer(models("llama"))
    start = tokenizer.tokenizer.bos_token_id
    assert tokenizer.tokenizer("One?").input_ids[0] == start, "the tokenizer would add one"
    assert tokenizer.render([QUESTION]).count(start) == 1
    assert tokenizer.render([QUESTION])[0] == start
    assert start not in tokenizer.encode("One?")


@pytest.mark.parametrize("none", [None, []])
def test_tool_calls_that_are_none(tokenizer: TransformersTokenizer, none: Any) -> None:
    """Check messages with an empty key `tool_calls`, which client libraries send with every
    message.
    """
    said = {"role": "assistant", "content": "One."}
    chat = [QUESTION, {**said, "tool_calls": none}, QUESTION]
    assert tokenizer.render(chat) == tokenizer.render([QUESTION, said, QUESTION])


def test_ends_of_turns(models: Callable[[Family], Path]) -> None:
    ends = {"qwen2": ["<|im_end|>"], "llama": ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]}
    for family in FAMILIES:
        tokenizer = load_tokenizer(models(family))
        assert (
            sorted(tokenizer.token_bytes(token).decode() for token in tokenizer.eos_ids)
            == ends[family]
        )


def test_our_templates_have_the_families_format(family: Family, tmp_path: Path) -> None:
    """Check that our template and the published one differ only in the words around the tools."""
    own = load_tokenizer(tiny_model(tmp_path / "own", seed=0, family=family))
    chat = [*CHAT, QUESTION] if family == "llama" else [SYSTEM, QUESTION, CHAT[-1], QUESTION]
    before = text_of(own, chat)
    own.tokenizer.chat_template = published_template(PUBLISHED[family])
    assert text_of(own, chat) == before


# --- the date -------------------------------------------------------------------------------
def test_prompts_do_not_change_with_the_day(models: Callable[[Family], Path]) -> None:
    folder = models("llama")
    assert "strftime_now" in load_tokenizer(folder).tokenizer.chat_template
    day = datetime.date(2031, 2, 3)
    assert "\nToday Date: 03 Feb 2031\n" in text_of(load_tokenizer(folder, date=day), [QUESTION])
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.render([QUESTION], template_options={"date_string": "1 May 2030"})
    assert "\nToday Date: 1 May 2030\n" in tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("form", "told"),
    [("%Y-%m-%d", "2031-02-03"), ("%A, %-d %B %y", "Monday, 3 February 31")],
)
def test_any_form_of_the_date(tmp_path: Path, form: str, told: str) -> None:
    template = (
        f"\n{{%- if strftime_now is defined %}} {{{{ strftime_now('{form}') }}}}{{% endif %}}"
    )
    folder = tiny_model(tmp_path / "model", seed=0, template=template)
    tokenizer = load_tokenizer(folder, date=datetime.date(2031, 2, 3))
    assert tokenizer.decode(tokenizer.render([QUESTION])) == f" {told}"


# --- which parser ---------------------------------------------------------------------------
def test_the_template_says_which_parser(folder: Path, family: Family) -> None:
    assert load_tokenizer(folder).tool_parser == {"qwen2": "hermes", "llama": "llama"}[family]
    assert load_tokenizer(folder, tool_parser="json").tool_parser == "json"
    with pytest.raises(ConfigError, match=r"tool_parser='xml': use one of hermes, llama, json"):
        load_tokenizer(folder, tool_parser="xml")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "parser"),
    [("qwen2_5", "hermes"), ("qwen3", "hermes"), ("llama3_1", "llama"), ("llama3_2", "llama"),
     ("cohere2", "json"), ("phi3", "json"), ("lfm2_2_5", "pythonic"), ("lfm2", "pythonic"),
     ("qwen3_vl", "hermes")],
)  # fmt: skip
def test_parsers_of_published_templates(tmp_path: Path, name: str, parser: str) -> None:
    template = published_template(name)
    folder = tiny_model(tmp_path / "model", seed=0, template=template)
    assert load_tokenizer(folder).tool_parser == parser


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("phi3", "has no place for tools"),
        ("glm4moe", "writes tool calls as .*<arg_key>"),
        ("gemma4", r"writes tool calls as '<\|tool_call>call:"),
        ("qwen3_5_nothink", "writes tool calls as .*<function="),
        ("nemotron_3_nano", "writes tool calls as .*<parameter=key>"),
        ("gptoss", r"writes tool calls as ' to=functions\."),
    ],
)
def test_tools_that_would_go_nowhere_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, message: str
) -> None:
    folder = tiny_model(tmp_path / name, seed=0, template=published_template(name))
    tokenizer = load_tokenizer(folder)
    warned = [text for text in caplog.messages if re.search(message, text)]
    assert len(warned) == (name != "phi3")
    assert all("There are hermes, llama, json" in text for text in warned)
    assert all("use a model whose template writes one of these" in text for text in warned)
    tokenizer.render([QUESTION])
    with pytest.raises(ModelError, match=message):
        tokenizer.render([QUESTION], [TOOL])


@pytest.mark.parametrize(
    ("name", "messages", "message"),
    [
        ("phi3", [QUESTION, CALLING], "leaves tool calls out of the prompt. Use a model"),
        ("phi3", [QUESTION, RESULT], "leaves results of tools out of the prompt. Use a model"),
        ("gemma", [QUESTION, CALLING, QUESTION], "leaves tool calls out of the prompt"),
        ("qwen2_5_vl", [QUESTION, CALLING, RESULT], "leaves tool calls out of the prompt"),
        ("qwen2_5", [QUESTION, {"role": "function", "content": "1"}], "the role 'function' are"),
        ("qwen2_5", [QUESTION, {"role": "assistant", "function_call": {"name": "f"}}], "not read"),
    ],
)
def test_calls_and_results_that_a_prompt_would_not_show_are_refused(
    tmp_path: Path, name: str, messages: list[Any], message: str
) -> None:
    template = published_template(name)
    tokenizer = load_tokenizer(tiny_model(tmp_path / name, seed=0, template=template))
    with pytest.raises(ModelError, match=message):
        tokenizer.render(messages)
    plain = {"role": "assistant", "content": "1", "tool_calls": [], "function_call": None}
    tokenizer.render([QUESTION, plain, QUESTION])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_template_that_lists_tools_but_writes_no_calls(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    """Check LFM2's first template: marks that it does not write are still shown to the parser."""
    folder = tiny_model(tmp_path / f"{stream}", seed=0, template=published_template("lfm2"))
    loaded = load_tokenizer(folder)
    [warned] = [text for text in caplog.messages if "writes no tool calls" in text]
    assert "are read as 'pythonic' (tool_parser= chooses another" in warned
    marks = ["<|tool_call_start|>", "<|tool_call_end|>"]
    loaded.tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer = TransformersTokenizer(loaded.tokenizer)
    said = f'{marks[0]}[execute(sql="SELECT 1")]{marks[1]}Looking.'
    async with chatting(tokenizer, said) as chat:
        answered = await chat.ask(stream=stream, tools=[TOOL])
    assert (answered.content, answered.calls) == ("Looking.", [("execute", '{"sql": "SELECT 1"}')])
    with pytest.raises(ModelError, match="leaves tool calls out of the prompt"):
        tokenizer.render([QUESTION, CALLING, RESULT], [TOOL])


CHAT_TEMPLATE = """{{ tools | tojson if tools }}{% for m in messages %}{% if m.tool_calls %}\
{% for call in m.tool_calls %}{% set f = call.function %}CALL{% endfor %}END{{ eos_token }}\
{% else %}<{{ m.role }}>{{ m.content + '' }}{% endif %}{% endfor %}"""
"""A template in which CALL stands for a tool call, END for what follows the last."""


def template_of(call: str, end: str = "") -> str:
    return CHAT_TEMPLATE.replace("CALL", call).replace("END", end)


MISTRAL = template_of("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}")
DEEPSEEK = template_of(
    "{{ m.content + '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' "
    "+ f.arguments + '<｜tool▁call▁end｜>' }}",
    "<｜tool▁calls▁end｜>",
)
"""It needs arguments that are text, and content that is not null."""
TAGGED = template_of(
    "<TOOLCALL>[{{ {'name': f.name, 'arguments': f.arguments} | tojson }}]", "</TOOLCALL>"
)


def test_a_template_that_shows_calls_only_if_tools_are_offered(tmp_path: Path) -> None:
    template = MISTRAL.replace("{% if m.tool_calls %}", "{% if m.tool_calls and tools %}")
    tokenizer = load_tokenizer(tiny_model(tmp_path / "model", seed=0, template=template))
    assert "execute" in text_of(tokenizer, [QUESTION, CALLING], TOOL)
    with pytest.raises(ModelError, match="if a request has no `tools`: send them"):
        tokenizer.render([QUESTION, CALLING, RESULT])


@pytest.mark.parametrize(
    ("template", "parser", "marks"),
    [
        (MISTRAL, "mistral", ["[TOOL_CALLS]", "[ARGS]"]),
        (DEEPSEEK, "deepseek", ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
                                "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"]),
        ("lfm2_v2", "pythonic", ["<|tool_call_start|>", "<|tool_call_end|>"]),
        (TAGGED, "json", ["<TOOLCALL>", "</TOOLCALL>"]),
        ("qwen3", "hermes", []),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
async def test_calls_as_the_template_writes_them_are_read(
    tmp_path: Path, template: str, parser: str, marks: list[str], stream: bool
) -> None:
    """Check formats whose marks are special tokens, which no text of the app shows otherwise."""
    template = template if "{" in template else published_template(template)
    loaded = load_tokenizer(tiny_model(tmp_path / "model", seed=0, template=template))
    loaded.tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer = TransformersTokenizer(loaded.tokenizer)
    assert tokenizer.tool_parser == parser
    prompt = text_of(tokenizer, [QUESTION], TOOL)
    ids = tokenizer.render([QUESTION, CALLING], [TOOL], add_generation_prompt=False)
    written = tokenizer.decode(ids, skip_special_tokens=False)
    start = next(n for n in range(len(written)) if written[n] != prompt[n : n + 1])
    written = written[start:].partition("<|im_end|>")[0]
    async with chatting(tokenizer, written) as chat:
        answered = await chat.ask(stream=stream, tools=[TOOL])
    assert [(name, json.loads(text)) for name, text in answered.calls] == [
        ("execute", {"sql": "SELECT 1"})
    ]
    assert (answered.content or "").replace("<think>\n\n</think>", "") == ""


async def test_the_engine_s_option(folder: Path, tokenizer: TransformersTokenizer) -> None:
    day = datetime.date(2031, 2, 3)
    engine = TransformersEngine({"writer": folder}, tool_parser="json", template_date=day)
    assert engine.tokenizer("writer").tool_parser == "json"
    with pytest.raises(ConfigError, match=r"template_date='2031-02-03' must be a date, such as"):
        TransformersEngine({"writer": folder}, template_date="2031-02-03")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="leave tool_parser= out"):
        TransformersEngine({"writer": folder}, tokenizers={"writer": tokenizer}, tool_parser="json")


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"holds a LoRA adapter, not a model: merge it"):
        load_model(tmp_path)


# --- tool calls over the gateway ------------------------------------------------------------
class Chat:
    """A chat of one agent with a model whose text is scripted."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.messages: list[Any] = [SYSTEM, QUESTION]

    async def ask(self, *, stream: bool = False, **body: Any) -> Answered:
        """Send the chat's messages, and append the answer to them."""
        call_id = f"call-{len(self.messages)}"
        extra = {"extra_body": {"return_token_ids": True}, "stream": stream, **body}
        reading: Reading = await self.rig.ask(call_id, **{"messages": self.messages, **extra})
        answered = reading.choices[0]
        calls = [
            {"id": identity, "type": "function", "function": {"name": name, "arguments": text}}
            for identity, (name, text) in zip(answered.call_ids, answered.calls, strict=True)
        ]
        # as client libraries send a message back: a key without calls, too
        self.messages.append(
            {"role": "assistant", "content": answered.content, "tool_calls": calls or None}
        )
        return answered

    async def rows(self) -> list[list[Transition]]:
        return merge(await self.transitions())

    async def transitions(self) -> list[Transition]:
        records: list[TokenRecord] = await self.rig.records()
        return [
            Transition("r", "a", "t", "g", "writer", "policy", record, turn)
            for turn, record in enumerate(records)
        ]


@asynccontextmanager
async def chatting(tokenizer: TransformersTokenizer, *said: str) -> AsyncIterator[Chat]:
    """Yield a chat whose model gives the answers `said`, with a gateway that is closed
    afterwards.
    """
    async with open_store("memory:") as store:
        rig = Rig(store, ScriptedEngine(tokenizer, list(said)), tokenizer)
        await rig.start()
        try:
            yield Chat(rig)
        finally:
            await rig.gateway.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_two_turns_with_a_tool_are_one_row(
    tokenizer: TransformersTokenizer, family: Family, stream: bool
) -> None:
    async with chatting(tokenizer, SAID[family], "It is one.") as chat:
        first = await chat.ask(stream=stream, tools=[TOOL])
        assert (first.content, first.reason) == (None, "tool_calls")
        assert first.calls == [("execute", '{"sql": "SELECT 1"}')]
        chat.messages.append({**RESULT, "tool_call_id": first.call_ids[0]})
        last = await chat.ask(stream=stream, tools=[TOOL])
        assert (last.content, last.calls, last.reason) == ("It is one.", [], "stop")
        [row] = await chat.rows()
        assert [transition.record.call_id for transition in row] == ["call-2", "call-4"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "content", "calls"),
    [
        ('<|python_tag|>{"name": "f", "parameters": {}}<|eom_id|>', None, [("f", "{}")]),
        ('{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', None,
         [("f", "{}"), ("g", "{}")]),
        ("<|python_tag|>print(1)<|eom_id|>", "<|python_tag|>print(1)", []),
    ],
)  # fmt: skip
async def test_llama_s_answers(
    models: Callable[[Family], Path], said: str, content: str | None, calls: list[Any], stream: bool
) -> None:
    """Check that the special token before a call is removed, and kept if there is no call."""
    async with chatting(load_tokenizer(models("llama")), said) as chat:
        answered = await chat.ask(stream=stream, tools=[TOOL])
        assert (answered.content, answered.calls) == (content, calls)


WRITTEN = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
OTHER = WRITTEN.replace('"f"', '"g"')


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "content", "calls"),
    [
        (f"<think>Use {OTHER}?</think>\n\nNo: 4.", f"<think>Use {OTHER}?</think>\n\nNo: 4.", []),
        (f"<think>Use {OTHER}?</think>{WRITTEN}", f"<think>Use {OTHER}?</think>", ["f"]),
        (f"First.\n{WRITTEN}\nThat will tell.", "First.\nThat will tell.", ["f"]),
        (f"{WRITTEN}\nAnd {OTHER}", "And", ["f", "g"]),
    ],
)
async def test_thoughts_and_text_around_calls(
    models: Callable[[Family], Path], said: str, content: str, calls: list[str], stream: bool
) -> None:
    async with chatting(load_tokenizer(models("qwen2")), said) as chat:
        answered = await chat.ask(stream=stream, tools=[TOOL])
        assert (answered.content, [name for name, _ in answered.calls]) == (content, calls)


@pytest.mark.parametrize("stream", [False, True])
async def test_thoughts_that_begin_in_the_prompt(tmp_path: Path, stream: bool) -> None:
    """Check a template that opens the thoughts, as those of many reasoning models do."""
    template = published_template("qwen2_5").replace(
        "{{- '<|im_start|>assistant\\n' }}", "{{- '<|im_start|>assistant\\n<think>\\n' }}"
    )
    tokenizer = load_tokenizer(tiny_model(tmp_path / "model", seed=0, template=template))
    assert text_of(tokenizer, [QUESTION]).endswith("<think>\n")
    said = [f"Use {OTHER}?</think>\n\n{WRITTEN}", f"Use {OTHER}, or"]
    async with chatting(tokenizer, *said) as chat:
        first = await chat.ask(stream=stream, tools=[TOOL])
        assert (first.content, first.calls) == (f"Use {OTHER}?</think>", [("f", "{}")])
        last = await chat.ask(stream=stream, tools=[TOOL])
        assert (last.content, last.calls) == (said[1], [])


async def test_without_tools_no_parsing(tokenizer: TransformersTokenizer, family: Family) -> None:
    async with chatting(tokenizer, SAID[family]) as chat:
        answered = await chat.ask()
        assert (answered.content, answered.calls) == (SAID[family], [])


@pytest.mark.parametrize(
    "arguments",
    [
        '{"sql": "SELECT \'ü\\n\\"x\\"\' -- 🙂"}',
        '{"a": [1, 2.5, null, true], "b": {"c": {}}}',
        "{}",
    ],
)
def test_a_parsed_call_is_rendered_as_it_was_written(
    tokenizer: TransformersTokenizer, family: Family, arguments: str
) -> None:
    said = SAID[family].replace('{"sql": "SELECT 1"}', arguments)
    [call] = tool_parser(tokenizer.tool_parser).parse(said).calls
    assert call == ParsedCall("execute", arguments)
    function = {"name": call.name, "arguments": json.loads(call.arguments)}
    calling = {**CALLING, "tool_calls": [{**CALL, "function": function}]}
    prompt = tokenizer.render([QUESTION], [TOOL])
    whole = tokenizer.render([QUESTION, calling], [TOOL], add_generation_prompt=False)
    assert whole[: len(prompt)] == prompt
    assert whole[len(prompt) :][: len(tokenizer.encode(said))] == tokenizer.encode(said)


# --- the real engine and learner ------------------------------------------------------------
async def test_logprobs_of_the_engine(folder: Path, tokenizer: TransformersTokenizer) -> None:
    """Check grouped heads, tied embeddings and, for Llama, scaled rotary positions."""
    model = load_model(folder)
    assert model.config.num_key_value_heads == 2
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    engine = TransformersEngine({"writer": folder}, seed=0)
    await engine.start()
    long = tokenizer.encode("How many singers are there? ") * 40
    for prompt in (tokenizer.render([SYSTEM, QUESTION], [TOOL]), long[:600]):
        answer = await generate(engine, prompt, temperature=0.7)
        expected = of_tokens(reference(model, prompt, answer.ids, 0.7), answer.ids)
        assert answer.logprobs == pytest.approx(expected, abs=TOLERANCE)
    await engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LoRA(rank=4)], ids=["full", "lora"])
def test_one_step_of_training_and_its_export(
    folder: Path, family: Family, apps: Any, tmp_path: Path, lora: LoRA | None
) -> None:
    algorithm = LightningRL(
        folder, optimize="writer", group_size=4, tasks_per_step=2, learning_rate=1e-2, lora=lora
    )
    trainer = Trainer(algorithm, runners=2, steps=1, folder=tmp_path / "run")
    result = trainer.fit(apps.spell, [{"q": "One?"}, {"q": "Two?"}])
    assert result.model is not None
    exported = merge_adapter(result.model, tmp_path / "merged") if lora else result.model
    start, trained = load_model(folder), load_model(exported)
    moved = [
        name
        for name, tensor in trained.state_dict().items()
        if not torch.equal(tensor, start.state_dict()[name])
    ]
    assert "model.layers.0.self_attn.q_proj.weight" in moved
    assert trained.config.model_type == family
    again, own = load_tokenizer(exported), load_tokenizer(folder)
    assert again.render(CHAT, [TOOL]) == own.render(CHAT, [TOOL])
    assert again.eos_ids == own.eos_ids
    assert again.tool_parser == own.tool_parser
