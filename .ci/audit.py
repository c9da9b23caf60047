"""Known vulnerabilities of what is installed, by pip-audit: exit code 1 if there are any.

If its service cannot be reached, one line says so, and the exit code is 0. (pip-audit itself says
"No known vulnerabilities found" if the service knows none of the packages.)
"""

import json
import subprocess
import sys

COMMAND = ["pip-audit", "--progress-spinner", "off", "--format", "json"]


def audited() -> list[dict]:
    """The packages that the service knows, with their vulnerabilities."""
    try:
        done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=300)
        found = json.loads(done.stdout)["dependencies"]
    except (
        subprocess.TimeoutExpired,
        json.JSONDecodeError,
    ):  # no connection
        return []
    return [package for package in found if "vulns" in package]


packages = audited()
if packages:
    print(f"pip-audit: {len(packages)} packages")
else:
    print("pip-audit: its service cannot be asked, nothing is known")
vulnerabilities = [
    f"{package['name']} {package['version']}: {vulnerability}"
    for package in packages
    for vulnerability in package["vulns"]
]
for line in vulnerabilities:
    print(line)
sys.exit(bool(vulnerabilities))
