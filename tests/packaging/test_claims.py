"""What the documents claim, against what it is claimed of: tables of measurements, versions."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import pytest

import noxfile
from lightspan.cli.commands import _parser
from lightspan.errors import how_to_install
from lightspan.plugins import installed_plugins
from tests.frameworks import matrix

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
EXAMPLES = (ROOT / "examples/README.md").read_text()
MEASURED = ["sql", "math", "rag"]
"""The examples whose READMEs have a table of seeds."""
TITLES = {
    "sql": "| [text to SQL]",
    "math": "| [word problems]",
    "rag": "| [multi-hop questions]",
    "crew": "| [the same, as a crew]",
}
"""Their rows in the README, and the crew's, whose table is in RAG's README."""

PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/*.md"),
    *(page for folder in ("packages", "examples") for page in ROOT.glob(f"{folder}/*/README.md")),
]

Row = dict[str, str]


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def unwrapped(text: str) -> str:
    return " ".join(text.split())


def measured(example: str) -> str:
    """What an example's README says of how it learned; the crew's is RAG's."""
    heading = "### The crew" if example == "crew" else "### Measured"
    page = text_of(f"examples/{'rag' if example == 'crew' else example}/README.md")
    return page.partition(heading)[2]


def seeds_of(example: str) -> list[Row]:
    """The table of an example's README, a row per seed; `after` is its last evaluation."""
    table = measured(example).partition("\n| seed | before |")
    lines = "".join(table[1:]).strip().partition("\n\n")[0].splitlines()
    names, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    names[[n for n, name in enumerate(names) if name.startswith("after")][-1]] = "after"
    found = [dict(zip(names, row, strict=True)) for row in rows]
    assert [row["seed"] for row in found] == ["0", "1", "2"]
    return found


def numbers(rows: list[Row], column: str) -> list[float]:
    return [float(row[column]) for row in rows]


def cpu_seconds(rows: list[Row]) -> list[float]:
    parts = [row["engine + learner CPU-s"].split(" + ") for row in rows]
    return [float(engine) + float(learner) for engine, learner in parts]


def pairs(text: str) -> list[tuple[float, float]]:
    """Each `before → after` of a text, in order."""
    found = re.findall(r"(\d\.\d+) (?:->|→) (\d\.\d+)", text)
    return [(float(before), float(after)) for before, after in found]


def rounded(said: str | float, measured: float, digits: int = 2) -> bool:
    """Whether a figure is a measured one, rounded."""
    return abs(float(said) - measured) <= 0.5 / 10.0**digits + 1e-9


def row_of(page: str, start: str) -> list[str]:
    [line] = [line for line in page.splitlines() if line.startswith(start)]
    return [cell.strip() for cell in line.split("|")[1:-1]]


def permuted(example: str) -> float:
    """Where permuted rewards ended, the mean over the seeds that had them."""
    if example == "crew":
        return mean(
            after for row in seeds_of("crew") for _, after in pairs(row["permuted rewards"])
        )
    control = re.split(r"ewards permuted within each group", measured(example))[1].split("Noise")[0]
    control = control.split("As many")[0].split("Nothing")[0]
    return mean(after for _, after in pairs(control))


# --- measurements ---------------------------------------------------------------------------
@pytest.mark.parametrize("example", TITLES)
def test_headlines_are_the_means_and_spreads_that_were_measured(example: str) -> None:
    rows = seeds_of(example)
    _, _, *figures, control = row_of(README, TITLES[example])
    for column, said in zip(("before", "after"), figures, strict=True):
        values = numbers(rows, column)
        middle, low, high = re.findall(r"\d\.\d+", said)
        assert rounded(middle, mean(values)), (column, said)
        assert (rounded(low, min(values)), rounded(high, max(values))) == (True, True), said
    assert rounded(control, permuted(example))


def test_the_crews_row_is_what_was_measured() -> None:
    rows, [*_, said, cpu] = seeds_of("crew"), row_of(EXAMPLES, "| [`rag --framework crewai`]")
    for row, (before, after) in zip(rows, pairs(said), strict=True):
        assert rounded(before, float(row["before"]))
        assert rounded(after, float(row["after"]))
    for figure, value in zip(re.findall(r"\d+", cpu), cpu_seconds(rows), strict=True):
        assert rounded(figure, value, digits=0)


