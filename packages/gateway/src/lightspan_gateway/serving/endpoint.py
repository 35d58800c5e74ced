"""The server of a run's trained policies, or of a model, at one OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, Final
from urllib import parse

from lightspan.errors import ConfigError
from lightspan.progress import Reporter, default_reporter
from lightspan.protocols.engine import TokenEngine
from lightspan.schema.llm import LLM
from lightspan.schema.redaction import add_key_variable
from lightspan.schema.routing import BASE_POLICY, Route, Routing, Target, split_path
from lightspan.schema.validation import check_device_name, check_url
from lightspan.stores.aio import wait_for_event
from lightspan.training.backends import uses_base
from lightspan.training.folder import RunFolder
from lightspan.training.manifest import ServedRun
from lightspan_gateway.http_server import check_port
from lightspan_gateway.limits import GatewayLimits
from lightspan_gateway.remote_store.roles import Role
from lightspan_gateway.serving import public_access
from lightspan_gateway.serving.candidate.access import PREFIX
from lightspan_gateway.serving.candidate.candidate import Candidate, state_note
from lightspan_gateway.serving.model_folder import is_model_folder, not_servable, served_model
from lightspan_gateway.serving.served_run import quoted, read_served, upstreams_of
from lightspan_gateway.serving.signals import stop_signals
from lightspan_gateway.store_server.api_keys import Keys, take_keys
from lightspan_torch.engine.config import Transformers
from lightspan_torch.engine.hub import is_adapter

POLL_INTERVAL_S: Final = 1.0
"""Seconds between two checks of the engine's health."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of the server."""

    host: str = "127.0.0.1"
    port: int = 8000
    """Port; 0 for any free port."""
    device: str = "cpu"
    dtype: str = "auto"
    """Data type of the weights: `auto` (as stored), or torch's name of a type."""
    api_key_env: str | None = None
    """Environment variable with the key that callers must send; None for no key."""
    max_tokens: int | None = None
    """Maximum tokens of an answer if a chat request sets none; None for the rest of the context."""
    upstream: str | None = None
    """URL of the endpoint for calls that the run's policies do not answer; None refuses these
    calls."""
    upstream_key_env: str | None = None
    """Environment variable with the key of `upstream`; None for no key."""
    allow_upstream: Sequence[str] = ()
    """URLs of endpoints named in the run to which the user allows calls to be sent."""
    image_host: Sequence[str] = ()
    """Hosts from which images with addresses on the web are fetched."""
    candidate: Path | None = None
    """Folder of a run or model that answers a share of attempts; None for no candidate."""
    share: float | None = None
    """Share of attempts that the candidate answers, above 0 and below 1; None for 0.1."""
    candidate_state: Path | None = None
    """File that keeps the comparison; None for `candidate.db` in the served folder."""
    admin_key_env: str | None = None
    """Environment variable with the key that may promote the candidate or roll it back; None if
    this is possible in the file only."""

    def key(self) -> str | None:
        """Return the key that callers must send; None if `api_key_env` is None.

        Raises:
            ConfigError: the variable `api_key_env` is not set, its value is empty, or there is no
                key although other machines could reach `host`.
        """
        key = None
        if self.api_key_env is not None:
            add_key_variable(self.api_key_env)
            key = os.environ.get(self.api_key_env)
            if key is None:
                raise ConfigError(
                    f"--api-key-env {self.api_key_env}: that variable is not set; it must hold the "
                    "key that callers send"
                )
        public_access.check_open(self.host, key)
        return key

    def admin_key(self) -> Keys | None:
        """Return the key that may decide about the candidate; None if `admin_key_env` is None.

        Raises:
            ConfigError: the variable is not set, or its value is no key.
        """
        name = self.admin_key_env
        return None if name is None else take_keys({Role.ADMIN: name})

    def upstream_endpoint(self) -> LLM | None:
        """Return the endpoint of `upstream`; None if `upstream` is None.

        Raises:
            ConfigError: `upstream` is not a valid URL, the environment variable that
                `upstream_key_env` names is not set, or `upstream_key_env` is given without
                `upstream`.
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
    """Return the description of the run or model in `folder`, and the path of `folder`.

    Raises:
        ConfigError: the folder contains neither a model nor a complete run.
        ModelError: the model is incomplete.
    """
    run = RunFolder(Path(folder))
    if is_model_folder(run.path):
        return served_model(run.path), run.path
    if not run.is_used:
        raise not_servable(run.path)
    run.read_config()
    return read_served(run.read_result(), run.path), run.path


def check_upstreams(runs: Sequence[tuple[ServedRun, Path]], allowed: Sequence[str]) -> None:
    """Check that the user allows every endpoint in the files of runs.

    Calls and the user's API keys are sent to these endpoints.

    Args:
        runs: description and folder of each run.
        allowed: URLs that the user allows.

    Raises:
        ConfigError: an endpoint of a run is not allowed, or an allowed URL is in no run.
    """
    upstreams = {path: upstreams_of(served) for served, path in runs}
    urls = {quoted(upstream.url) for each in upstreams.values() for upstream in each}
    if unknown := sorted(set(allowed) - urls):
        raise ConfigError(
            f"--allow-upstream {unknown[0]}: the run in {' or '.join(map(str, upstreams))} names "
            f"no such endpoint; it names {', '.join(sorted(urls)) or 'none'}"
        )
    for path, each in upstreams.items():
        refused = [upstream for upstream in each if quoted(upstream.url) not in allowed]
        if refused:
            flags = dict.fromkeys(f"--allow-upstream {quote(quoted(u.url))}" for u in refused)
            raise ConfigError(
                f"the run in {path} sends calls to these endpoints, with keys of your "
                "environment:\n"
                + "".join(f"  {upstream}\n" for upstream in refused)
                + f"if you trust each of them, add {' '.join(flags)}"
            )


def serve(
    folder: str | Path,
    options: ServeOptions | None = None,
    *,
    reporter: Reporter | None = None,
    ready: Callable[[public_access.PublicServer], None] | None = None,
) -> None:
    """Serve a run, or a model, until SIGINT or SIGTERM.

    Args:
        folder: folder of a complete run, such as `runs/sql`, or of a Hugging Face model, which
            answers every agent.
        options: options of the server; None for the defaults.
        reporter: output for progress and addresses; None for the default output.
        ready: function that is called when the server is ready; None for none.

    Raises:
        ConfigError: the folder is no complete run and no model, the address is unsafe, the port is
            not available, a host of images is none, or an endpoint of the run is not allowed
            (`check_upstreams`).
        ModelError: a model or adapter cannot be loaded, or has no chat template.
        EngineError: the engine failed.
    """
    options, lines = options or ServeOptions(), reporter or default_reporter()
    check_device_name(options.device)
    key, upstream = options.key(), options.upstream_endpoint()  # before minutes of loading
    GatewayLimits().with_hosts(options.image_host)  # raises for a host that is none
    served, path = load_served(folder)
    candidate = None
    if options.candidate is None:
        check_upstreams([(served, path)], options.allow_upstream)
        models = _Models.of(served, path)
        if note := state_note(path):
            lines.line(note)
    else:
        newer, newer_path = load_served(options.candidate)
        check_upstreams([(served, path), (newer, newer_path)], options.allow_upstream)
        models, base = _Models.of(served, path).with_candidate(_Models.of(newer, newer_path))
        candidate = Candidate.open(
            (served, path),
            (newer, newer_path),
            base,
            share=0.1 if options.share is None else options.share,
            state=options.candidate_state,
            admin=options.admin_key(),
        )
    check_port(options.host, options.port)
    engine = models.load(options, lines)

    async def run() -> None:
        await engine.start()
        try:
            await models.merge(engine, lines)
            settings: dict[str, Any] = {
                "host": options.host,
                "port": options.port,
                "key": key,
                "max_tokens": options.max_tokens,
                "upstream": upstream,
                "image_hosts": options.image_host,
            }
            gateway = (
                public_access.ServingGateway(engine, served.routing, **settings)
                if candidate is None
                else candidate.gateway(engine, **settings)
            )
            async with gateway:
                with stop_signals() as stopping:  # before the line that mentions Ctrl-C
                    for line in describe(served, path, gateway.public_url, options, candidate):
                        lines.line(line)
                    if ready is not None:
                        ready(gateway)
                    while not stopping.is_set():
                        engine.usage()  # raises the error of a failed engine
                        await wait_for_event(POLL_INTERVAL_S, stopping)
                lines.line("stopping")
            lines.line(_usage_summary(gateway.usage))
        finally:
            await engine.close()

    asyncio.run(run())


def _usage_summary(usage: public_access.UsageCounter) -> str:
    parts = [
        f"{agent} {count} ({policy})"
        for agent, policies in usage.summary().items()
        for policy, count in policies.items()
    ]
    if usage.failed:
        parts.append(f"{usage.failed} failed or refused")
    fields = ", ".join(f"{name} ({count})" for name, count in usage.ignored_fields.items())
    ignored = f"; set aside in calls: {fields}" if fields else ""
    return f"calls answered: {', '.join(parts) or 'none'}{ignored}"


# --- models ---------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Models:
    """The models to load, and the adapters to merge into them."""

    sources: dict[str, str]
    """Policy → folder or hub name."""
    adapters: dict[str, str]
    """Policy → folder of its adapter."""
    versions: dict[str, int]
    """Policy → version."""

    @classmethod
    def of(cls, served: ServedRun, run: Path) -> _Models:
        """Return the models and adapters that a run serves.

        Raises:
            ConfigError: the folder of a policy is missing.
        """
        sources, adapters = {}, {}
        for name, policy in served.policies.items():
            folder = run / policy.folder
            if not folder.is_dir():
                raise ConfigError(f"the folder {folder} of policy {name!r} in {run} is missing")
            sources[name] = policy.model if is_adapter(folder) else str(folder)
            if is_adapter(folder):
                adapters[name] = str(folder)
        if uses_base(served.routing):
            sources[BASE_POLICY] = served.base_model
        versions = {name: policy.version for name, policy in served.policies.items()}
        return cls(sources, adapters, versions)

    def with_candidate(self, candidate: _Models) -> tuple[_Models, str]:
        """Return the models of both sides, and the name of the candidate's starting weights.

        The names of the candidate's policies begin with `PREFIX`. Equal starting weights are loaded
        once.

        Args:
            candidate: models of the candidate.
        """
        shared = candidate.sources.get(BASE_POLICY) == self.sources.get(BASE_POLICY)
        left_out = {BASE_POLICY} if shared else set()

        def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
            return {PREFIX + name: values[name] for name in values if name not in left_out}

        models = _Models(
            self.sources | renamed(candidate.sources),
            self.adapters | renamed(candidate.adapters),
            self.versions | renamed(candidate.versions),
        )
        return models, BASE_POLICY if shared else PREFIX + BASE_POLICY

    def load(self, options: ServeOptions, reporter: Reporter) -> TokenEngine:
        """Return an engine with the models loaded; call `merge` after the engine is started."""
        import torch

        from lightspan_torch.engine.transformers import TransformersEngine

        for name, source in self.sources.items():
            reporter.line(f"loading {name} from {source}")
        dtype = None if options.dtype == "auto" else getattr(torch, options.dtype)
        return TransformersEngine(
            self.sources,
            device=options.device,
            versions=self.versions,
            **{**Transformers().options(), "dtype": dtype},
        )

    async def merge(self, engine: TokenEngine, reporter: Reporter) -> None:
        """Merge the adapters into the engine's weights."""
        from lightspan_torch.learner.policy_model import load_adapter

        for name, folder in self.adapters.items():
            reporter.line(f"merging the adapter of {name} from {folder}")
            merged = await asyncio.to_thread(load_adapter, folder, base=self.sources[name])
            await engine.update(name, merged.state_dict(), self.versions[name])
            del merged


