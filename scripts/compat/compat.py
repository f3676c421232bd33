#!/usr/bin/env python
"""The demo model at TP 2 in float32, served to clients of other makers: a line for each check, a table at the end.

    scripts/compat/run [--only node --only lm-eval ...] [--url URL]

Their packages are installed once, into ~/.cache/tpserve/compat. Exit status 1 if a check failed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from tpserve.checkpoint import demo
from tpserve.checkpoint.cache import cache_dir

HERE = Path(__file__).resolve().parent
CONSTRAINTS = HERE.parents[1] / "configs/constraints.txt"
ROOT = cache_dir() / "compat"
PYTHON = ROOT / "venv/bin/python"
LIMIT_S = 1200  # for one client
# Each is a script whose arguments are the server's address and the model's folder, and whose lines begin with ok or FAIL.
CLIENTS = {
    "node": ["node", str(HERE / "node_client.mjs")],
    "langchain": [str(PYTHON), str(HERE / "langchain_client.py")],
    "lm-eval": [str(PYTHON), str(HERE / "lm_eval_items.py")],
    "schemathesis": [str(PYTHON), str(HERE / "fuzz.py")],
}
# Nothing is looked up outside, no proxy leads back to this machine, and no client finds a key of its user's.
ENVIRONMENT = os.environ | {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LANGSMITH_TRACING": "false",
    "NO_PROXY": "127.0.0.1",
    "OPENAI_API_KEY": "none",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Result:
    """What came of a client's script. `last` is the last line that it wrote of a check."""

    client: str
    passed: int
    failed: int
    seconds: float
    last: str


def install(torch_index: str) -> None:
    """What is missing; all of it when a pin has changed."""
    pins = [HERE / "requirements.txt", HERE / "package.json", CONSTRAINTS]
    key = hashlib.sha256(b"".join(file.read_bytes() for file in pins) + torch_index.encode()).hexdigest()
    done = ROOT / "installed"
    if done.exists() and done.read_text() == key:
        return
    print(f"compat: installing into {ROOT}", flush=True)
    venv.create(ROOT / "venv", with_pip=True, clear=True)
    if torch_index:
        torch = next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
        pip("--no-deps", "--index-url", torch_index, torch)
    pip("--requirement", str(HERE / "requirements.txt"))
    (ROOT / "package.json").write_bytes((HERE / "package.json").read_bytes())
    subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund", "--no-package-lock"], cwd=ROOT, check=True)
    done.write_text(key)


def pip(*args: str) -> None:
    """Install with the pins of the project."""
    command = [str(PYTHON), "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--constraint", str(CONSTRAINTS)]
    subprocess.run([*command, *args], check=True)


@contextmanager
def served() -> Iterator[str]:
    """The address of a server of this checkout."""
    command = [sys.executable, "-m", "tpserve.cli", "launch", "--model", "demo", "--tp", "2", "--dtype", "float32"]
    options = ["--port", "0", "--max-model-len", "2048", "--tool-call-parser", "hermes", "--log-level", "warning"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        if not line.startswith("ready "):
            raise SystemExit("compat: the server did not start")
        try:
            yield line.split()[1]
        finally:
            server.terminate()


def run(client: str, url: str, folder: Path) -> Result:
    """Run a client's script and show its lines as they come."""
    began, lines = time.monotonic(), []
    command = ["timeout", str(LIMIT_S), *CLIENTS[client], url, str(folder)]
    with subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(("ok ", "FAIL ")):
                lines.append(line.strip())
                print(f"{client:12} {lines[-1]}", flush=True)
    failed = sum(line.startswith("FAIL ") for line in lines)
    if process.returncode and not failed:
        lines.append(f"FAIL its script ended with status {process.returncode}")
        failed = 1
    return Result(client, len(lines) - failed, failed, time.monotonic() - began, lines[-1] if lines else "no check was made")


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", choices=CLIENTS, help="this client alone; may be given again")
    parser.add_argument("--url", help="of a server of the demo model in float32 that runs; default: start one")
    parser.add_argument("--torch-index", default="", help="as in scripts/setup")
    options = parser.parse_args()
    install(options.torch_index)
    folder = demo.prepare()
    with nullcontext(options.url) if options.url else served() as url:
        results = [run(client, url, folder) for client in options.only or CLIENTS]
    print(f"\n{'client':12} passed failed seconds  last")
    for result in results:
        print(f"{result.client:12} {result.passed:6} {result.failed:6} {result.seconds:7.0f}  {result.last}")
    return int(any(result.failed or not result.passed for result in results))


if __name__ == "__main__":
    sys.exit(main())