def test_in_how_many_examples_and_seeds_it_learns_is_what_was_measured() -> None:
    headlines = README.partition("## Does it learn?")[2].partition("\n\n| ")[2].partition("\n\n")[0]
    names = re.findall(r"^\| \[.*?\]\(examples/([a-z]+)", headlines, re.MULTILINE)
    assert len(names) == 4
    assert "Such a model does, in each of these four and in every seed" in unwrapped(README)
    for row in re.findall(r"^\| \[`(?:sql|math|rag).*$", EXAMPLES, re.MULTILINE):
        gained = pairs(row)
        assert len(gained) == 3, row
        assert all(after > before for before, after in gained), row
    lacking = re.findall(r"^\| \[`(\w+)`\].* not measured yet \|", EXAMPLES, re.MULTILINE)
    assert not {*lacking} & {*names}
    said = re.findall(r"in the (\w+) is not measured yet", unwrapped(README))
    assert said == lacking


ABSENT: dict[str, Callable[[], bool]] = {
    "packages on PyPI": lambda: "from a checkout" in how_to_install(),
    "vLLM on a GPU": lambda: "not yet run on one" in README,
    "verl on a GPU": lambda: "**Not yet run on a GPU**" in (ROOT / "docs/verl.md").read_text(),
}
"""What the README says is not there → how one sees that."""


def is_there(module: str) -> bool:
    """Whether lightspan has a module, by the names of the design."""
    path = ROOT / "packages/core/src/lightspan" / module.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_what_is_said_not_to_be_there_is_not() -> None:
    [said] = re.findall(r"^Not yet there: (.*?)\. ", README, re.MULTILINE)
    assert said.split(", ") == [*ABSENT]
    assert [name for name, is_absent in ABSENT.items() if not is_absent()] == []


@pytest.mark.parametrize("example", MEASURED)
def test_the_table_of_examples_is_that_of_each_example(example: str) -> None:
    rows = seeds_of(example)
    cells = row_of(EXAMPLES, f"| [`{example}`]")
    measured = [*zip(numbers(rows, "before"), numbers(rows, "after"), strict=True)]
    for said, values in zip(pairs(cells[5]), measured, strict=True):
        assert all(map(rounded, said, values)), (said, values)
    spent = cells[6].removesuffix(" CPU-s").split(", ")
    for said_cpu, value in zip(spent, cpu_seconds(rows), strict=True):
        assert rounded(said_cpu, value, digits=0), (said_cpu, value)


def test_the_readmes_sql_figures_are_those_of_the_example() -> None:
    rows = seeds_of("sql")
    for row, spent in zip(rows, cpu_seconds(rows), strict=True):
        said = row_of(README, f"| {row['seed']} | ")
        assert said[1:4] == [row["before"], row["after"], row["gain (95% CI)"]]
        assert said[4] == f"{spent:.1f} CPU-s"
    warm = numbers(rows, "warm start CPU-s")
    assert f"after the warm start ({min(warm):g} to {max(warm):g} CPU-s" in unwrapped(README)
    controls = text_of("examples/sql/README.md").partition("Controls, from the same run")[2]
    imitated = sorted(re.findall(r"seed \d: (\d\.\d+) against", controls))
    assert f"end at {imitated[0]} to {imitated[-1]};" in unwrapped(README)
    assert f"it falls to {permuted('sql'):.3f} (seed 0);" in unwrapped(README)


def test_where_the_readmes_wall_time_goes_was_measured() -> None:
    shares = re.findall(r"(app|gateway|engine|learner) (\d+) %", README)
    assert len(shares) == 4
    figures = json.loads(text_of("benchmarks/results/quickstart.json"))["figures"]
    measured = {each["what"].rpartition(" ")[2]: str(each["ours"]) for each in figures}
    assert [(name, measured[name]) for name, _ in shares] == shares


# --- versions -------------------------------------------------------------------------------
FRAMEWORKS = {
    "langgraph": {"langgraph": "LangGraph", "langchain-core": "langchain-core"},
    "autogen": {"autogen-agentchat": "autogen-agentchat"},
    "openai_agents": {"openai-agents": "OpenAI Agents SDK"},
    "crewai": {"crewai": "CrewAI"},
}
"""Adapter → distribution → its name in the support matrix."""


def declared(adapter: str) -> dict[str, str]:
    """What an adapter needs beside the core: name → floor."""
    project = tomllib.loads(text_of(f"packages/{adapter}/pyproject.toml"))["project"]
    needs = [each for each in project["dependencies"] if not each.startswith("lightspan")]
    return dict(each.split(">=") for each in needs)


def pin(name: str, constraints: str) -> str:
    pinned = re.findall(rf"^{name}==(.+)$", text_of(f"constraints/{constraints}.txt"), re.MULTILINE)
    return str(pinned[0])


