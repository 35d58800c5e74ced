"""Run a program in any language as an app.

`command` is the app's configuration and one attempt of it, `coding_agent` that of a program which
works in a copy of a folder, `specs` says how to start such programs, and `known_programs` has those
that are known by name. `environment` builds the environment variables, `execution` runs a program
and records it, `process` runs it as a process group, `reward` reads the reward from its output, and
`watchdog` ends the program when the runner dies.
"""

from lightspan_programs.coding_agent import CodingAgent
from lightspan_programs.command import Command, system
from lightspan_programs.specs import ProgramSpec

__all__ = ["CodingAgent", "Command", "ProgramSpec", "system"]
