"""schemathesis over the served OpenAPI document: no request may end in a status of 500 or more. python fuzz.py URL"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from checks import run

URL = sys.argv[1]
EXAMPLES, SECONDS = 100, 240  # of each operation; of all
# Of the schemas' own examples, of values at the bounds, and of random ones.
COMMAND = [
    str(Path(sys.executable).with_name("schemathesis")), "run", f"{URL}/openapi.json",
    "--checks", "not_a_server_error", "--phases", "examples,coverage,fuzzing", "--continue-on-failure",
    "--max-examples", str(EXAMPLES), "--max-time", str(SECONDS), "--seed", "1", "--request-timeout", "60",
    "--suppress-health-check", "all",
]  # fmt: skip


def no_status_of_500_or_more() -> str:
    """The tool's own summary is what it says."""
    hooks = {"SCHEMATHESIS_HOOKS": "fuzz_hooks", "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(COMMAND, env=os.environ | hooks, capture_output=True, text=True, timeout=2 * SECONDS, check=False)
    if done.returncode:
        print(done.stdout[-6000:], done.stderr[-2000:], file=sys.stderr)
    seen = ", ".join(re.findall(r"\d+ selected|\d+ generated.*", done.stdout))
    assert done.returncode == 0, seen or done.stderr[-500:]
    return seen


if __name__ == "__main__":
    sys.exit(run([no_status_of_500_or_more]))
