"""What every adapter must do, scenario by scenario: the real framework, scripted model.

A test file of an adapter subclasses `AdapterSuite` and says how its framework expresses each
scenario, and what is to be recorded:

    class TestSuite(AdapterSuite):
        framework = "autogen"

        def build(self, scenario: str, model: Model) -> App: ...
        def patched(self) -> Mapping[str, Any]: ...

`build` is called outside any scope and (for `built_at_import`) before `instrument()`. Each agent's
instructions are `instructions(name)`, so that the scripted model knows who asks without the
adapter. Every scenario runs asynchronous, synchronous and streamed, against the app's own endpoint
(calls recorded) and through a gateway (calls trained): whole span trees and token records are
compared.

A cell that a framework cannot have is in `IMPOSSIBLE`, with its reason; it must then really fail.

The table's rows are data (`scenarios`, with the span `trees` that they leave); `plays` runs them,
those of another `process` too, `checks` says what must hold, `base` what a subclass gives. Tests by
subject: `table_tests`, `concurrency_tests`, `service_tests`, `install_tests`, `company_tests`,
`prompt_tests`.
"""

from __future__ import annotations

from lightspan_testing.adapter_harness import Turn
from lightspan_testing.adapter_suite.checks import Tally
from lightspan_testing.adapter_suite.concurrency_tests import ConcurrencyTests
from lightspan_testing.adapter_suite.install_tests import InstallTests
from lightspan_testing.adapter_suite.interop_tests import CompanyTests
from lightspan_testing.adapter_suite.prompt_tests import PromptTests
from lightspan_testing.adapter_suite.scenarios import (
    BYPASSED,
    IMPOSSIBLE,
    OTHER_MEANS,
    SCENARIOS,
    App,
    Impossible,
    Model,
    Scenario,
    broken,
    by_other_means,
    bypassed,
    count,
    instructions,
    look,
)
from lightspan_testing.adapter_suite.service_tests import ServiceTests
from lightspan_testing.adapter_suite.table_tests import TableTests
from lightspan_testing.attempts import tree


class AdapterSuite(
    TableTests, ConcurrencyTests, ServiceTests, InstallTests, CompanyTests, PromptTests
):
    """See the module."""


__all__ = [
    "BYPASSED",
    "IMPOSSIBLE",
    "OTHER_MEANS",
    "SCENARIOS",
    "AdapterSuite",
    "App",
    "Impossible",
    "Model",
    "Scenario",
    "Tally",
    "Turn",
    "broken",
    "by_other_means",
    "bypassed",
    "count",
    "instructions",
    "look",
    "tree",
]
