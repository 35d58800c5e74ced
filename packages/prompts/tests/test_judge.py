"""Tests of the judge: transcripts, requests, parsing of answers, budgets."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import importlib
import json
import math
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from msgspec import structs

import lightspan
from lightspan import LLM, Judge
from lightspan.errors import BudgetError, ConfigError, EngineError
from lightspan.lightning.answers import answer_of, json_text
from lightspan.lightning.episode import Episode, build_episode, score_failure
from lightspan.schema import genai_messages, semconv as c
from lightspan.schema.images import Image
from lightspan.schema.records import AttemptStatus, Outcome
from lightspan.schema.spans import Attributes, SpanKind, SpanStatus
from lightspan.stores import open_store
from lightspan.training.folder import RunFolder
from lightspan.training.rewards import (
    Member,
    RewardLine,
    Scored,
    ScoringPosition,
    scored_groups,
    with_reward,
)
from lightspan_prompts.endpoint_client import image_digests
from lightspan_prompts.judge_prompts import Ballot, ballots, comment, scores
from lightspan_prompts.search.feedback import evidence_of
from lightspan_prompts.transcript import shortened, task_text, transcript
from lightspan_testing.scripted import Reply, Request, ScriptedServer
from lightspan_testing.strategies import (
    make_attempt,
    make_call_span,
    make_reward_span,
    make_rollout,
    make_span,
)

APPS = Path(__file__).parents[3] / "tests/apps"
KEY = "sk-" + "proj-abcdefghijklmnop1234567890"


@pytest.fixture(scope="module")
def script() -> Any:
    if str(APPS) not in sys.path:
        sys.path.insert(0, str(APPS))
    return importlib.import_module("scripted_judge")


def call(name: str, messages: list[Any], answer: Any, **fields: Any) -> Any:
    attributes: Attributes = {
        c.INPUT_MESSAGES: genai_messages.dump(messages),
        c.OUTPUT_MESSAGES: genai_messages.dump([answer]),
    }
    return make_call_span(name, attributes=attributes, **fields)


@pytest.fixture
def server(script: Any) -> Iterator[ScriptedServer]:
    with ScriptedServer(script.gives(by_number)) as running:
        yield running


def said(name: str, answer: str, *, group: str = "g", **fields: Any) -> Episode:
    """Return an episode of one call."""
    user = {"role": "user", "content": "Say a number."}
    span = call(f"c{name}", [user], {"role": "assistant", "content": answer}, attempt=name)
    attempt = make_attempt(name, **fields)
    return build_episode(attempt, make_rollout(name, group), [span], [])


def group(answers: Sequence[str], name: str = "g") -> list[Member]:
    return [
        Member({"q": name}, said(f"{name}{n}", answer, group=name))
        for n, answer in enumerate(answers)
    ]


async def scored(
    judge: Judge, *groups: list[Member], folder: Path | None = None, notes: Any = None
) -> tuple[list[list[Scored]], dict[str, float]]:
    said_notes: list[str] = [] if notes is None else notes
    async with judge.opened(ScoringPosition(folder, keeps=True, note=said_notes.append)) as scoring:
        before = scoring.spent()
        results = await scored_groups(scoring, [member for each in groups for member in each])
        spent = {name: value - before[name] for name, value in scoring.spent().items()}
    return [[results[m.episode.rollout_id] for m in each] for each in groups], spent


def values(of_group: Sequence[Scored]) -> list[float | None]:
    return [each.value for each in of_group]


def by_number(text: str, place: int) -> int:
    """Return the score in a rollout's answer."""
    return int(text.rpartition("answer: ")[2])


def judge(server: ScriptedServer, **options: Any) -> Judge:
    return Judge("More is better.", LLM(base_url=server.url, model="wise"), **options)


