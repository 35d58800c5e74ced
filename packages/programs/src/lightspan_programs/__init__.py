"""Run a program in any language as an app.

`command` is the app's configuration and one attempt of it, `environment` builds the program's
environment variables, `process` runs the program as a process group, `reward` reads the reward from
its output, and `watchdog` ends the program when the runner dies.
"""

from lightspan_programs.command import Command, system

__all__ = ["Command", "system"]
