"""Conformance tests of adapters, with the real framework and a scripted model.

An adapter's test file subclasses `AdapterSuite`, builds the app of each scenario in its framework,
and declares the expected records:

    class TestSuite(AdapterSuite):
        framework = "autogen"

        def build(self, scenario: str, model: Model) -> App: ...
        def patched(self) -> Mapping[str, Any]: ...

`build` is called outside of any attempt and before `instrument()`. The instructions of an agent are
`instructions(name)`, from which the scripted model identifies the agent without the adapter. Every
scenario runs asynchronously, synchronously and streamed, against the app's own endpoint (calls
recorded) and through a gateway (calls trained); whole span trees and token records are compared.

Scenarios and modes that a framework does not support are in `IMPOSSIBLE`, with the reasons. Their
tests must fail.

`scenarios` has the table's rows, `trees` helpers for the span trees; `scenario_runner` runs them,
`checks` checks the results, `base` has the hooks. Tests by subject:
`table_tests`, `service_tests`, `install_tests`, `prompt_tests`.
"""

from __future__ import annotations

from lightspan_testing.adapter_harness import Turn
from lightspan_testing.adapter_suite.install_tests import InstallTests
from lightspan_testing.adapter_suite.prompt_tests import PromptTests
from lightspan_testing.adapter_suite.scenarios import (
    IMPOSSIBLE,
    OTHER_MEANS,
    SCENARIOS,
    App,
    Impossible,
    Model,
    broken,
    by_other_means,
    count,
    instructions,
    look,
)
from lightspan_testing.adapter_suite.service_tests import ServiceTests
from lightspan_testing.adapter_suite.table_tests import TableTests
from lightspan_testing.attempts import tree


class AdapterSuite(TableTests, ServiceTests, InstallTests, PromptTests):
    """Tests of an adapter; the module's docstring shows how to subclass it."""


__all__ = [
    "IMPOSSIBLE",
    "OTHER_MEANS",
    "SCENARIOS",
    "AdapterSuite",
    "App",
    "Impossible",
    "Model",
    "Turn",
    "broken",
    "by_other_means",
    "count",
    "instructions",
    "look",
    "tree",
]