# --- images ---------------------------------------------------------------------------------
def seen(name: str, image: Image, answer: str) -> Member:
    """Return a rollout of one call about an image."""
    url = f"data:{image.media_type};base64,{base64.b64encode(image.data).decode()}"
    content = [
        {"type": "text", "text": "Which number?"},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    user, said = {"role": "user", "content": content}, {"role": "assistant", "content": answer}
    span = call(f"c{name}", [user], said, attempt=name)
    episode = build_episode(make_attempt(name), make_rollout(name, "g"), [span], [])
    return Member({"q": "g"}, episode)


async def test_a_judge_sees_each_image_once_after_the_text(script: Any) -> None:
    """Two rollouts share an image, the third has one whose bytes are not stored."""
    first, gone = Image.of(b"\x89PNG one", "image/png"), Image.of(b"\x89PNG two", "image/png")
    rollouts = [seen("1", first, "3"), seen("2", first, "5"), seen("3", gone, "8")]

    async def images(digests: Sequence[str]) -> dict[str, Image]:
        assert set(digests) == {first.digest, gone.digest}
        return {first.digest: first}

    def answer(asked: Request) -> str:
        text = asked.body["messages"][0]["content"][0]["text"]
        return str(script.gives(by_number)(SimpleNamespace(last_text=text)))

    place = ScoringPosition(None, keeps=False, note=print, images=images)
    with ScriptedServer(answer) as server:
        async with judge(server, images=4, orders=1).opened(place) as scoring:
            results = await scoring.score([rollouts])
        [request] = server.requests
    assert [each.value for each in results[0]] == [0.3, 0.5, 0.8]
    text, name, picture = request.body["messages"][0]["content"]
    assert text["text"].count(first.digest) == 2
    assert name == {"type": "text", "text": f"The image with the sha256 {first.digest}:"}
    data = base64.b64encode(first.data).decode()
    url = f"data:image/png;base64,{data}"
    assert picture == {"type": "image_url", "image_url": {"url": url}}


async def test_a_judge_that_does_not_see_is_shown_digests(server: ScriptedServer) -> None:
    image = Image.of(b"\x89PNG one", "image/png")
    [[score]], _ = await scored(judge(server), [seen("1", image, "3")])
    assert score.value == 0.3
    content = server.requests[0].body["messages"][0]["content"]
    assert isinstance(content, str)
    assert image_digests(content) == [image.digest]


# --- what it is shown -----------------------------------------------------------------------
def test_images_are_kept_where_a_text_is_cut() -> None:
    digests = [hashlib.sha256(bytes([number])).hexdigest() for number in range(40)]
    parts = [
        {"type": "blob", "modality": "image", "mime_type": "image/png", "size": 9, "sha256": digest}
        for digest in digests
    ]
    images = json_text(parts)  # longer than a message may be, but without text
    assert len(images) > 4_000
    assert shortened(images) == images
    text = f"{'a' * 3_000}{json_text(parts[0])}{'b' * 3_000}{json_text(parts[1])}{'c' * 3_000}"
    assert shortened(f"{json_text(parts[2])}{text}{json_text(parts[3])}") == (
        f"{json_text(parts[2])}{'a' * 2_000} […5000 characters left out…] {json_text(parts[0])} "
        f"{json_text(parts[1])} {'c' * 2_000}{json_text(parts[3])}"
    )
    told = {"type": "text", "text": "x" * 9_000}
    user = {"role": "user", "content": [*parts[:20], told, *parts[20:]]}
    span = call("c1", [user], {"role": "assistant", "content": "5"})
    episode = build_episode(make_attempt(), make_rollout(), [span], [])
    assert image_digests(transcript(episode)) == digests
    assert image_digests(evidence_of(episode, {}).text) == digests


def test_a_transcript_has_the_work_and_no_reward() -> None:
    system = {"role": "system", "content": "Be brief."}
    user = {"role": "user", "content": "2+2?"}
    calls = {"id": "t1", "type": "function", "function": {"name": "add", "arguments": "[2,2]"}}
    assistant = {"role": "assistant", "content": None, "tool_calls": [calls]}
    tool = {"role": "tool", "tool_call_id": "t1", "content": "4"}

    last = {"role": "assistant", "content": f"4 {KEY}"}
    added: Attributes = {c.TOOL_NAME: "add"}
    added |= {c.TOOL_CALL_ARGUMENTS: "[2,2]", c.TOOL_CALL_RESULT: "4"}
    fails: Any = {"status": SpanStatus.ERROR, "status_message": "gone"}
    spans = [
        call("c1", [system, user], assistant),
        call("c2", [system, user, assistant, tool], last),
        make_span("s1", SpanKind.TOOL, attributes=added),
        make_span("s2", SpanKind.TOOL, attributes={c.TOOL_NAME: "find"}, **fails),
        make_span("s3", SpanKind.MESSAGE, attributes={c.MESSAGE_BODY: "four is right"}),
        make_reward_span("s4", 0.123),
    ]
    episode = build_episode(make_attempt(reward=0.456), make_rollout(), spans, [])
    assert transcript(episode) == (
        "Model call of the agent 'writer':\n"
        "  system: Be brief.\n"
        "  user: 2+2?\n"
        "  answer: calls add([2,2])\n"
        "Model call of the agent 'writer':\n"
        "  tool: 4\n"
        "  answer: 4 <key>\n"
        "The tool add([2,2]) returned: 4\n"
        "The tool find failed: gone\n"
        "The app says: four is right"
    )
    assert transcript(episode, whole=False) == "answer: 4 <key>\nThe app says: four is right"
    assert answer_of(episode) == f"4 {KEY}"
    assert answer_of(build_episode(make_attempt(), make_rollout(), [], [])) == ""
    assert task_text({"q": KEY}) == '{"q": "<key>"}'


async def test_a_question_has_rubric_task_and_rollouts(server: ScriptedServer, script: Any) -> None:
    llm = LLM(base_url=server.url, model="wise", sampling={"temperature": 0, "max_tokens": 500})
    [two], _ = await scored(Judge("Larger is better.", llm, orders=1), group(["3", "7"]))
    assert values(two) == [0.3, 0.7]
    [request] = server.requests
    asked = request.last_text
    assert request.body["model"] == "wise"
    assert (request.body["temperature"], request.body["max_tokens"]) == (0, 500)
    assert "<rubric>\nLarger is better.\n</rubric>" in asked
    assert '\n{"q": "g"}\n[[end ' in asked
    assert asked.endswith('the score of each: {"A": …, "B": …}')
    assert sorted(script.shown(asked)) == [
        f"Model call of the agent 'writer':\n  user: Say a number.\n  answer: {n}" for n in "37"
    ]


async def test_alone_or_together_or_the_answer_only(server: ScriptedServer, script: Any) -> None:
    answers = ["1", "2", "3", "4", "5"]
    for options, questions, largest in (
        ({"together": 1}, 5, 1),
        ({"together": 2, "orders": 1}, 3, 2),
        ({"together": 5, "orders": 3}, 3, 5),
        ({"together": 8, "orders": 2, "show": "answer"}, 2, 5),
    ):
        server.requests.clear()
        [five], spent = await scored(judge(server, **options), group(answers))
        assert values(five) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
        sizes = [len(script.shown(request.last_text)) for request in server.requests]
        assert (len(sizes), max(sizes)) == (questions, largest)
        assert spent["calls"] == questions
    assert all("Say a number" not in request.last_text for request in server.requests)


async def test_equal_transcripts_are_asked_about_once(server: ScriptedServer, script: Any) -> None:
    [three, same], spent = await scored(
        judge(server), group(["4", "9", "4"]), group(["6", "6"], name="h")
    )
    assert (values(three), values(same)) == ([0.4, 0.9, 0.4], [0.6, 0.6])
    assert spent["calls"] == 3  # two orders of two, and one alone
    assert Counter(len(script.shown(r.last_text)) for r in server.requests) == {2: 2, 1: 1}


# --- order ----------------------------------------------------------------------------------
def test_the_order_is_shuffled_by_the_seed_and_by_nothing_of_the_rollouts() -> None:
    texts = [f"text {number}" for number in range(6)]

    def orders(given: list[str], seed: int, count: int = 2) -> list[tuple[str, ...]]:
        made = ballots("r", "t", given, together=8, orders=count, seed=seed)
        return [ballot.shown for ballot in made]

    [first, second] = orders(texts, 0)
    assert second == first[::-1] != tuple(texts)
    assert orders(texts[::-1], 0) == [first, second]  # in order of completion
    assert orders(texts, 1)[0] != first
    everywhere = [order.index("text 0") for order in orders(texts, 0, 12)]
    assert Counter(everywhere) == dict.fromkeys(range(6), 2)
    firsts = Counter(orders(texts, seed, 1)[0][0] for seed in range(600))
    assert set(firsts) == set(texts)
    assert max(firsts.values()) < 160  # 100 expected; 6 standard errors are 55


async def test_reasons_are_kept_with_rewards(server: ScriptedServer, tmp_path: Path) -> None:
    """Of two compared rollouts each gets the comments on both, and its letter."""
    [[alone], pair], _ = await scored(judge(server), group("5", "a"), group(["1", "2"], "b"))
    assert alone.reasons == "A {rambling} sentence."
    for each in pair:
        lines = each.reasons.splitlines()
        assert sorted(lines) == [
            "(named A, compared with 1 others) A {rambling} sentence.",
            "(named B, compared with 1 others) A {rambling} sentence.",
        ]
    folder = RunFolder(tmp_path)
    folder.add_rewards("judge", {"r": alone})
    assert folder.rewards("judge") == {"r": RewardLine(rollout_id="r", **structs.asdict(alone))}
    episode = with_reward(said("x", "5"), alone)
    shown = evidence_of(episode, {"q": 1}).text
    assert shown.endswith("Reward: 0.5\n  app: 1\nReasons of the reward: A {rambling} sentence.")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ('{"A": 1}', ""),
        ('Good.\n```json\n{"A": 1}\n```', "Good."),
        ('{"A": 1} because {it} rambles', "because {it} rambles"),
        ("nothing but words", "nothing but words"),
    ],
)
def test_the_words_of_an_answer(answer: str, expected: str) -> None:
    assert comment(answer) == expected


