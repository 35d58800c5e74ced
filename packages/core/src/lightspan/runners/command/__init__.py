"""A program in any language as an app.

`command` says how it is started and paid; `environment` what it finds there, `process` runs it as a
process group of its own, `reward` reads how it ended, and `watchdog` ends it when its runner dies.
"""

from lightspan.runners.command.command import Command

__all__ = ["Command"]
