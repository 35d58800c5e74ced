"""Wrap the SDKs' clients, and open an attempt in the app's process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightspan.capture import misattributed_calls, sdk_instrumentation
from lightspan.capture._globals import state
from lightspan.capture.context import AgentContext, AttemptContext, set_agent
from lightspan.plugins import installed_plugins, load_plugin
from lightspan.schema.records import Mode


@contextmanager
def open_scope(scope: AttemptContext) -> Iterator[AttemptContext]:
    """Wrap the SDKs' clients, and make `scope` the current attempt in a `with` block."""
    try:
        sdk_instrumentation.install()
    except Exception as error:  # such as a broken SDK, which the app may not need
        scope.recorder.add_capture_error(f"a client SDK could not be wrapped: {error!r}")
    watchers = [_watch_dry_run] if scope.mode is Mode.DEV else []
    for listener in [*state.entry_listeners, *watchers]:
        try:
            listener()
        except Exception as error:
            scope.recorder.add_capture_error(f"preparation of the attempt failed: {error!r}")
    misattributed_calls.mark_home()
    leave = set_agent(AgentContext(scope, parent_span_id=scope.root_span_id))
    try:
        yield scope
    finally:
        leave()


def _watch_dry_run() -> None:
    """Call the plugins that watch the app in a dry run; none if they are not installed here."""
    for name in installed_plugins("dry_run"):
        load_plugin("dry_run", name)()