async def test_a_preference_for_places_is_evened_out(server: ScriptedServer, script: Any) -> None:
    """A linear position bias cancels with two orders; any bias with two orders per position."""
    answers = ["1", "2", "3", "4"]

    def linear(text: str, place: int) -> float:
        return by_number(text, place) + place

    def first_only(text: str, place: int) -> float:
        return by_number(text, place) + 4 * (place == 0)

    for preference, orders, added in ((linear, 2, 1.5), (first_only, 8, 1.0)):
        server.script = script.gives(preference)
        [four], _ = await scored(judge(server, orders=orders), group(answers))
        fair = [(number + added) / 10 for number in (1, 2, 3, 4)]
        assert values(four) == pytest.approx(fair, abs=1e-12)
    [one_order], _ = await scored(judge(server, orders=1), group(answers))
    assert values(one_order) != pytest.approx(fair)  # so the judge above was biased


# --- failures -------------------------------------------------------------------------------
BALLOT = Ballot("…", ("first", "second"))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ('{"A": 10, "B": 0}', [1.0, 0.0]),
        ('Of {"A": 1, "B": 1} I think better:\n```json\n{"A": 7.5, "B": 2}\n```', [0.75, 0.2]),
        ('{"A": 5}', [0.5, "the judge gave it no score"]),
        ('{"A": "5", "B": 11}', ["score '5' is no number", "score 11 is no number from 0 to 10"]),
        ('{"A": true, "B": -1}', ["score True is no number", "score -1 is no number"]),
        ('{"A": NaN, "B": null}', ["score nan is no number", "score None is no number"]),
        ("A is better.", ["has no line of JSON: 'A is better.'"] * 2),
        ('{"A": 7, "B"', ["has no line of JSON"] * 2),
        ('<think>Maybe {"A": 1, "B": 1}', ["has no line of JSON"] * 2),
        ('Maybe {"A": 1, "B": 1}</think>{"A": 7, "B": 2}', [0.7, 0.2]),
    ],
)
def test_what_is_no_score_is_none(answer: str, expected: list[Any]) -> None:
    check_scores(scores(BALLOT, answer), expected)


