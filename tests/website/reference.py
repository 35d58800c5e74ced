"""Write the pages of docs/reference that are made from the code.

    python tests/website/reference.py [--check]

`cli.md` is made from argparse, `settings.md` from the docstrings and signatures of the classes that
users construct, and `spans.md` from the names of span attributes. The table by which messages name
their place on `docs/troubleshooting.md` is made from that page. When to change a setting stands
in `when_to_change.toml`. With `--check` nothing is written. The exit status is then 1 if a page is
not what the code says, and also if griffe warns about a docstring or a public name has no page.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import logging
import re
import sys
import tomllib
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path

import griffe

import lightspan
from lightspan.cli.commands import _parser
from lightspan.schema import semconv

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGES = ROOT / "docs/reference"
TABLE = ROOT / "packages/core/src/lightspan/troubleshooting.tsv"
MADE = "<!-- made by `python tests/website/reference.py`: edit the code, not this page -->"
SETTINGS = {
    "Training": ["Trainer"],
    "Algorithms": [
        *("LightningRL", "RejectionSampling", "Distill", "SFT", "Preferences"),
        *("GEPA", "APO", "Alternate"),
    ],
    "Parts of algorithms": [
        *("Optimizer", "PolicyLoss", "LoRA", "Critic", "AIR", "Overlong", "Replay", "Policy"),
        *("Forks", "TeacherModel", "TeacherServer", "LLM", "Judge", "Price", "PromptTemplate"),
    ],
    "Engines and learners": ["Transformers", "VLLM", "Torch", "Verl"],
    "Runners": [
        *("LocalRunners", "Hosts", "ExternalRunners", "RayRunners", "Command", "CodingAgent"),
    ],
}
"""Heading → names of `lightspan` whose constructors have a table."""


def main() -> int:
    """Write or check the pages; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    modules = load()
    faults = []
    for page, text in {
        PAGES / "cli.md": cli(),
        PAGES / "settings.md": settings(modules),
        PAGES / "spans.md": spans(),
        TABLE: troubleshooting(),
    }.items():
        text = f"{text}\n"
        if not options.check:
            page.write_text(text, "utf-8")
        elif not page.exists() or page.read_text("utf-8") != text:
            name = page.relative_to(ROOT)
            faults.append(f"{name} is not what python tests/website/reference.py writes")
    if options.check:
        faults += docstring_faults(modules)
    print("\n".join(faults) or "the reference is what the code says")
    return bool(faults)


def troubleshooting() -> str:
    """Return a line with anchor and heading for each message on the page, longest first."""
    page = (ROOT / "docs/troubleshooting.md").read_text("utf-8")
    headings = sorted(re.findall(r"^### (.*)$", page, re.MULTILINE), key=len, reverse=True)
    return "\n".join(f"{anchor(heading)}\t{heading}" for heading in headings)


def anchor(heading: str) -> str:
    """Return the anchor of a heading on the site, as `markdown.extensions.toc` makes it."""
    text = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


# --- docstrings -----------------------------------------------------------------------------
def docstring_faults(modules: griffe.ModulesCollection) -> list[str]:
    """Return what griffe warns of in the docstrings that docs/reference/api shows.

    Public names that no page of the folder shows are faults, too.
    """
    pages = [page.read_text("utf-8") for page in sorted((PAGES / "api").glob("*.md"))]
    shown = re.findall(r"^::: (\S+)$", "\n".join(pages), re.MULTILINE)
    public = {f"lightspan.{name}" for name in lightspan.__all__ if not name.startswith("__")}
    faults = [f"{name} is on no page of docs/reference/api" for name in public - {*shown}]
    warnings = _Warnings()
    logging.getLogger("griffe").addHandler(warnings)
    for name in shown:
        parse(modules[name])
    return faults + warnings.texts


def parse(shown: griffe.Object | griffe.Alias) -> None:
    """Parse the docstrings of an object and of its public members."""
    target = shown.final_target if isinstance(shown, griffe.Alias) else shown
    if target.docstring is not None:
        _ = target.docstring.parsed
    for name, member in target.members.items():
        if not name.startswith("_") and not member.is_alias:
            parse(member)


class _Warnings(logging.Handler):
    """Collects the texts of warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


# --- commands -------------------------------------------------------------------------------
def cli() -> str:
    """Return the page of the commands."""
    commands = _parser()
    [choices] = [a for a in commands._actions if isinstance(a, argparse._SubParsersAction)]
    summaries = {each.dest: each.help for each in choices._choices_actions}
    rows = [f"| [`{name}`](#{name}) | {cell(summaries[name] or '')} |" for name in choices.choices]
    lines = [
        "# Command line",
        MADE,
        "`lightspan COMMAND --help` prints the same. A command comes with the package that has it; "
        "a command that is not installed names the package.",
        "\n".join(["| command | what it does |", "|---|---|", *rows]),
    ]
    for name, parser in choices.choices.items():
        lines += [f"## {name}", *command(parser)]
    return "\n\n".join(lines)


def command(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the paragraphs of one command."""
    if parser.description:
        yield inspect.cleandoc(parser.description)
    formatter = argparse.HelpFormatter(parser.prog, width=88)
    formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups, "")
    yield f"```text\n{formatter.format_help().strip()}\n```"
    rows = [
        f"| {usage(action)} | {default(action)} | {cell(help_of(action, parser))} |"
        for action in parser._actions
        if action.dest != "help"
    ]
    yield "\n".join(["| argument | default | what it does |", "|---|---|---|", *rows])


def usage(action: argparse.Action) -> str:
    """Return the names of an argument, with the name of its value."""
    metavar = action.metavar or action.dest.upper()
    value = metavar if isinstance(metavar, str) else " ".join(metavar)
    if not action.option_strings:
        return f"`{value}`"
    takes = "" if action.nargs == 0 else f" {value}"
    if action.choices is not None:
        takes = f" {{{','.join(map(str, action.choices))}}}".replace("|", r"\|")
    return ", ".join(f"`{name}{takes}`" for name in action.option_strings)


def default(action: argparse.Action) -> str:
    """Return the default of an option as the page shows it."""
    if action.default in (None, False, argparse.SUPPRESS) or action.default == []:
        return ""
    return f"`{action.default}`"


def help_of(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    formatter = argparse.HelpFormatter(parser.prog)
    return formatter._expand_help(action) if action.help else ""


# --- settings -------------------------------------------------------------------------------
def settings(modules: griffe.ModulesCollection) -> str:
    """Return the page of the settings of every class that users construct."""
    changes = tomllib.loads((HERE / "when_to_change.toml").read_text("utf-8"))
    lines = ["# Settings", MADE, (HERE / "settings_intro.txt").read_text("utf-8").strip()]
    for heading, names in SETTINGS.items():
        lines.append(f"## {heading}")
        for name in names:
            shown = modules[f"lightspan.{name}"]
            owner = shown.final_target if isinstance(shown, griffe.Alias) else shown
            assert isinstance(owner, griffe.Class)
            lines += [f"### {name}", *table_of(owner, changes.pop(name, {}))]
    assert not changes, f"when_to_change.toml has settings of no class: {', '.join(changes)}"
    return "\n\n".join(lines)


def load() -> griffe.ModulesCollection:
    """Load the packages without importing them."""
    extensions = griffe.load_extensions("dataclasses", str(HERE / "griffe_signatures.py"))
    sources = sorted(ROOT.glob("packages/*/src"))
    loader = griffe.GriffeLoader(
        search_paths=sources, docstring_parser="google", extensions=extensions
    )
    for source in sources:
        for package in source.iterdir():
            if (package / "__init__.py").exists():
                loader.load(package.name)
    loader.resolve_aliases(external=True)
    return loader.modules_collection


def table_of(owner: griffe.Class, changes: Mapping[str, str]) -> Iterator[str]:
    """Yield the paragraphs of one class: what it is, and a row for each setting.

    Raises:
        AssertionError: a docstring describes another parameter, or `changes` names one.
    """
    assert owner.docstring is not None, owner.path
    sections = owner.docstring.parsed
    yield cell(sections[0].value.partition("\n\n")[0])
    described = {
        name: member.docstring.value
        for name, member in owner.all_members.items()
        if member.docstring is not None and "property" not in member.labels
    }
    for section in sections:
        if section.kind is griffe.DocstringSectionKind.parameters:
            described |= {each.name: each.description for each in section.value}
            unknown = {each.name for each in section.value} - {p.name for p in owner.parameters}
            assert not unknown, f"{owner.path}: the signature lacks {unknown}"
    parameters = {each.name: each for each in owner.parameters if each.name != "self"}
    assert changes.keys() <= parameters.keys(), f"{owner.path} lacks {changes.keys()}"
    yield (
        "| setting | type | default | what it is | when to change it |\n|---|---|---|---|---|\n"
        + (
            "\n".join(
                f"| `{name}` | {code(each.annotation)} | {value_of(each)} "
                f"| {cell(described.get(name, ''))} | {cell(changes.get(name, ''))} |"
                for name, each in parameters.items()
            )
        )
    )


def value_of(parameter: griffe.Parameter) -> str:
    """Return the default of a parameter as the page shows it."""
    if parameter.default is None:
        return "(needed)"
    text = str(parameter.default)
    factory = re.search(r"default_factory=([\w.]+)", text)
    return code(f"{factory[1]}()" if factory else text)


def code(value: object) -> str:
    text = " ".join(str(value).split()).replace("|", r"\|")
    return f"`{text}`" if value is not None else ""


def cell(text: str) -> str:
    """Return text as a cell of a table: in one line, with escaped bars."""
    return re.sub(r"(?<!\\)\|", r"\|", " ".join(text.split()))


# --- span attributes ------------------------------------------------------------------------
def spans() -> str:
    """Return the page of the span attributes: those of `lightspan.schema.semconv`."""
    source = Path(inspect.getfile(semconv)).read_text("utf-8")
    body = ast.parse(source).body
    lines = ["# Span attributes", MADE, (HERE / "spans_intro.txt").read_text("utf-8").strip()]
    rows: list[str] = []
    for node, after in zip(body, [*body[1:], ast.Pass()], strict=True):
        match node:
            case ast.AnnAssign(target=ast.Name(id=constant), value=ast.Constant(value=str(name))):
                match after:
                    case ast.Expr(value=ast.Constant(value=str(description))):
                        pass
                    case _:
                        description = ""
                rows.append(f"| `{name}` | `{constant}` | {cell(description)} |")
    lines.append("\n".join(["| attribute | constant | what it is |", "|---|---|---|", *rows]))
    return "\n\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
