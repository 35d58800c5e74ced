"""`lightspan serve`: a run's trained policies, or a model, at one OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Final

from lightspan.errors import ConfigError
from lightspan.progress import Reporter, default_reporter
from lightspan.schema.llm import LLM
from lightspan.schema.redaction import add_key_variable
from lightspan.schema.routing import BASE_POLICY, Route, Routing, Target
from lightspan.schema.validation import check_device_name, check_url
from lightspan.stores.aio import wait_for_event
from lightspan.training.backends import uses_base
from lightspan.training.folder import RunFolder
from lightspan.training.manifest import ServedRun, quoted, read_served
from lightspan_gateway.http_server import check_port
from lightspan_gateway.serving.model_folder import is_model_folder, neither, served_model
from lightspan_gateway.serving.public_access import ServingGateway, check_open, is_name
from lightspan_gateway.serving.signals import stop_signals
from lightspan_torch.engine.config import Transformers
from lightspan_torch.engine.hub import is_adapter

if TYPE_CHECKING:
    from lightspan.protocols.engine import TokenEngine

POLL_INTERVAL_S: Final = 1.0
"""How often it is looked whether the engine lives."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """How to serve."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one."""
    device: str = "cpu"
    dtype: str = "auto"
    """Of the weights: `auto` (as the folder has them), or torch's name of it."""
    api_key_env: str | None = None
    """The variable with the key that callers must send."""
    max_tokens: int | None = None
    """Of an answer, where a chat request does not say."""
    upstream: str | None = None
    """An endpoint for the calls that the run's policies do not answer."""
    upstream_key_env: str | None = None
    """The variable with the upstream's key."""
    allow_upstreams: Sequence[str] = ()
    """Endpoints of a run that this user did not train here, which may be asked all the same."""
    engine: Transformers = field(default_factory=Transformers)

    def key(self) -> str | None:
        """What callers must send.

        Raises:
            ConfigError: the variable is not set, or a key is needed and there is none.
        """
        key = None
        if self.api_key_env is not None:
            add_key_variable(self.api_key_env)
            key = os.environ.get(self.api_key_env)
            if key is None:
                raise ConfigError(
                    f"--api-key-env {self.api_key_env}: that variable is not set; put the key that "
                    "callers must send into it"
                )
        check_open(self.host, key)
        return key

    def upstream_endpoint(self) -> LLM | None:
        """The upstream, its key checked.

        Raises:
            ConfigError: its key is not set, or is given without an upstream.
        """
        if self.upstream is None:
            if self.upstream_key_env is not None:
                raise ConfigError("--upstream-key-env applies only to --upstream, which is missing")
            return None
        check_url(self.upstream, "--upstream")
        endpoint = LLM(base_url=self.upstream, model="", api_key_env=self.upstream_key_env)
        _ = endpoint.api_key  # raises where the variable is not set
        return endpoint


def load_served(folder: str | Path) -> tuple[ServedRun, Path]:
    """What a finished run says of how it is to be served, or a model's folder is, and the folder.

    Raises:
        ConfigError: it is neither, or not a complete run.
        ModelError: the model lacks something.
    """
    run = RunFolder(Path(folder))
    if is_model_folder(run.path):
        return served_model(run.path), run.path
    if not run.is_used:
        raise neither(run.path)
    run.read_config()
    return read_served(run.read_result(), run.path), run.path


def check_upstreams(served: ServedRun, run: Path, allowed: Sequence[str]) -> None:
    """Check that every endpoint that the run sends keys to was named by the user.

    Args:
        served: what its folder says.
        run: the folder.
        allowed: URLs, as the folder has them.

    Raises:
        ConfigError: an endpoint was not named, or one that the run does not have.
    """
    upstreams = served.upstreams()
    unknown = sorted(set(allowed) - {quoted(each.url) for each in upstreams})
    if unknown:
        known = ", ".join(sorted({quoted(each.url) for each in upstreams})) or "none"
        raise ConfigError(
            f"--allow-upstream {unknown[0]}: the run in {run} names no such endpoint; it names "
            f"{known}"
        )
    asked = [each for each in upstreams if quoted(each.url) not in allowed]
    if asked:
        flags = dict.fromkeys(f"--allow-upstream {quote(quoted(each.url))}" for each in asked)
        raise ConfigError(
            f"the run in {run} has calls sent to these endpoints, with keys of your environment:\n"
            + "".join(f"  {each}\n" for each in asked)
            + f"if you know each of them, add {' '.join(flags)}"
        )