@pytest.mark.parametrize("finish_reason", ["length", "content_filter"])
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ('I end with {"A": 10, "B": 10}. First, is A', ["was cut off (finish_reason="] * 2),
        ('I end with\n{"A": 10, "B": 10}\nFirst,', ["was cut off (finish_reason="] * 2),
        ('I end with {"A": 10, "B": 10}', ["was cut off (finish_reason="] * 2),
        ('<think>So:\n{"A": 10, "B": 10}', ["was cut off (finish_reason="] * 2),
        ("", ["was cut off (finish_reason="] * 2),
        ('A is better.\n{"A": 7.5, "B": 2}', [0.75, 0.2]),
        ('{"A": 7.5, "B": 2}\n  \n\n', [0.75, 0.2]),
        ('A is better.\n```json\n{"A": 7.5, "B": 2}\n```', [0.75, 0.2]),
    ],
)
def test_an_answer_that_was_cut_off_has_the_scores_of_its_last_line(
    answer: str, expected: list[Any], finish_reason: str
) -> None:
    check_scores(scores(BALLOT, answer, finish_reason), expected)


def check_scores(results: list[float | str], expected: list[Any]) -> None:
    for one, wanted in zip(results, expected, strict=True):
        if isinstance(wanted, str):
            assert isinstance(one, str)
            assert wanted in one
        else:
            assert one == wanted