# --- output ----------------------------------------------------------------------------------
def describe(
    served: ServedRun,
    run: Path,
    url: str,
    options: ServeOptions,
    candidate: Candidate | None = None,
) -> list[str]:
    """Return the lines to print: agents' policies, addresses, and the line to change in an app.

    Args:
        served: description of the run or model.
        run: its folder.
        url: origin of the server.
        options: options of the server.
        candidate: the candidate; None without one.
    """
    variable, rules = options.api_key_env, served.routing.rules
    key, argument = (f"${variable}", f', api_key_env="{variable}"') if variable else ("unused", "")
    models = ", ".join(sorted(served.policies))
    return [
        "agents, as in training:" if rules else "agents:",
        *(f"  {rule.pattern} -> {_target_text(rule.target, options)}" for rule in rules),
        f"  {'other agents' if rules else 'every agent'} -> "
        f"{_target_text(served.routing.default, options)}",
        "one line in an app whose agents lightspan knows (adapter, or `with lightspan.agent(…)`):",
        f'  lightspan.connect("{url}"{argument})',
        "without lightspan in the app, by environment alone:",
        *(
            f"  {name}: OPENAI_BASE_URL={url}{path} OPENAI_API_KEY={key}"
            for name, path in _paths(served.routing).items()
        ),
        f"  or any OpenAI client: base_url={url}/v1, model={models}",
        f"  or any Anthropic client: base_url={url}, model={models}",
        *(candidate.lines(url) if candidate is not None else ()),
        f"serving {run} at {url}/v1 (Ctrl-C stops)",
    ]


def _target_text(target: Target, options: ServeOptions) -> str:
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


def _paths(routing: Routing) -> dict[str, str]:
    """Return the path of each agent's base URL, by the agent's name.

    Globs and patterns of nested agents share an entry. If a policy answers apps that name no
    agents, the entry `the whole app` has the path for them.
    """
    names = [rule.pattern for rule in routing.rules if public_access.is_name(rule)]
    answered = [name for name in names if routing.target(name).route is not Route.APP]
    paths = {name: f"/agents/{_encoded(name)}/v1" for name in answered}
    others = [
        rule.pattern
        for rule in routing.rules
        if not public_access.is_name(rule) and rule.target.route is not Route.APP
    ]
    if others:
        paths[f"agents of {', '.join(others)}, by their path"] = "/agents/PATH/v1"
    whole = routing.target("app")
    if whole.route is Route.POLICY and "app" not in paths:
        paths["the whole app"] = "/agents/app/v1"
    return paths


def _encoded(name: str) -> str:
    """Return an agent's name as a part of a URL that can be pasted, without spaces or braces."""
    return "/".join(parse.quote(part, safe="") for part in split_path(name))
