"""Starts that have something to fetch or to convert first: one at a time, at once, and broken off."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.hub_endpoint import Endpoint, Repository, endpoint
from tests.server import Server, alive, wait_for
from tests.unit.checkpoint.gguf import files
from tpserve.listen import reserve
from tpserve.settings import Settings

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FLAGS = ("--device", "cpu", "--dtype", "float32", "--kv-cache-memory", "16MiB")
STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model as a GGUF file; the cache is empty."""
    monkeypatch.setenv("TPSERVE_CACHE", str(tmp_path / "cache"))
    return files.write(tmp_path / "x.gguf")


@pytest.fixture
def held(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Endpoint, threading.Event]]:
    """An endpoint that has org/tiny and sends its weights once the event is set."""
    go = threading.Event()
    with endpoint() as there:
        there.repositories["org/tiny"] = Repository.of_folder(tiny_model)
        there.before_body = lambda: go.wait(60)
        for name, value in {"HF_ENDPOINT": there.url, "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "*"}.items():
            monkeypatch.setenv(name, value)
        yield there, go
        go.set()


def broken_off(server: Server, number: signal.Signals) -> list[str]:
    """What the server has said after a signal to it and its children, as a terminal sends it, or to it alone."""
    processes = psutil.Process(server.process.pid).children(recursive=True)
    if number is signal.SIGINT:
        for process in processes:
            process.send_signal(number)
    assert server.stop(number, 10) == STATUS[number]
    wait_for(lambda: not alive([process.pid for process in processes]), 5, "end of the children")
    wait_for(lambda: not any(reader.is_alive() for reader in server._readers), 5, "end of the output")
    return [line for line in server.stderr if line]


@pytest.mark.parametrize(
    ("stage", "number"),
    [("*.partial", signal.SIGHUP), ("*/weights.partial", signal.SIGINT), ("*/weights.partial", signal.SIGTERM)],
)
def test_conversion_that_is_broken_off_leaves_nothing_half_made(
    gguf: Path, tmp_path: Path, runtime: Path, stage: str, number: signal.Signals
) -> None:
    cache = tmp_path / "cache" / "gguf"
    with Server("--model", gguf, *FLAGS, wait=False) as server:
        wait_for(lambda: list(cache.glob(stage)) or server.process.poll(), 30, "conversion")
        assert [line for line in broken_off(server, number) if not line.startswith("converting")] == []
    assert not list(cache.rglob("*.partial"))
    assert not list(cache.rglob("*.safetensors"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_download_that_is_broken_off_is_taken_up_again(
    held: tuple[Endpoint, threading.Event], runtime: Path, number: signal.Signals
) -> None:
    there, go = held
    with Server("--model", "org/tiny", *FLAGS, wait=False) as server:
        wait_for(lambda: "model.safetensors" in there.sent, 30, "download")
        (line,) = broken_off(server, number)
        assert "fetching" in line
    go.set()
    with Server("--model", "org/tiny", *FLAGS) as server:
        assert server.complete([5, 6], max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2


def test_port_is_taken_while_weights_are_fetched_and_its_clients_are_refused(
    held: tuple[Endpoint, threading.Event], tiny_model: Path, runtime: Path
) -> None:
    there, go = held
    with reserve(Settings(port=0)) as free:
        address = free.getsockname()
    port = str(address[1])
    with Server("--model", "org/tiny", "--port", port, *FLAGS, wait=False) as server:
        wait_for(lambda: "model.safetensors" in there.sent, 30, "download")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        with Server("--model", tiny_model, "--port", port, *FLAGS, wait=False) as other:
            assert other.process.wait(30) == 2
        assert f"--port {port}: taken" in other.log
        go.set()
        server.wait_ready()
        assert server.url.endswith(f":{port}")
        assert server.complete([5, 6], max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2


def test_servers_at_once_on_one_file_share_its_conversion_and_nothing_else(gguf: Path, tmp_path: Path, runtime: Path) -> None:
    def text(server: Server) -> str:
        return server.text([2, 3], max_tokens=8, temperature=0, ignore_eos=True)

    with Server("--model", gguf, *FLAGS, wait=False) as first, Server("--model", gguf, *FLAGS, wait=False) as second:
        first.wait_ready()
        second.wait_ready()
        assert (first.log + second.log).count("converting") == 1
        assert len([folder for folder in (tmp_path / "cache" / "gguf").iterdir() if folder.is_dir()]) == 1
        assert text(first) == text(second)
        assert first.stop() == 0
        text(second)


def test_program_that_finds_tpserve_by_its_own_path_converts_a_file(gguf: Path, tmp_path: Path, runtime: Path) -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from tpserve import LLM, SamplingParams\n"
        f"with LLM({str(gguf)!r}, device='cpu', kv_cache_memory='16MiB') as llm:\n"
        "    (answer,) = llm.generate([[2, 3]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)\n"
        "    print(len(answer.outputs[0].token_ids))\n"
    )
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    line = [sys.executable, "-c", script]
    done = subprocess.run(line, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr
