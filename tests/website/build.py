"""Build the documentation, or serve it: `nox -s docs`, `nox -s docs -- serve`.

A broken link, a missing anchor, a warning about a docstring, a page of the reference that is not
what the code says, and a manifest that is not what Kubernetes accepts are errors.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def main(arguments: list[str]) -> int:
    """Build or serve; return the exit status."""
    if arguments not in ([], ["serve"]):
        print(f"{' '.join(arguments)}: the only argument is serve", file=sys.stderr)
        return 2
    checked = subprocess.run([sys.executable, HERE / "reference.py", "--check"], check=False)
    if checked.returncode:
        return checked.returncode
    check_manifests()
    zensical = [Path(sys.executable).parent / "zensical", *(arguments or ["build", "--clean"])]
    return subprocess.run([*zensical, "--strict"], cwd=ROOT, check=False).returncode


def check_manifests() -> None:
    """Compare each manifest on a page with Kubernetes' schema.

    Raises:
        kubernetes_validate.ValidationError: a manifest has a wrong or unknown field.
    """
    import kubernetes_validate
    import yaml

    for page in sorted((ROOT / "docs").rglob("*.md")):
        for text in re.findall(r"^```yaml .*?\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S):
            for manifest in yaml.safe_load_all(text):
                kubernetes_validate.validate(
                    manifest, kubernetes_validate.latest_version(), strict=True
                )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
