"""How servers begin and end: signals, kills, and that nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.server import Server, alive, wait_for

STORY = "Once upon a time"


def assert_clean(runtime: Path, pids: list[int], port: int) -> None:
    """Within 5 s no process, no new file and no listener is left, and the port can be bound."""
    wait_for(lambda: not alive(pids), 5, "end of all processes")
    wait_for(lambda: not list(runtime.iterdir()), 5, "removal of the run directory")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


@pytest.fixture
def server(tiny_model: Path, runtime: Path) -> Iterator[Server]:
    with Server("--model", tiny_model, "--tp", "2", "--dtype", "float32") as running:
        yield running


def port_of(server: Server) -> int:
    return int(server.url.rsplit(":", 1)[1])


def open_streams(server: Server, count: int, max_tokens: int) -> tuple[list[threading.Thread], list[str]]:
    """Streams in threads; each appends its whole body when it ends. Returns when every one has its first chunk."""
    bodies: list[str] = []
    started = threading.Semaphore(0)

    def read() -> None:
        body = {"prompt": STORY, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        with server.client() as client, client.stream("POST", "/v1/completions", json=body) as response:
            text = ""
            for chunk in response.iter_text():
                if not text:
                    started.release()
                text += chunk
        bodies.append(text)

    threads = [threading.Thread(target=read, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert started.acquire(timeout=30)
    return threads, bodies


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_signal_while_idle_ends_cleanly(server: Server, runtime: Path, number: int, status: int) -> None:
    pids = list(server.pids().values())
    assert set(server.pids()) == {"launcher", "frontend", "coordinator", "worker 0/2", "worker 1/2"}
    assert server.stop(number) == status
    assert len(server.stdout) == 1
    assert_clean(runtime, pids, port_of(server))


def test_sigterm_with_open_streams_drains_them(server: Server, runtime: Path) -> None:
    pids = list(server.pids().values())
    threads, bodies = open_streams(server, 4, 400)
    server.process.send_signal(signal.SIGTERM)
    with server.client() as client:
        wait_for(lambda: client.get("/health/ready").status_code == 503, 5, "not ready")
        assert client.get("/health/live").status_code == 200
        refused = client.post("/v1/completions", json={"prompt": STORY, "max_tokens": 1})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
    for thread in threads:
        thread.join(30)
    assert server.process.wait(30) == 0
    assert len(bodies) == 4
    assert all(body.rstrip().endswith("data: [DONE]") and '"finish_reason":"length"' in body for body in bodies)
    assert_clean(runtime, pids, port_of(server))


@pytest.mark.slow
def test_second_sigterm_stops_at_once_with_one_error_event(server: Server, runtime: Path) -> None:
    pids = list(server.pids().values())
    threads, bodies = open_streams(server, 2, 900)
    server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "a second signal stops at once" in server.log, 5, "drain line")
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(10) == 0
    for thread in threads:
        thread.join(10)
    assert [body.count('"error"') for body in bodies] == [1, 1]
    assert_clean(runtime, pids, port_of(server))


def test_kill_of_launcher_while_serving_leaves_nothing(server: Server, runtime: Path) -> None:
    pids = list(server.pids().values())
    open_streams(server, 2, 900)
    server.process.kill()
    server.process.wait(5)
    assert_clean(runtime, pids, port_of(server))


@pytest.mark.slow
@pytest.mark.parametrize("moment_s", [0.0, 0.3, 1.0])
def test_kill_of_launcher_while_loading_leaves_nothing(tiny_model: Path, runtime: Path, moment_s: float) -> None:
    with Server("--model", tiny_model, "--tp", "2", wait=False) as server:
        wait_for(lambda: "worker 1/2" in server.pids(), 20, "last child")
        time.sleep(moment_s)  # moments of the start, not conditions
        pids = list(server.pids().values())
        server.process.kill()
        server.process.wait(5)
        wait_for(lambda: not alive(pids), 5, "end of all processes")
        wait_for(lambda: not list(runtime.iterdir()), 5, "removal of the run directory")


@pytest.mark.slow
def test_next_start_removes_what_a_server_killed_as_a_whole_left(tiny_model: Path, runtime: Path) -> None:
    with Server("--model", tiny_model, wait=False) as server:
        wait_for(lambda: "frontend" in server.pids(), 20, "frontend")
        for pid in server.pids().values():
            os.kill(pid, signal.SIGKILL)
        server.process.wait(5)
    with Server("--model", tiny_model) as second:
        assert len(list(runtime.iterdir())) == 1
        second.stop()


@pytest.mark.slow
def test_first_signal_while_loading_stops(tiny_model: Path, runtime: Path) -> None:
    with Server("--model", tiny_model, "--tp", "2", wait=False) as server:
        wait_for(lambda: len(server.pids()) >= 3, 10, "children")
        assert server.stop(signal.SIGTERM, 5) == 0
        assert server.stdout == []


@pytest.mark.slow
@pytest.mark.parametrize("moment_s", [0.0, 0.1, 0.3, 1.0])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_signal_to_all_processes_while_starting_is_the_launchers_to_act_on(
    tiny_model: Path, runtime: Path, number: int, status: int, moment_s: float
) -> None:
    with Server("--model", tiny_model, "--tp", "2", wait=False) as server:
        launcher = psutil.Process(server.process.pid)
        wait_for(lambda: len(launcher.children()) == 4, 20, "children")
        time.sleep(moment_s)  # moments of the start, not conditions
        for process in (*launcher.children(), launcher):
            process.send_signal(number)
        assert server.process.wait(10) == status
    assert "ERROR" not in server.log
    assert "Traceback" not in server.log
    assert not list(runtime.iterdir())


@pytest.mark.slow
def test_many_signals_end_the_server_as_one(server: Server, runtime: Path) -> None:
    while server.process.poll() is None:
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.002)  # so that some come at its very end
    assert server.process.returncode == 0
    assert "Traceback" not in server.log


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["worker 0/2", "worker 1/2", "coordinator"])
def test_death_of_a_child_ends_the_server_with_one_line(server: Server, runtime: Path, victim: str) -> None:
    pids = server.pids()
    threads, bodies = open_streams(server, 2, 900)
    os.kill(pids[victim], signal.SIGKILL)
    assert server.process.wait(10) == 1
    for thread in threads:
        thread.join(10)
    errors = [line for line in server.stderr if " ERROR " in line]
    assert len(errors) == 1
    assert victim in errors[0]
    assert "SIGKILL" in errors[0]
    assert ("step" in errors[0]) == ("worker" in victim)
    assert [body.count('"error"') for body in bodies] == [1, 1]
    assert_clean(runtime, list(pids.values()), port_of(server))


@pytest.mark.slow
def test_worker_that_fails_while_loading_is_reported_once(tiny_model: Path, runtime: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('this torch is broken')")
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    with Server("--model", tiny_model, "--tp", "2", env={"PYTHONPATH": path}, wait=False) as server:
        wait_for(lambda: "broken" in server.log, 20, "message")
        assert server.process.wait(5) == 1
    errors = [line for line in server.stderr if " ERROR " in line]
    assert len(errors) == 1
    assert re.search(r"worker [01]/2 could not start: RuntimeError: this torch is broken", errors[0])
    assert server.stdout == []


@pytest.mark.slow
def test_eight_servers_started_at_once_all_serve(tiny_model: Path, runtime: Path) -> None:
    flags = ("--model", tiny_model, "--tp", "2", "--dtype", "float32", "--kv-cache-memory", "64MiB")
    servers = [Server(*flags, "--served-model-name", f"m{i}", wait=False) for i in range(8)]
    try:
        for server in servers:
            server.__enter__()
        for server in servers:
            server.wait_ready()
        assert len({server.url for server in servers}) == 8
        for i, server in enumerate(servers):
            with server.client() as client:
                assert client.get("/v1/models").json()["data"][0]["id"] == f"m{i}"
            assert server.complete(STORY, max_tokens=4, temperature=0, model=f"m{i}")["usage"]["completion_tokens"] <= 4
        assert servers[0].stop() == 0
        assert servers[1].text(STORY, max_tokens=4) is not None
    finally:
        for server in servers:
            server.__exit__()


@pytest.mark.slow
def test_health_is_not_ready_before_a_completion_can_succeed(tiny_model: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    seen: list[int] = []
    with Server("--model", tiny_model, "--tp", "2", "--port", str(port), "--dtype", "float32", wait=False) as server:

        def ready() -> bool:
            try:
                status = httpx.get(f"http://127.0.0.1:{port}/health/ready", timeout=10, trust_env=False).status_code
            except httpx.TransportError:
                return False
            seen.append(status)
            return status == 200

        wait_for(ready, 60, "readiness")
        server.url = f"http://127.0.0.1:{port}"
        assert server.complete(STORY, max_tokens=2)["usage"]["completion_tokens"] <= 2
        wait_for(lambda: server.stdout, 5, "ready line")
    assert set(seen) <= {200, 503}
    assert seen.count(200) == 1


@pytest.mark.slow
def test_server_on_ipv6_loopback_answers(tiny_model: Path) -> None:
    with Server("--model", tiny_model, "--host", "::1", "--dtype", "float32") as server:
        assert "[::1]" in server.url
        assert server.complete(STORY, max_tokens=2)["usage"]["completion_tokens"] <= 2


@pytest.mark.slow
def test_idle_server_sleeps(server: Server) -> None:
    server.complete(STORY, max_tokens=8)
    pids = server.pids()

    def used() -> dict[str, tuple[int, float]]:
        return {title: _wakes_and_run_s(pid) for title, pid in pids.items()}

    before, stretch_s = used(), 6
    time.sleep(stretch_s)  # the thing measured: a stretch of idleness
    spent = {title: (wakes - before[title][0], run_s - before[title][1]) for title, (wakes, run_s) in used().items()}
    assert max(wakes for wakes, _ in spent.values()) <= 10 * stretch_s, spent
    assert spent["frontend"][0] <= 3 * stretch_s, spent
    # A mere waking from idleness costs milliseconds on some virtual machines, so time tells only of what spins.
    assert max(run_s for _, run_s in spent.values()) <= 0.2 * stretch_s, spent


def _wakes_and_run_s(pid: int) -> tuple[int, float]:
    """How often a process's threads went to sleep, and their seconds on a processor."""
    tasks = list(Path(f"/proc/{pid}/task").iterdir())
    wakes = sum(int(re.search(r"^voluntary_ctxt_switches:\s+(\d+)", (task / "status").read_text(), re.M)[1]) for task in tasks)
    return wakes, sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
