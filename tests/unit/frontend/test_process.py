"""The process itself: its start, the launcher's word, and its end with and without the launcher."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import zmq

from tpserve import board
from tpserve.child import Charge
from tpserve.deployment import Deployment
from tpserve.messages import (
    NO_SCORES,
    STEP_PARTS,
    Drained,
    Failure,
    Finish,
    Message,
    Ready,
    Started,
    Stop,
    Submit,
    Tokens,
    Up,
    decode,
    encode,
)

EPOCH = 2
LIMIT_S = 20.0


def wait_for(condition: Callable[[], Any]) -> Any:
    """The condition's first true value; fails after a limit."""
    deadline = time.monotonic() + LIMIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return value


class Launcher:
    """Starts a frontend as the launcher does and speaks with it; a process that sleeps stands for the launcher's own."""

    def __init__(self, deployment: Deployment, parent: Path):
        self.run_dir = Path(tempfile.mkdtemp(dir=parent))
        self.itself = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self.context = zmq.Context[zmq.Socket[bytes]]()
        self.control = self._bound(zmq.ROUTER, "control")
        self.requests = self._bound(zmq.PAIR, f"requests.{EPOCH}")
        board_fd = board.create(2)
        shown = board.Board(board_fd)
        self.beats = [shown.writer(record) for record in range(3)]
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        charge = Charge(
            role="frontend", epoch=EPOCH, run_dir=str(self.run_dir), launcher_pid=self.itself.pid, board_fd=board_fd,
            listen_fd=listening.fileno(), deployment=deployment,
        )  # fmt: skip
        with tempfile.TemporaryFile() as document:
            document.write(charge.model_dump_json().encode())
            document.seek(0)
            command = [sys.executable, "-m", "tpserve.frontend", str(document.fileno())]
            inherited = (document.fileno(), board_fd, listening.fileno())
            self.frontend = subprocess.Popen(command, pass_fds=inherited, stderr=subprocess.PIPE, text=True)
        listening.close()
        os.close(board_fd)
        self.client = httpx.Client(base_url=self.url, trust_env=False, verify=False, timeout=LIMIT_S)

    def _bound(self, kind: int, name: str) -> zmq.Socket[bytes]:
        bound = self.context.socket(kind)
        bound.bind(f"ipc://{self.run_dir}/{name}")
        return bound

    def hears(self, kind: type[Message]) -> Any:
        """The frontend's next word, which must be of this kind."""
        assert self.control.poll(LIMIT_S * 1000), self.frontend.stderr
        sender, data = self.control.recv_multipart()
        epoch, message = decode(data)
        assert (sender, epoch) == (b"frontend", EPOCH)
        assert isinstance(message, kind), message
        return message

    def says(self, message: Message) -> None:
        self.control.send_multipart([b"frontend", encode(message, EPOCH)])

    def brings_up(self) -> None:
        assert self.hears(Started).pid == self.frontend.pid
        self.says(Up(64))
        self.hears(Ready)

    def gets_submit(self) -> Submit:
        assert self.requests.poll(LIMIT_S * 1000)
        _, message = decode(self.requests.recv())
        assert isinstance(message, Submit)
        return message

    def sends_token(self, submit: Submit, finish: Finish) -> None:
        values = (submit.request, "<u8"), (0, "<u2"), (70, "<i4"), (finish, "<u1"), (0, "<u4")
        row = [np.array([value], dtype) for value, dtype in values]
        self.requests.send(encode(Tokens(1, *row, NO_SCORES, np.zeros(len(STEP_PARTS), "<f4"), np.zeros(0, "<f4")), EPOCH))

    def streams(self) -> tuple[threading.Thread, list[str]]:
        """A stream that a thread reads to its end."""
        lines: list[str] = []

        def read() -> None:
            with self.client.stream("POST", "/v1/completions", json={"prompt": "the fox", "stream": True}) as response:
                lines.extend(line for line in response.iter_lines() if line)

        thread = threading.Thread(target=read)
        thread.start()
        return thread, lines

    def status(self, path: str) -> int:
        with httpx.Client(base_url=self.url, trust_env=False, verify=False) as client:
            return client.get(path).status_code

    def close(self) -> None:
        for process in (self.frontend, self.itself):
            process.kill()
            process.communicate()
        self.client.close()
        self.context.destroy(linger=0)


@pytest.fixture
def launcher(deployment: Deployment) -> Iterator[Launcher]:
    with tempfile.TemporaryDirectory() as parent:  # pytest's own folders are too long for sockets
        made = Launcher(deployment, Path(parent))
        yield made
        made.close()


def ends(launcher: Launcher) -> int:
    return launcher.frontend.wait(LIMIT_S)


def test_server_is_ready_once_an_epoch_is_up_until_it_drains(launcher: Launcher) -> None:
    launcher.hears(Started)
    wait_for(lambda: launcher.status("/health/live") == 200)
    assert launcher.status("/health/ready") == 503
    launcher.says(Up(64))
    launcher.hears(Ready)
    for beats in launcher.beats:
        beats.beat()
    assert launcher.status("/health/ready") == 200
    thread, lines = launcher.streams()
    submit = launcher.gets_submit()
    launcher.says(Stop(True, ""))
    wait_for(lambda: launcher.status("/health/ready") == 503)
    assert launcher.status("/health/live") == 200
    assert not launcher.control.poll(0)
    launcher.sends_token(submit, Finish.LENGTH)
    launcher.hears(Drained)
    thread.join(LIMIT_S)
    assert lines[-1] == "data: [DONE]"
    assert ends(launcher) == 0


def test_stop_while_draining_cuts_streams_with_the_reason(launcher: Launcher) -> None:
    launcher.brings_up()
    thread, lines = launcher.streams()
    launcher.sends_token(launcher.gets_submit(), Finish.NONE)
    launcher.says(Stop(True, ""))
    wait_for(lambda: launcher.status("/health/ready") == 503)
    launcher.says(Stop(False, "told to stop"))
    launcher.hears(Drained)
    thread.join(LIMIT_S)
    assert [json.loads(line[6:]).get("error", {}).get("message") for line in lines] == [None, "told to stop"]
    assert ends(launcher) == 0


def test_death_of_the_launcher_ends_streams_and_removes_the_run_directory(launcher: Launcher) -> None:
    launcher.brings_up()
    thread, lines = launcher.streams()
    launcher.sends_token(launcher.gets_submit(), Finish.NONE)
    wait_for(lambda: lines or launcher.status("/health/live") != 200)
    launcher.itself.kill()
    launcher.itself.wait()
    thread.join(LIMIT_S)
    assert '"error"' in lines[-1]
    assert ends(launcher) == 0
    assert not launcher.run_dir.exists()


def test_message_that_is_not_valid_ends_streams_and_is_reported(launcher: Launcher) -> None:
    launcher.brings_up()
    thread, lines = launcher.streams()
    launcher.sends_token(launcher.gets_submit(), Finish.NONE)
    wait_for(lambda: lines)
    launcher.requests.send(b"nonsense")
    assert "MessageError" in launcher.hears(Failure).text
    thread.join(LIMIT_S)
    assert '"error"' in lines[-1]
    assert ends(launcher) == 1