def serve(
    folder: str | Path,
    options: ServeOptions | None = None,
    *,
    reporter: Reporter | None = None,
    ready: Callable[[ServingGateway], None] | None = None,
) -> None:
    """Serve a run, or a model, until SIGINT or SIGTERM.

    Args:
        folder: of a complete run, such as `runs/sql`, or of a model as Hugging Face has it, which
            then answers every agent.
        options: how.
        reporter: where progress and the addresses go.
        ready: called once it answers.

    Raises:
        ConfigError: no complete run and no model, an unsafe address, a port that cannot be taken,
            an endpoint of the run that was not named (`check_upstreams`).
        ModelError: a model or adapter cannot be loaded, or has no chat template.
        EngineError: the engine has died.
    """
    chosen, lines = options or ServeOptions(), reporter or default_reporter()
    check_device_name(chosen.device)
    key, upstream = chosen.key(), chosen.upstream_endpoint()  # before minutes of loading
    served, path = load_served(folder)
    check_upstreams(served, path, chosen.allow_upstreams)
    models = _Models.of(served, path)
    check_port(chosen.host, chosen.port)
    engine = models.load(chosen, lines)

    async def run() -> None:
        await engine.start()
        try:
            await models.merge(engine, lines)
            gateway = ServingGateway(
                engine,
                served.routing,
                key=key,
                host=chosen.host,
                port=chosen.port,
                max_tokens=chosen.max_tokens,
                upstream=upstream,
            )
            async with gateway:
                with stop_signals() as stopping:  # before it is said that Ctrl-C stops it
                    for line in describe(served, path, gateway.url, chosen):
                        lines.line(line)
                    if ready is not None:
                        ready(gateway)
                    await _until_stopped(stopping, engine)
                lines.line("stopping")
            lines.line(_account(gateway))
        finally:
            await engine.close()

    asyncio.run(run())


async def _until_stopped(stopping: asyncio.Event, engine: TokenEngine) -> None:
    """Raises the `EngineError` that the engine has died of: whoever started us is to know."""
    while not stopping.is_set():
        engine.usage()
        await wait_for_event(POLL_INTERVAL_S, stopping)


def _account(gateway: ServingGateway) -> str:
    """What was answered, in a line."""
    parts = [
        f"{agent} {count} ({policy})"
        for agent, policies in gateway.usage.summary().items()
        for policy, count in policies.items()
    ]
    failed = [f"{gateway.usage.failed} failed or refused"] if gateway.usage.failed else []
    fields = ", ".join(f"{name} ({count})" for name, count in gateway.usage.set_aside.items())
    aside = f"; set aside in calls: {fields}" if fields else ""
    return f"calls answered: {', '.join([*parts, *failed]) or 'none'}{aside}"


