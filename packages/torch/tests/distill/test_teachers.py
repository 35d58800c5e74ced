"""Teachers: a local model and a server give the same scores; other tokens and failures are told."""

from __future__ import annotations

import functools
import json
import math
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightspan.errors import ConfigError, EngineError, ModelError, UnsupportedError
from lightspan.lightning.rows import Row
from lightspan.lightning.selection import Rejection
from lightspan.protocols.learner import LoRA
from lightspan_testing.learner_suite.rows import random_row
from lightspan_testing.tiny import tiny_model
from lightspan_torch import Distill, TeacherModel, TeacherServer
from lightspan_torch.distill import server as server_module
from lightspan_torch.distill.local import LocalTeacher
from lightspan_torch.distill.server import ServerTeacher
from lightspan_torch.engine.transformers import CAPABILITIES as ENGINE
from lightspan_torch.learner.torch import CAPABILITIES as LEARNER, TorchLearner
from packages.torch.tests.distill.prompt_server import DROP, PromptServer


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("student") / "model", seed=0, hidden=32)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("teacher") / "model", seed=1)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose tokenizer was trained on other texts."""
    texts = ["completely different words here", "zebra crossing quartz vow"] * 4
    return tiny_model(tmp_path_factory.mktemp("other") / "model", seed=1, texts=texts)


@pytest.fixture
def serving(teacher: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PromptServer]:
    monkeypatch.setattr(server_module, "RETRY_BACKOFF_S", (0.01,))
    with PromptServer(teacher).running() as server:
        yield server


class World:
    """The parts of `TrainerContext` that teachers use."""

    def __init__(self, learner: Any = None) -> None:
        self.learner = learner
        self.notes: list[str] = []

    async def learn(self, function: Callable[[], Any]) -> Any:
        return function()

    def note(self, text: str) -> None:
        self.notes.append(text)

    def explain(self, explanations: Any) -> None:
        assert not explanations


def make_rows(count: int = 5) -> list[Row]:
    """Return rows at temperature 1, some of which share a prefix; not all tokens are trained."""
    rng = random.Random(3)
    start = [rng.randrange(300) for _ in range(6)]
    rows = []
    for number in range(count):
        ids = start + [rng.randrange(300) for _ in range(rng.randint(3, 9))]
        row = random_row(ids, rng, f"ro-{number}", "writer")
        mask = [False] * 6 + [place != 1 for place in range(len(ids) - 7)] + [number == 0]
        rows.append(replace(row, mask=mask, temperatures=[1.0] * len(ids)))
    return rows


async def test_a_server_scores_as_the_local_model_does(
    student: Path, teacher: Path, serving: PromptServer
) -> None:
    rows = make_rows()
    learner = TorchLearner({"writer": student})
    local = LocalTeacher(TeacherModel(model=str(teacher)), [str(student)], 200)
    remote = ServerTeacher(TeacherServer(url=f"{serving.url}/v1/"), [str(student)], 200)
    own, states = await local.score(World(learner), rows)  # type: ignore[arg-type]
    scores, nothing = await remote.score(World(), rows)  # type: ignore[arg-type]
    assert (states is None, nothing is None) == (False, True)
    expected = TorchLearner({"writer": teacher}).score(rows)
    for row, one, two, three in zip(rows, own, scores, expected, strict=True):
        for place, is_trained in enumerate(row.mask):
            wish = three[place] if is_trained else 0.0
            assert one[place] == pytest.approx(wish, abs=1e-5)
            assert two[place] == pytest.approx(wish, abs=1e-5)
    assert serving.requests["/v1/completions"] == len(rows)
    assert all(set(map(type, body["prompt"])) == {int} for body in serving.bodies)


async def test_the_teacher_has_the_temperature_of_each_token(student: Path, teacher: Path) -> None:
    rows = [replace(row, temperatures=[0.5] * len(row.ids)) for row in make_rows()]
    local = LocalTeacher(TeacherModel(model=str(teacher)), [str(student)], 200)
    scores, _ = await local.score(World(TorchLearner({"writer": student})), rows)  # type: ignore[arg-type]
    expected = TorchLearner({"writer": teacher}).score(rows)
    assert scores[0][-1] == pytest.approx(expected[0][-1], abs=1e-5)
    assert scores[0][-1] != pytest.approx(
        TorchLearner({"writer": teacher}).score(make_rows())[0][-1], abs=1e-3
    )


async def test_a_teacher_that_gives_nan_teaches_nothing(
    student: Path, teacher: Path, tmp_path: Path
) -> None:
    damaged = shutil.copytree(teacher, tmp_path / "damaged")
    weights = load_file(damaged / "model.safetensors")
    weights["model.norm.weight"][0] = math.nan
    save_file(weights, damaged / "model.safetensors", metadata={"format": "pt"})
    local = LocalTeacher(TeacherModel(model=str(damaged)), [str(student)], 200)
    with pytest.raises(ModelError, match="gives NaN as the log-probability of a token"):
        await local.score(World(TorchLearner({"writer": student})), make_rows())  # type: ignore[arg-type]


async def test_a_step_without_rows_loads_no_teacher(student: Path, tmp_path: Path) -> None:
    """A metric of no tokens would look as if the student were its teacher."""
    algorithm = Distill(student, teacher=tmp_path / "missing", learning_rate=1e-4)
    batch = algorithm.prepare([]).finish()
    metrics, skipped = await algorithm._update(World(), batch, 1.0)  # type: ignore[arg-type]
    assert (metrics, [*skipped]) == ({}, [])


async def test_a_lora_adapter_teaches_merged(student: Path, teacher: Path, tmp_path: Path) -> None:
    """The exported folder of a run with `lora=`, whose adapter is not zero."""
    learner = TorchLearner({"writer": teacher}, lora=LoRA(rank=2))
    for name, parameter in learner._models["writer"].trainable().items():
        if "lora_B" in name:
            parameter.data.fill_(0.05)
    learner.export("writer", tmp_path / "adapter")
    rows = make_rows()
    local = LocalTeacher(TeacherModel(model=str(tmp_path / "adapter")), [str(student)], 200)
    assert "0.133 M parameters" in local.describe()
    scores, _ = await local.score(World(learner), rows)  # type: ignore[arg-type]
    assert scores[0][-1] == pytest.approx(learner.score(rows)[0][-1], abs=1e-5)


# --- tokenizers ----------------------------------------------------------------------------------
def test_another_tokenizer_is_named_before_anything_is_loaded(student: Path, other: Path) -> None:
    local = LocalTeacher(TeacherModel(model=str(other)), [str(student)], 200)
    with pytest.raises(ConfigError) as raised:
        local.check()
    text = str(raised.value)
    assert f"the student {student} and the teacher {other} have different tokenizers" in text
    assert "differ, such as" in text
    assert "docs/guides/compress.md" in text


def test_other_special_tokens_are_named(student: Path, teacher: Path, tmp_path: Path) -> None:
    folder = tmp_path / "special"
    shutil.copytree(teacher, folder)
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>"]})
    tokenizer.save_pretrained(folder)
    local = LocalTeacher(TeacherModel(model=str(folder)), [str(student)], 200)
    with pytest.raises(ConfigError, match=r"other special tokens: .*<tool_call>"):
        local.check()


def test_a_teacher_with_a_shorter_context(student: Path, tmp_path: Path) -> None:
    short = tiny_model(tmp_path / "short", seed=1, context=64)
    local = LocalTeacher(TeacherModel(model=str(short)), [str(student)], None)
    with pytest.raises(ConfigError, match=r"reads at most 64 tokens.* may have 512.*max_length=64"):
        local.check()
    LocalTeacher(TeacherModel(model=str(short)), [str(student)], 64).check()


def test_a_server_with_another_tokenizer(student: Path, other: Path) -> None:
    with PromptServer(other).running() as server:
        remote = ServerTeacher(TeacherServer(url=server.url), [str(student)], 200)
        with pytest.raises(ConfigError, match=r"different tokenizers: .* for the student and"):
            remote.check()


@pytest.mark.parametrize("answer", [(404, "no such route"), (200, "[]"), (200, "{}")])
def test_a_server_that_does_not_tokenise(
    answer: tuple[int, str], student: Path, serving: PromptServer
) -> None:
    serving.refuse["/tokenize"] = [answer]
    remote = ServerTeacher(TeacherServer(url=serving.url), [str(student)], 200)
    with pytest.raises(ConfigError, match=r"cannot be compared with the student's.*/tokenize"):
        remote.check()


# --- servers that fail ---------------------------------------------------------------------------
@pytest.mark.parametrize("failure", [(503, "loading"), (429, "busy"), (DROP, ""), (200, "<html>")])
async def test_a_failure_that_passes_is_repeated_and_told_once(
    failure: tuple[int, str], student: Path, serving: PromptServer
) -> None:
    rows = make_rows()
    serving.refuse["/v1/completions"] = [failure] * 2
    settings = TeacherServer(url=serving.url, concurrency=1)
    remote, world = ServerTeacher(settings, [str(student)], 200), World()
    scores, _ = await remote.score(world, rows)  # type: ignore[arg-type]
    assert len(scores) == len(rows)
    assert serving.requests["/v1/completions"] == len(rows) + 2
    assert all("trying again for 300 s" in note for note in world.notes)
    assert len(world.notes) == 1


async def test_a_server_that_stays_away_ends_the_step(student: Path, serving: PromptServer) -> None:
    settings = TeacherServer(url=serving.url, patience_s=0.05)
    remote = ServerTeacher(settings, [str(student)], 200)
    remote.check()
    serving.refuse["/v1/completions"] = [(DROP, "")] * 1000
    with pytest.raises(EngineError, match=r"does not answer .*nothing was trained in this step"):
        await remote.score(World(), make_rows())  # type: ignore[arg-type]


async def test_a_refusal_is_not_repeated(student: Path, serving: PromptServer) -> None:
    serving.refuse["/v1/completions"] = [(400, "prompt_logprobs is off")] * 100
    remote = ServerTeacher(TeacherServer(url=serving.url, concurrency=1), [str(student)], 200)
    with pytest.raises(EngineError, match="answered HTTP 400: prompt_logprobs is off"):
        await remote.score(World(), make_rows(1))  # type: ignore[arg-type]
    assert serving.requests["/v1/completions"] == 1


async def test_a_server_without_logprobs_of_prompts(student: Path, serving: PromptServer) -> None:
    serving.has_logprobs = False
    remote = ServerTeacher(TeacherServer(url=serving.url), [str(student)], 200)
    with pytest.raises(ConfigError, match="gives no log-probabilities of prompts"):
        await remote.score(World(), make_rows())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ('{"choices": []}', "sent no completion"),
        ('{"choices": [{"prompt_logprobs": [null]}]}', "scored 1 tokens of a prompt of"),
    ],
)
async def test_an_answer_of_another_form(
    answer: str, error: str, student: Path, serving: PromptServer
) -> None:
    serving.refuse["/v1/completions"] = [(200, answer)] * 9
    remote = ServerTeacher(TeacherServer(url=serving.url), [str(student)], 200)
    with pytest.raises(EngineError, match=error):
        await remote.score(World(), make_rows())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("logprob", "error"),
    [("nan", "has no log-probability of token"), (3.5, "which is above 0: it sends logits")],
)
async def test_numbers_that_are_no_log_probabilities(
    logprob: Any, error: str, student: Path, serving: PromptServer
) -> None:
    rows = make_rows(1)
    entries = [None, *({str(token): {"logprob": logprob}} for token in rows[0].ids[1:])]
    body = {"choices": [{"prompt_logprobs": entries}]}
    serving.refuse["/v1/completions"] = [(200, json.dumps(body).replace('"nan"', "NaN"))]
    remote = ServerTeacher(TeacherServer(url=serving.url), [str(student)], 200)
    with pytest.raises((ConfigError, EngineError), match=error):
        await remote.score(World(), rows)  # type: ignore[arg-type]


def test_the_model_of_a_server_is_named(student: Path, serving: PromptServer) -> None:
    remote = ServerTeacher(TeacherServer(url=serving.url, model="huge"), [str(student)], 200)
    with pytest.raises(ConfigError, match=r"has no model 'huge': .* one of 'large'"):
        remote.check()
    serving.context = 128
    remote = ServerTeacher(TeacherServer(url=serving.url), [str(student)], None)
    with pytest.raises(ConfigError, match=r"reads at most 127 tokens.*max_length=127"):
        remote.check()


def test_a_key_is_named_by_its_variable(
    student: Path, serving: PromptServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = TeacherServer(url=serving.url, api_key_env="TEACHER_KEY")
    with pytest.raises(ConfigError, match="the environment has no such variable"):
        ServerTeacher(settings, [str(student)], 200).check()
    monkeypatch.setenv("TEACHER_KEY", "secret")
    ServerTeacher(settings, [str(student)], 200).check()
    assert set(serving.headers) == {"Bearer secret"}
    algorithm = Distill(student, teacher=settings, optimize="writer")
    assert "secret" not in str(algorithm.config())


def test_a_redirect_does_not_send_the_key_elsewhere(
    student: Path, serving: PromptServer, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHER_KEY", "secret")
    with PromptServer(teacher).running() as elsewhere:
        serving.refuse["/v1/models"] = [(302, f"{elsewhere.url}/v1/models")]
        settings = TeacherServer(url=serving.url, api_key_env="TEACHER_KEY")
        ServerTeacher(settings, [str(student)], 200).check()
        assert elsewhere.headers == [None]
    assert set(serving.headers) == {"Bearer secret"}


def test_nobody_listens(student: Path) -> None:
    settings = TeacherServer(url="http://127.0.0.1:9")
    with pytest.raises(EngineError, match=r"the teacher at http://127.0.0.1:9/v1/models does not"):
        ServerTeacher(settings, [str(student)], 200).check()


# --- settings ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"teacher": None}, "teacher=None must be a model"),
        ({"teacher": "ftp://x"}, ""),
        ({"reward_weight": -1}, "reward_weight=-1"),
        ({"credit": "discounted"}, "credit='discounted' changes nothing without a reward"),
        ({"estimator": "rloo"}, "estimator='rloo' changes nothing without a reward"),
        ({"tasks": "adaptive"}, "chooses tasks by their rewards"),
        ({"critic": True, "reward_weight": 1}, "critic=True compares rollouts by their rewards"),
        ({"resample": 2, "reward_weight": 1}, "resample=2 compares"),
        ({"estimator": "ppo", "reward_weight": 1}, "needs a critic, which Distill has not"),
        (
            {"credit": "family", "estimator": "rloo", "reward_weight": 1, "group_size": 4},
            'credit="family" runs forks, whose tokens it cannot weigh',
        ),
    ],
)
def test_settings_that_contradict(options: dict[str, Any], error: str, student: Path) -> None:
    make = functools.partial(Distill, student, **{"teacher": "teacher", **options})
    if not error:
        assert isinstance(make().teacher, TeacherModel)
        return
    with pytest.raises(ConfigError, match=error):
        make()


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: TeacherModel(model=""), "model='' must be a folder"),
        (lambda: TeacherModel(model="m", device="gpu"), "device='gpu' is unknown"),
        (lambda: TeacherModel(model="m", dtype="int8"), "dtype='int8'"),  # type: ignore[arg-type]
        (lambda: TeacherServer(url="gpu:8000"), "is not an http or https URL"),
        (lambda: TeacherServer(url="http://gpu", concurrency=0), "concurrency=0 must be at least"),
        (lambda: TeacherServer(url="http://gpu", patience_s=-1), "patience_s=-1"),
    ],
)
def test_settings_of_teachers(make: Callable[[], Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        make()


def test_defaults(student: Path) -> None:
    without = Distill(student, teacher="http://gpu:8000/v1", optimize="writer")
    assert isinstance(without.teacher, TeacherServer)
    assert (without.estimator, without.group_size, without.weight) == ("reinforce++", 1, "token")
    assert not without.needs_rewards
    mixed = Distill(student, teacher="t", optimize="writer", reward_weight=0.5, group_size=4)
    assert (mixed.estimator, mixed.needs_rewards) == ("grpo", True)
    assert mixed.batch_config.keep_zero_advantages


def test_a_server_has_one_temperature_and_no_grammar(student: Path) -> None:
    cold = Distill(student, teacher="http://gpu:8000", optimize="writer", temperature=0.7)
    with pytest.raises(UnsupportedError, match="scores prompts at temperature 1"):
        cold.check(ENGINE, LEARNER)
    Distill(student, teacher="t", optimize="writer", temperature=0.7).check(ENGINE, LEARNER)
    supported = []
    for teacher in ("t", "http://gpu:8000"):
        algorithm = Distill(student, teacher=teacher, optimize="writer")
        algorithm.check(ENGINE, LEARNER)
        supported.append(algorithm._supported)
    assert supported == [{Rejection.CONSTRAINED}, set()]


def test_a_model_that_is_not_there(student: Path, tmp_path: Path) -> None:
    local = LocalTeacher(TeacherModel(model=str(tmp_path / "nothing")), [str(student)], 200)
    assert "its size is unknown" in local.describe()
    with pytest.raises(ModelError):
        local.check()