@pytest.mark.parametrize("adapter", noxfile.ADAPTERS)
def test_the_support_matrix_is_what_is_declared_and_tested(adapter: str) -> None:
    floors = declared(adapter)
    assert set(floors) == set(FRAMEWORKS[adapter])
    page = unwrapped(text_of(f"packages/{adapter}/README.md"))
    for name, shown in FRAMEWORKS[adapter].items():
        oldest, newest = pin(name, f"{adapter}-oldest"), pin(name, f"{adapter}-latest")
        assert floors[name] == oldest
        assert f"{shown} {oldest} to {newest}" in README
        assert re.search(rf"{name} >= {re.escape(oldest.removesuffix('.0'))}(\.0)?\b", page)


def test_the_sdks_that_are_tested() -> None:
    versions = {
        tuple(map(int, pin("openai", f"{adapter}-{age}").split(".")))
        for adapter in noxfile.ADAPTERS
        for age in ("oldest", "latest")
    }
    oldest, newest = (".".join(map(str, each)) for each in (min(versions), max(versions)))
    assert f"OpenAI SDK ({oldest} to {newest} tested)" in README
    assert f"Anthropic SDK ({pin('anthropic', 'dev')} tested;" in README


# --- frameworks without an adapter -----------------------------------------------------------
def test_the_matrix_of_frameworks_is_what_is_tested() -> None:
    with_agents = {
        name for name, each in noxfile.FRAMEWORKS.items() if each.get("has_agents", True)
    }
    assert {name.replace("-", "_") for name in matrix.MATRIX} == with_agents
    for name, row in matrix.MATRIX.items():
        lacking = {column for column, played in matrix.covers(row).items() if not played}
        assert set(row.gaps) == lacking, f"{name}: each gap has its reason"
    for page in ("README.md", "docs/otel.md"):
        assert f"\n\n{matrix.table()}\n\n" in text_of(page), (
            f"{page} lacks what python tests/frameworks/matrix.py prints"
        )


def test_every_framework_is_tested_in_its_oldest_version_too() -> None:
    """And with either OpenAI SDK, but for those that take only one before 3. Of ADK one passes."""
    before_3 = {"strands-agents", "llama-index"}
    for name, distribution in matrix.DISTRIBUTIONS.items():
        key = name.replace("-", "_")
        files = [f"{key}-{age}" for age in ("oldest", "latest")]
        oldest, latest = (version_of(pin(distribution, file)) for file in files)
        assert (oldest < latest) == (name != "google-adk"), name
        sdks = [version_of(pin("openai", file))[0] for file in files]
        assert sdks == ([2, 2] if name in before_3 else [2, 3]), name
        both = dict.fromkeys(".".join(map(str, each)) for each in (oldest, latest))
        shown = " to ".join(both)
        assert re.search(rf'"{name}"\)?` \({shown}\)', README), f"the README says {shown} of {name}"


def version_of(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def test_the_router_asks_for_the_oldest_pydantic_ai_that_is_tested() -> None:
    extras = tomllib.loads(text_of("examples/router/pyproject.toml"))["project"]
    floor = extras["optional-dependencies"]["pydantic-ai"]
    assert floor == [
        "lightspan-otel",
        f"pydantic-ai-slim[openai]>={pin('pydantic-ai-slim', 'pydantic_ai-oldest')}",
    ]


# --- what can be installed from where ---------------------------------------------------------
def installs(text: str) -> list[str]:
    """What each `pip install` of a text asks for."""
    return re.findall(r"pip install ([^`\n]*)", text)


def test_nothing_of_ours_is_installed_from_an_index() -> None:
    """It is on none, and the name there is anybody's. The first release changes this, and
    `lightspan.errors.how_to_install` with it."""
    sources = [*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("examples/**/*.py")]
    bare = {
        f"{path.relative_to(ROOT)}: pip install {asked}"
        for path in [*PAGES, *sources]
        for asked in installs(path.read_text())
        if re.search(r"(^|[\s'\"])lightspan", asked)
    }
    assert bare == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_that_install_packages_say_from_where(page: Path) -> None:
    text = page.read_text()
    if any(re.search(r"(packages|examples)/", asked) for asked in installs(text)):
        assert "a checkout" in text


# --- commands -------------------------------------------------------------------------------
@pytest.mark.parametrize("command", installed_plugins("commands"))
def test_every_argument_of_a_command_says_what_it_is(command: str) -> None:
    [parsers] = [each.choices for each in _parser()._actions if isinstance(each.choices, dict)]
    parser = parsers[command]
    assert parser.description
    assert [each.dest for each in parser._actions if not each.help] == []