async def test_failures_are_unscored_and_counted(server: ScriptedServer, script: Any) -> None:
    def answers(request: Request) -> Any:
        shown = script.shown(request.last_text)
        if any("boom" in text for text in shown):
            return Reply(status=422, text="no")
        if any("too long" in text for text in shown):
            return Reply(status=400, text="context")
        if any("mumble" in text for text in shown):
            return "I cannot say."
        return script.gives(by_number)(request)

    server.script = answers
    names = ["fine", "boom", "too long", "mumble"]
    groups = [group(["5", "8"] if n == "fine" else ["5", n], name=n[0]) for n in names]
    results, spent = await scored(judge(server), *groups)
    assert [values(each) for each in results] == [[0.5, 0.8], *[[None, None]] * 3]
    whys = [each[0].why for each in results[1:]]
    assert whys[0].startswith("the judge wise at http")
    assert "UnprocessableEntityError" in whys[0]
    assert "BadRequestError" in whys[1]
    assert whys[2] == "the judge's answer has no line of JSON: 'I cannot say.'"
    assert spent["calls"] == 4  # failed requests have no entry, unparsable answers have


async def test_a_score_that_one_order_lacks_is_none(server: ScriptedServer) -> None:
    full = server.script
    server.script = lambda request: '{"A": 9}' if len(server.requests) == 2 else full(request)
    [two], _ = await scored(judge(server, concurrency=1), group(["3", "7"]))
    assert sorted(map(str, values(two))) in (["0.6", "None"], ["0.8", "None"])
    assert {each.why for each in two} == {"", "the judge gave it no score"}


@pytest.mark.parametrize(
    ("status", "error"),
    [(401, "AuthenticationError"), (404, "NotFound")],
)
async def test_permanent_errors_end_the_run(
    server: ScriptedServer, status: int, error: str
) -> None:
    full = server.script
    server.script = lambda request: (
        Reply(status=status, text="go away") if len(server.requests) > 2 else full(request)
    )
    await scored(judge(server), group(["3", "7"]))
    with pytest.raises(EngineError, match=f"the judge wise at .* failed: {error}"):
        await scored(judge(server), group(["2", "4"]), group(["2", "5"], name="h"))


async def test_first_requests_that_fail_end_the_run(
    server: ScriptedServer,
) -> None:
    server.script = lambda request: Reply(status=400, text="no")
    with pytest.raises(
        EngineError, match="the judge's first requests all failed: the judge wise at"
    ):
        await scored(judge(server), group(["3", "7"]))


async def test_busy_is_waited_for(server: ScriptedServer) -> None:
    busy: set[str] = set()
    full = server.script

    def answers(request: Request) -> Any:
        if request.last_text not in busy:
            busy.add(request.last_text)
            return Reply(status=429, text="busy", headers={"retry-after-ms": "5"})
        return full(request)

    server.script = answers
    notes: list[str] = []
    [two, other], _ = await scored(
        judge(server), group(["3", "7"]), group(["1", "2"], name="h"), notes=notes
    )
    assert (values(two), values(other)) == ([0.3, 0.7], [0.1, 0.2])
    assert notes == []  # for so short a time


