"""Test apps: arguments by name, and references by which runners import them."""

from __future__ import annotations

import functools
import re
import sys
import types
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from lightspan import plugins
from lightspan.errors import AppError, how_to_install
from lightspan.runners.app import App, Inputs, as_app, load_app, reference, rollout
from lightspan.runners.program import Program
from lightspan.schema.llm import LLM
from lightspan.schema.prompts import PromptTemplate
from lightspan.schema.records import Json, Rollout
from lightspan.schema.routing import Routing

ROLLOUT = Rollout(rollout_id="ro-1", task={"q": 1}, task_id="t")
PROMPT = PromptTemplate(template="Hi")
INPUTS = Inputs(ROLLOUT, {"hello": PROMPT}, LLM(base_url="http://x", model="m"))


def plain(task: Any) -> Any:
    return task


@rollout
def marked(task: Any, llm: Any) -> Any:
    """Ask the model."""
    return task, llm.model


@rollout()
async def marked_async(sample: Any) -> Any:
    return sample


class Holder:
    @staticmethod
    def inner(task: Any) -> Any:
        return task


def test_arguments_are_injected_by_name() -> None:
    def everything(
        task: Any, llm: Any, prompt: Any, resources: Any, rollout: Any, tries: int = 3, *a: Any
    ) -> Any:
        return task, llm.base_url, prompt, list(resources), rollout.rollout_id, tries, a

    expected = ({"q": 1}, "http://x", PROMPT, ["hello"], "ro-1", 3, ())
    assert App(everything).call(INPUTS) == expected


def test_a_first_argument_of_any_name_gets_the_task() -> None:
    assert App(lambda question, /: question).call(INPUTS) == {"q": 1}
    assert App(lambda question, /, llm: (question, llm.model)).call(INPUTS) == ({"q": 1}, "m")
    assert App(lambda: "nothing").call(INPUTS) == "nothing"
    assert App(lambda limit=5: limit).call(INPUTS) == 5
    assert App(lambda **options: options).call(INPUTS) == {}


def test_an_argument_that_nothing_provides() -> None:
    @rollout
    def app(task: Any, database: Any) -> None: ...

    message = "asks for 'database', which nothing provides; it can ask for task, llm, prompt, "
    for check in (lambda: app.check_arguments({"hello": PROMPT}), lambda: app.call(INPUTS)):
        with pytest.raises(AppError, match=f"{message}resources, rollout, hello\n"):
            check()
    app.check_arguments({"database": PROMPT})


def test_a_resource_goes_to_the_argument_of_its_name() -> None:
    hello = INPUTS.resources["hello"]
    assert App(lambda task, hello: (task, hello)).call(INPUTS) == ({"q": 1}, hello)
    assert App(lambda hello, task: (task, hello)).call(INPUTS) == ({"q": 1}, hello)
    assert App(lambda question, *, hello: (question, hello)).call(INPUTS) == ({"q": 1}, hello)
    assert App(lambda question, hello, /: (question, hello)).call(INPUTS) == ({"q": 1}, hello)
    # an argument with a default gets it too, and keeps the default without such a resource
    assert App(lambda task, hello=None, other=7: (hello, other)).call(INPUTS) == (hello, 7)


def test_a_prompt_called_prompt_is_that_one() -> None:
    other = PromptTemplate("other")
    inputs = Inputs(INPUTS.rollout, {"first": PROMPT, "prompt": other})
    assert App(lambda task, prompt: prompt).call(inputs) == other
    inputs = Inputs(INPUTS.rollout, {"task": PROMPT, "rollout": PROMPT})
    assert App(lambda task, rollout: (task, rollout)).call(inputs) == ({"q": 1}, INPUTS.rollout)
    assert App(lambda task, prompt: prompt).call(Inputs(INPUTS.rollout, {"x": PROMPT})) == PROMPT


def test_which_prompts_an_app_takes() -> None:
    named, one, everything = (
        App(lambda task, style: 0),
        App(lambda task, prompt: 0),
        App(lambda task, resources: 0),
    )
    for app, alone, among_others in ((named, 1, 1), (one, 1, 0), (everything, 1, 1)):
        assert app.takes("style", alone=True) is bool(alone)
        assert app.takes("style", alone=False) is bool(among_others)
    assert not named.takes("other", alone=True)
    assert as_app("somewhere:app").takes("other", alone=False)


