"""Serve the demo model at TP 2, ask it one question, show the answer as it comes; then leave the server running."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx
from openai import DefaultHttpxClient, OpenAI, OpenAIError

QUESTION = "Explain gravity in one sentence."


def main() -> int:
    """Returns the exit status: the server's, unless the question failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--once", action="store_true", help="stop the server after the answer")
    parser.add_argument("--device", default="auto", help="as in tpserve launch")
    options = parser.parse_args()

    tpserve = str(Path(sys.executable).with_name("tpserve"))
    # Without the access log, whose line would come amid the answer.
    quiet = ["--log-level", "warning"]
    command = [tpserve, "launch", "--model", "demo", "--tp", "2", "--port", "0", "--device", options.device, *quiet]
    # In a process group of its own, so that Ctrl-C reaches it once: through the handler below.
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: server.terminate())

    line = server.stdout.readline() if server.stdout else ""
    if not line:
        return server.wait() or 1
    url = line.removeprefix("ready ").strip()
    try:
        model = ask(url)
    except (OpenAIError, httpx.HTTPError) as error:
        print(f"quickstart: no answer from {url}: {error}", file=sys.stderr)
        server.terminate()
        return server.wait() or 1
    if options.once:
        server.terminate()
    else:
        print(how_to_go_on(url, model, server.pid), flush=True)
    return server.wait()


def ask(url: str) -> str:
    """Print the question and the answer, word by word. Returns the model's name. Raises OpenAIError."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", http_client=DefaultHttpxClient(trust_env=False))  # no proxy
    model = client.models.list().data[0].id
    print(f"\n> {QUESTION}", flush=True)
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=100, stream=True
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print(flush=True)
    return model


def how_to_go_on(url: str, model: str, pid: int) -> str:
    """What to type next."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Name three fruits."}], "temperature": 0})
    return f"""
The server goes on. Ask it:  curl --noproxy '*' {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'
Stop it:                     Ctrl-C here, or kill {pid}"""


if __name__ == "__main__":
    sys.exit(main())
