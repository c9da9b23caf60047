"""Known vulnerabilities of the installed packages, by pip-audit: exit code 1 if there are any.

If its service cannot be reached, one line says so, and the exit code is 0. (pip-audit itself prints
"No known vulnerabilities found" if the service knows none of the packages.)
"""

import json
import subprocess
import sys

COMMAND = ["pip-audit", "--progress-spinner", "off", "--format", "json"]
TIMEOUT = 300  # seconds


def audit() -> list[dict]:
    """Returns the packages that the service knows, with their vulnerabilities."""
    try:
        done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=TIMEOUT)
        dependencies = json.loads(done.stdout)["dependencies"]
    except (subprocess.TimeoutExpired, json.JSONDecodeError):  # without a connection: no output
        return []
    return [package for package in dependencies if "vulns" in package]


packages = audit()
if packages:
    print(f"pip-audit: {len(packages)} packages")
else:
    print("pip-audit: its service cannot be reached, nothing is known")
found = [
    f"{package['name']} {package['version']}: {vulnerability}"
    for package in packages
    for vulnerability in package["vulns"]
]
for line in found:
    print(line)
sys.exit(bool(found))