# --- models ---------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Models:
    """What the engine loads, and which adapters are then merged in."""

    sources: dict[str, str]
    """Policy → folder or hub name."""
    adapters: dict[str, str]
    """Policy → folder of its adapter."""
    versions: dict[str, int]

    @classmethod
    def of(cls, served: ServedRun, run: Path) -> _Models:
        """The models of a run.

        Raises:
            ConfigError: a model's folder is gone.
        """
        sources, adapters = {}, {}
        for name, policy in served.policies.items():
            folder = run / policy.folder
            if not folder.is_dir():
                raise ConfigError(f"{run} says that policy {name!r} is in {folder}, which is gone")
            sources[name] = policy.model if is_adapter(folder) else str(folder)
            if is_adapter(folder):
                adapters[name] = str(folder)
        if uses_base(served.routing):
            sources[BASE_POLICY] = served.base_model
        versions = {name: policy.version for name, policy in served.policies.items()}
        return cls(sources, adapters, versions)

    def load(self, options: ServeOptions, reporter: Reporter) -> TokenEngine:
        """The engine, adapters not yet merged in."""
        import torch

        from lightspan_torch.engine.transformers import TransformersEngine

        for name, source in self.sources.items():
            reporter.line(f"loading {name} from {source}")
        dtype = None if options.dtype == "auto" else getattr(torch, options.dtype)
        return TransformersEngine(
            self.sources,
            device=options.device,
            versions=self.versions,
            **{**options.engine.options(), "dtype": dtype},
        )

    async def merge(self, engine: TokenEngine, reporter: Reporter) -> None:
        """Merge the adapters into the engine's weights."""
        from lightspan_torch.learner.policy_model import load_adapter

        for name, folder in self.adapters.items():
            reporter.line(f"merging the adapter of {name} from {folder}")
            merged = await asyncio.to_thread(load_adapter, folder, base=self.sources[name])
            await engine.update(name, merged.state_dict(), self.versions[name])
            del merged


# --- what a person reads --------------------------------------------------------------------
def describe(served: ServedRun, run: Path, url: str, options: ServeOptions) -> list[str]:
    """Where it serves, what, and the one line to change in the app; the last says it is ready."""
    key = f"${options.api_key_env}" if options.api_key_env else "unused"
    lines = [*_mapping(served.routing, options), *_by_connection(url, options)]
    for name, path in _addresses(served.routing).items():
        lines.append(f"  {name}: OPENAI_BASE_URL={url}{path} OPENAI_API_KEY={key}")
    models = ", ".join(sorted(served.policies))
    lines.append(f"  or any OpenAI client: base_url={url}/v1, model={models}")
    lines.append(f"  or any Anthropic client: base_url={url}, model={models}")
    return [*lines, f"serving {run} at {url}/v1 (Ctrl-C stops)"]


def _by_connection(url: str, options: ServeOptions) -> list[str]:
    env = options.api_key_env
    argument = f', api_key_env="{env}"' if env else ""
    return [
        "one line in an app whose agents lightspan knows (adapter, or `with lightspan.agent(…)`):",
        f'  lightspan.connect("{url}"{argument})',
        "without lightspan in the app, by environment alone:",
    ]


def _mapping(routing: Routing, options: ServeOptions) -> list[str]:
    """Which agent is answered by what."""
    lines = [f"  {rule.pattern} -> {_text(rule.target, options)}" for rule in routing.rules]
    rest = "every agent" if not lines else "other agents"
    return [
        "agents, as in training:" if lines else "agents:",
        *lines,
        f"  {rest} -> {_text(routing.default, options)}",
    ]


def _text(target: Target, options: ServeOptions) -> str:
    match target.route:
        case Route.POLICY:
            return target.policy
        case Route.SHARED:
            return f"{target.policy} (untrained, shared)"
        case Route.BASE:
            return "the starting weights"
        case Route.ENDPOINT:
            llm = target.endpoint
            assert llm is not None
            key = f", with the key in ${llm.api_key_env}" if llm.api_key_env else ""
            return quoted(f"{llm.model} at {llm.base_url}{key}")
        case Route.APP:
            return options.upstream or "where the app points (not answered here)"


def _addresses(routing: Routing) -> dict[str, str]:
    """Agent → path of its own base URL; the unnamed agent stands for an app that names none."""
    named = [rule.pattern for rule in routing.rules if is_name(rule)]
    ours = [name for name in named if routing.target(name).route is not Route.APP]
    paths = {name: f"/agents/{name}/v1" for name in ours}
    whole = routing.target("app")
    if whole.route is Route.POLICY and "app" not in paths:
        paths["the whole app"] = "/agents/app/v1"
    return paths


__all__ = ["ServeOptions", "describe", "load_served", "serve"]
