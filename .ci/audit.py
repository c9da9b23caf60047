"""Known holes of what is installed, by pip-audit: exit code 1 where there are any.

Where its service cannot be asked, one line says so, and the exit code is 0. (pip-audit itself says "No known
vulnerabilities found" where the service knows none of the packages.)
"""

import json
import subprocess
import sys

COMMAND = ["pip-audit", "--progress-spinner", "off", "--format", "json"]
MOST = 300  # seconds


def audited() -> list[dict]:
    """The packages that the service knows, with their holes."""
    try:
        done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=MOST)
        return [
            package for package in json.loads(done.stdout)["dependencies"] if "vulns" in package
        ]
    except (
        subprocess.TimeoutExpired,
        json.JSONDecodeError,
    ):  # it prints nothing where it cannot connect
        return []


packages = audited()
holes = [
    f"{package['name']} {package['version']}: {hole}"
    for package in packages
    for hole in package["vulns"]
]
print(
    f"pip-audit: {len(packages)} packages"
    if packages
    else "pip-audit: its service cannot be asked, nothing is known"
)
print(*holes, sep="\n", end="\n" if holes else "")
sys.exit(bool(holes))
