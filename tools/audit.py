"""Looks for known holes in the packages of a lock file, with pip-audit.

    python tools/audit.py requirements.lock

Exits with 1 where a package has one. Where nothing could be looked up (no way to PyPI, or a mirror
of it that knows no holes), it says so and exits with 0.
"""

from __future__ import annotations

import json
import subprocess
import sys


def main() -> int:
    """Audit the file that the command line names."""
    command = ["pip_audit", "--disable-pip", "--no-deps", "--progress-spinner", "off"]
    done = subprocess.run(
        [sys.executable, "-m", *command, "-f", "json", "-r", sys.argv[1]],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        packages = []
    audited = [one for one in packages if "skip_reason" not in one]
    if not audited:
        print("not audited: known holes cannot be looked up from here")
        return 0
    holes = [(one["name"], one["version"], hole) for one in audited for hole in one["vulns"]]
    for name, version, hole in holes:
        fixed = ", ".join(hole["fix_versions"]) or "no version yet"
        print(f"{name} {version}: {hole['id']}, mended in {fixed}")
    print(f"{len(audited)} of {len(packages)} packages audited, {len(holes)} known holes")
    return 1 if holes else 0


if __name__ == "__main__":
    sys.exit(main())