async def test_no_more_at_once_than_it_may(server: ScriptedServer) -> None:
    """The third request is sent only after the first or the second was answered."""
    at_once: list[int] = []
    answered: list[Request] = []
    turns = threading.Barrier(2)
    full = server.script

    def answers(request: Request) -> Any:
        at_once.append(len(server.requests) - len(answered))
        turns.wait(30)
        answered.append(request)
        return full(request)

    server.script = answers
    groups = [group([str(number)], name=f"n{number}") for number in range(8)]
    await scored(judge(server, concurrency=2), *groups)
    assert len(server.requests) == 8
    assert max(at_once) == 2


# --- what it costs, and what is kept --------------------------------------------------------
async def test_no_question_is_asked_twice(server: ScriptedServer, tmp_path: Path) -> None:
    groups = [group([str(n), "9"], name=f"n{n}") for n in range(4)]
    whole, spent = await scored(judge(server), *groups, folder=tmp_path)
    assert spent["calls"] == len(server.requests) == 8
    path = tmp_path / "journal" / "judge.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 8
    assert {"asked", "answer", "input_tokens", "output_tokens"} < json.loads(lines[0]).keys()
    for cut in range(9):
        for torn in (b"", b'{"key": "hal'):
            path.write_bytes(b"".join(lines[:cut]) + torn)
            server.requests.clear()
            again, spent = await scored(judge(server), *groups, folder=tmp_path)
            assert again == whole
            assert spent["calls"] == len(server.requests) == 8 - cut
            assert len(path.read_bytes().splitlines()) == 8 or cut == 8
    path.write_bytes(b"".join(lines))
    server.requests.clear()
    other = [judge(server, orders=3), Judge("Less.", LLM(base_url=server.url, model="wise"))]
    for each in other:
        await scored(each, *groups, folder=tmp_path)
    assert len(server.requests) == 8  # a third order of two is the first; another rubric is new
    path.write_bytes(b"{nonsense}\n")
    with pytest.raises(
        ConfigError, match=r"judge\.jsonl is damaged in line 1: .*; delete the line"
    ):
        await scored(judge(server), *groups, folder=tmp_path)


async def test_a_useless_answer_is_asked_for_again_on_resume(
    server: ScriptedServer, tmp_path: Path
) -> None:
    """Within a process it is not, and a usable one never is."""
    why = "the judge's answer was cut off (finish_reason=length): 'I th'"
    server.script = lambda request: Reply(text="I th", finish_reason="length")
    for count in (1, 2):
        [one], _ = await scored(judge(server), group(["3"]), folder=tmp_path)
        assert one == [Scored(why=why)]
        assert len(server.requests) == count
    server.script = lambda request: 'Good. {"A": 7}'
    for _ in range(2):
        [[one]], _ = await scored(judge(server), group(["3"]), folder=tmp_path)
        assert one.value is not None
        assert len(server.requests) == 3


async def test_budgets(server: ScriptedServer, tmp_path: Path) -> None:
    two = judge(server, max_calls=2)
    await scored(two, group(["1", "3"]), folder=tmp_path)
    with pytest.raises(
        BudgetError, match=r"answered 2 questions \([\d,]+ tokens\), and 2 questions more would"
    ):
        await scored(two, group(["1", "4"]), folder=tmp_path)
    assert len(server.requests) == 2
    await scored(two, group(["1", "3"]), folder=tmp_path)  # already in the log
    [request_tokens] = {
        json.loads(line)["input_tokens"] + json.loads(line)["output_tokens"]
        for line in (tmp_path / "journal" / "judge.jsonl").read_text().splitlines()[:1]
    }
    assert request_tokens > 0
    few = judge(server, max_tokens=request_tokens, concurrency=1)
    with pytest.raises(BudgetError, match=f"max_tokens={request_tokens} is reached"):
        await scored(few, group(["1", "5"]), folder=tmp_path)
    assert len(server.requests) == 2
    # requests in flight when the tokens are used up are paid for, and logged
    waits = threading.Barrier(2)
    full = server.script

    def side_by_side(request: Request) -> str:
        waits.wait(30)
        said: str = full(request)
        return said

    server.script = side_by_side
    two = judge(server, max_tokens=1, concurrency=2, together=1)
    with pytest.raises(BudgetError, match=r"answered 2 questions .*, and max_tokens=1 is reached"):
        await scored(two, group(["1", "2", "3"]), folder=tmp_path / "other")
    assert len((tmp_path / "other" / "journal" / "judge.jsonl").read_text().splitlines()) == 2