async def test_a_marked_app_stays_what_it_was() -> None:
    assert await as_app(marked_async).call(INPUTS) == {"q": 1}
    assert marked({"q": 2}, INPUTS.llm) == ({"q": 2}, "m")
    assert (marked.__name__, marked.__doc__) == ("marked", "Ask the model.")
    assert as_app(marked) is marked
    assert (as_app(marked).is_async, as_app(marked_async).is_async) == (False, True)


@pytest.mark.parametrize(("app", "name"), [(plain, "plain"), (Holder.inner, "Holder.inner")])
def test_references(app: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, __name__, sys.modules[plain.__module__])
    assert reference(app) == f"{__name__}:{name}"
    assert App(app).reference == f"{__name__}:{name}"


def test_closures_objects_and_notebooks_cannot_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    def inner(task: Any) -> None: ...

    with pytest.raises(AppError, match=r"move it to the top level .*functools\.wraps"):
        reference(inner)
    with pytest.raises(AppError, match=r"the app is a partial object: .* write a function"):
        _ = App(functools.partial(plain)).reference
    notebook = types.ModuleType("__main__")
    exec("def app(task): return 1.0", vars(notebook))
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    with pytest.raises(AppError, match=r"notebook or an interactive session, .* my_app\.py"):
        reference(notebook.app)


def test_methods_cannot_travel() -> None:
    """Check that a method is refused, because an imported method would get the task as `self`."""

    class Team:
        def answer(self, task: Any) -> float:
            return 1.0

        @staticmethod
        def run(task: Any) -> float:
            return 1.0

    for app in (Team().answer, Team.answer):
        with pytest.raises(AppError, match=r"Team.answer' is a method: .*, so write a function at"):
            _ = App(app).reference
    assert App(Team.run).function is Team.run


def test_scripts_can_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    script = types.ModuleType("__main__")
    script.__file__ = __file__
    exec("def app(task): return 1.0", vars(script))
    monkeypatch.setitem(sys.modules, "__main__", script)
    monkeypatch.setitem(sys.modules, "__mp_main__", script)
    assert reference(script.app) == "__main__:app"
    assert load_app("__main__:app").function is script.app


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("json:dumps_all", "the app 'json:dumps_all' cannot be found: 'json' has no 'dumps_all'"),
        ("json:decoder.scanner.nope", "has no 'decoder.scanner.nope'"),
        ("no_such_module:x", "cannot be imported: ModuleNotFoundError: No module named"),
        ("json", "an app is named module:name, not 'json'"),
        ("json:__version__", "an app must be callable, not str"),
    ],
)
def test_apps_that_cannot_be_loaded(name: str, message: str) -> None:
    with pytest.raises(AppError, match=message):
        load_app(name)


# --- apps that are programs ---------------------------------------------------------------------
class Echo(Program):
    """A program of a kind that a distribution adds: its reward is its text."""

    def __init__(self, reference: str) -> None:
        self.text = reference

    @property
    def reference(self) -> str:
        return self.text

    async def __call__(self, task: Json, llm: LLM | None = None) -> float:
        return float(len(self.text))

    def check(self) -> None:
        if "gone" in self.text:
            raise AppError("the program is gone")

    def check_routing(self, routing: Routing) -> None:
        pass


def test_a_kind_of_program_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("echo_programs")
    monkeypatch.setattr(module, "Echo", Echo, raising=False)
    monkeypatch.setitem(sys.modules, "echo_programs", module)
    point = EntryPoint("echo", "echo_programs:Echo", "lightspan.apps")
    monkeypatch.setattr(plugins, "installed_plugins", lambda kind: {"echo": point})
    app = load_app('echo:{"n":1}')
    assert isinstance(app.program, Echo)
    assert (app.reference, app.agents, app.is_async) == ('echo:{"n":1}', None, True)
    with pytest.raises(AppError, match="the program is gone"):
        load_app('echo:{"gone":1}')


def test_a_kind_of_program_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "installed_plugins", lambda kind: {})
    with pytest.raises(AppError, match=re.escape(how_to_install("programs"))):
        load_app('command:{"arguments":["sh"]}')
    with pytest.raises(AppError, match="no plugin of the kind 'apps' is called 'acme'"):
        load_app("acme:{}")