async def test_only_rollouts_that_ended_are_judged(server: ScriptedServer) -> None:
    failed = said("f", "1", status=AttemptStatus.FAILED, outcome=Outcome.APP_ERROR, reward=None)
    lost = said("l", "1", status=AttemptStatus.LOST, outcome=Outcome.INFRASTRUCTURE, reward=None)
    damaged = said("d", "1", capture_errors=["a hole"])
    fine = said("a", "8")
    members = [Member({}, each) for each in (failed, lost, damaged, fine)]
    async with judge(server).opened(ScoringPosition(None, keeps=False, note=print)) as scoring:
        results = await scored_groups(scoring, members)
    assert results == {"ro-a": Scored(value=0.8, reasons="A {rambling} sentence.")}
    given = [
        score_failure(with_reward(m.episode, results.get(m.episode.rollout_id)), -1.0)
        for m in members
    ]
    assert [each.reward for each in given] == [-1.0, None, None, 0.8]
    assert [each.reward_source for each in given] == ["failure", None, "scored", "scored"]
    assert given[2].unscored == "its trace is damaged"
    assert dict(given[3].dimensions) == {"app": 1.0}


async def test_keys_are_taken_out_of_what_it_is_asked(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DESK_API_KEY", "9f8e7d6c5b4a39281706")
    server.script = lambda request: f"You leak {KEY}. " + '{"A": 3}'
    member = Member({"q": "9f8e7d6c5b4a39281706"}, said("k", f"my key is {KEY}"))
    [[one]], _ = await scored(judge(server), [member], folder=tmp_path)
    assert one.value == 0.3
    kept = (tmp_path / "journal" / "judge.jsonl").read_text()
    for text in (server.requests[0].last_text, kept):
        assert KEY not in text
        assert "9f8e7d6c5b4a39281706" not in text
        assert "<key>" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rubric": " "}, "describe in words what is good"),
        ({"llm": "gpt"}, "use LLM"),
        ({"llm": LLM(base_url="ftp://x", model="m")}, "the base URL of llm="),
        (
            {"llm": LLM(base_url="http://x/v1", model="m", api_key_env="NO_SUCH_KEY")},
            r"the key in \$NO_SUCH_KEY",
        ),
        ({"together": 27}, "together=27 must be at most 26"),
        ({"orders": 0}, "orders=0"),
        ({"max_tokens": 1.5}, "max_tokens=1.5"),
        ({"show": "all"}, "show='all': use one of 'conversation', 'answer'"),
        ({"name": "app"}, "not 'app', which is the app's own"),
        ({"name": "../x"}, "letters, digits"),
        ({"name": "gepa"}, "name='gepa' is reserved"),
        ({"name": "step-1"}, "name='step-1' is reserved"),
        ({"patience_s": math.nan}, "patience_s=nan"),
    ],
)
def test_options_that_cannot_be_honoured(options: dict[str, Any], message: str) -> None:
    given = {"rubric": "Good.", "llm": LLM(base_url="http://x/v1", model="m"), **options}
    with pytest.raises(ConfigError, match=message):
        Judge(**given)


async def test_its_calls_are_not_recorded(server: ScriptedServer, tmp_path: Path) -> None:
    """A trainer may also record the process (`lightspan.record`)."""
    url = f"sqlite:///{tmp_path / 'traces.db'}"
    with lightspan.record(url) as recording:
        await scored(judge(server), group(["3", "7"]))
        async with openai.AsyncOpenAI(base_url=server.url, api_key="k") as client:
            asked: Any = [{"role": "user", "content": "an app's own"}]
            await client.chat.completions.create(model="wise", messages=asked)
        assert await asyncio.to_thread(recording.flush)
    assert len(server.requests) == 3
    async with open_store(url) as store:
        [state] = await store.rollouts()
        [attempt] = await store.attempts([state.rollout.rollout_id])
        spans = (await store.spans([attempt.attempt_id]))[attempt.attempt_id]
    assert "an app's own" in str(spans[0].attributes[c.INPUT_MESSAGES])
