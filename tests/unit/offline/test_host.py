"""The thread behind an `LLM`, with a process that sleeps as its launcher and the test as what the launcher starts.

Whatever happens, everybody who waits is told: each wait here has a limit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import zmq

from tests.unit.frontend import small
from tpserve.deployment import Deployment
from tpserve.frontend import schema
from tpserve.frontend.errors import ApiError
from tpserve.messages import Drained, Message, Ready, Started, Stop, Submit, Up, decode, encode
from tpserve.offline import host
from tpserve.offline.host import EngineDead, Host
from tpserve.offline.job import Job, Question
from tpserve.settings import UserError
from tpserve.tokenizer import Tokenizer

LIMIT_S = 20.0
THREADS = 2
PROMPTS = 3  # of each thread


class Launcher:
    """Speaks with the host as a launcher and as a coordinator do."""

    def __init__(self, parent: Path):
        self.run_dir = Path(tempfile.mkdtemp(dir=parent))
        self.itself = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.exit(int(input()))"], stdin=subprocess.PIPE, text=True
        )
        self.context = zmq.Context[zmq.Socket[bytes]]()
        self.control = self.context.socket(zmq.ROUTER)
        self.control.bind(f"ipc://{self.run_dir}/control")
        self.requests = self.context.socket(zmq.PAIR)
        self.requests.bind(f"ipc://{self.run_dir}/requests.1")

    @contextlib.contextmanager
    def started(self, _: Deployment) -> Iterator[tuple[subprocess.Popen[str], Path]]:
        """In place of `launcher.offline.started`."""
        try:
            yield self.itself, self.run_dir
        finally:
            self.close()

    def close(self) -> None:
        self.itself.kill()
        self.itself.communicate()

    def hears(self, kind: type[Message]) -> None:
        assert self.control.poll(LIMIT_S * 1000)
        _, data = self.control.recv_multipart()
        assert isinstance(decode(data)[1], kind)

    def says(self, message: Message) -> None:
        self.control.send_multipart([b"frontend", encode(message, 1)])

    def gets_submits(self) -> None:
        """All prompts of all threads are open in the engine."""
        for _ in range(THREADS * PROMPTS):
            assert self.requests.poll(LIMIT_S * 1000)
            assert isinstance(decode(self.requests.recv())[1], Submit)

    def exits(self, status: int) -> None:
        assert self.itself.stdin is not None
        self.itself.stdin.write(f"{status}\n")
        self.itself.stdin.flush()

    def is_killed(self) -> None:
        self.itself.kill()


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    return small.deployment(small.write(tmp_path_factory.mktemp("model")))


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    with tempfile.TemporaryDirectory() as parent:  # pytest's own folders are too long for sockets
        made = Launcher(Path(parent))
        monkeypatch.setattr(host, "_END_S", 0.1)  # the process that sleeps does not end when it is told to
        monkeypatch.setattr("launcher.offline.started", made.started)
        yield made
        made.close()
        made.context.destroy(linger=0)


@pytest.fixture
def starting(launcher: Launcher, deployment: Deployment) -> Iterator[tuple[Host, Future[None]]]:
    """A host, and its start on its way."""
    made = Host(deployment, Tokenizer(Path(deployment.tokenizer_path)))
    with ThreadPoolExecutor(1) as executor:
        start = executor.submit(made.start)
        launcher.hears(Started)
        yield made, start
        made.close()
    assert not made._thread.is_alive()


@pytest.fixture
def serving(launcher: Launcher, starting: tuple[Host, Future[None]]) -> Host:
    made, start = starting
    launcher.says(Up(64))
    launcher.hears(Ready)
    start.result(LIMIT_S)
    return made


def asks(serving: Host) -> list[ApiError | None]:
    """The errors that end some prompts."""
    ended: SimpleQueue[Job] = SimpleQueue()
    request = schema.completion_request({"prompt": "x", "max_tokens": 50}, 0, 300)
    question = Question(request, None, np.array([1, 2, 3], "<i4"))
    jobs = [Job(question, place, ended) for place in range(PROMPTS)]
    with serving.working_on(jobs):
        return [ended.get(timeout=LIMIT_S).error for _ in jobs]


def sends_nonsense(launcher: Launcher) -> None:
    launcher.requests.send(b"nonsense")


def sends_what_is_for_others(launcher: Launcher) -> None:
    launcher.requests.send(encode(Drained(), 1))


def says_nonsense(launcher: Launcher) -> None:
    launcher.control.send_multipart([b"frontend", b"nonsense"])


@pytest.mark.parametrize(
    ("what_happens", "cause"),
    [
        (Launcher.is_killed, "the launcher died: killed by signal 9 (SIGKILL)"),
        (lambda launcher: launcher.exits(0), "the launcher died: exit status 0"),
        (lambda launcher: launcher.says(Stop(False, "worker 0/2 died")), "worker 0/2 died"),
        (sends_nonsense, "MessageError: "),
        (sends_what_is_for_others, "MessageError: a Drained is not for the frontend"),
        (says_nonsense, "MessageError: "),
    ],
)
def test_end_of_the_engine_is_told_to_all_who_wait_and_to_later_calls(
    launcher: Launcher, serving: Host, what_happens: Callable[[Launcher], None], cause: str
) -> None:
    with ThreadPoolExecutor(THREADS) as executor:
        asked = [executor.submit(asks, serving) for _ in range(THREADS)]
        launcher.gets_submits()
        what_happens(launcher)
        errors = [error for call in asked for error in call.result(LIMIT_S)]
    assert len(errors) == THREADS * PROMPTS
    assert all(str(error).startswith(cause) for error in errors)
    try:
        (later, *_) = asks(serving)
    except EngineDead as error:  # the thread has ended
        later = error  # type: ignore[assignment]
    assert str(later).startswith(cause)


def test_close_ends_the_calls_of_other_threads(launcher: Launcher, serving: Host) -> None:
    with ThreadPoolExecutor(THREADS) as executor:
        asked = [executor.submit(asks, serving) for _ in range(THREADS)]
        launcher.gets_submits()
        serving.close()
        assert {str(error) for call in asked for error in call.result(LIMIT_S)} == {"this LLM is closed"}
    with pytest.raises(EngineDead, match="this LLM is closed"):
        asks(serving)


def test_close_with_a_launcher_that_is_stopped_kills_it(launcher: Launcher, serving: Host) -> None:
    os.kill(launcher.itself.pid, signal.SIGSTOP)
    serving.close()
    assert launcher.itself.returncode == -signal.SIGKILL


def test_close_during_the_start_ends_the_start(starting: tuple[Host, Future[None]]) -> None:
    made, start = starting
    made.close()
    with pytest.raises(EngineDead, match="this LLM is closed"):
        start.result(LIMIT_S)


@pytest.mark.parametrize(
    ("status", "word", "error", "message"),
    [
        (0, "", EngineDead, "the launcher died: exit status 0"),
        (1, "", EngineDead, "the launcher died: exit status 1"),
        (2, "", UserError, "the launcher died: exit status 2"),
        (1, "worker 0/2 could not start", EngineDead, "worker 0/2 could not start"),
        (2, "no room", UserError, "no room"),
    ],
)
def test_launcher_that_exits_during_the_start_is_the_exception(
    launcher: Launcher,
    starting: tuple[Host, Future[None]],
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    word: str,
    error: type[Exception],
    message: str,
) -> None:
    _, start = starting
    if word:
        launcher.says(Stop(False, word))
    else:
        monkeypatch.setattr(host, "_LAST_WORD_S", 0.1)
    launcher.exits(status)
    with pytest.raises(error, match=message):
        start.result(LIMIT_S)


@pytest.mark.parametrize(
    ("error", "raised"), [(OSError("no room"), UserError), (RuntimeError("odd"), EngineDead), (SystemExit(3), EngineDead)]
)
def test_launcher_that_cannot_be_started_is_the_exception(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, error: BaseException, raised: type[Exception]
) -> None:
    @contextlib.contextmanager
    def started(_: Deployment) -> Iterator[Any]:
        raise error
        yield

    monkeypatch.setattr("launcher.offline.started", started)
    made = Host(deployment, Tokenizer(Path(deployment.tokenizer_path)))
    with pytest.raises(raised, match=str(error)):
        made.start()
    with pytest.raises(EngineDead, match=str(error)):
        asks(made)
    made.close()


def test_thread_that_cannot_be_started_is_the_exception(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    made = Host(deployment, Tokenizer(Path(deployment.tokenizer_path)))
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        made.start()
    made.close()  # as the finalizer does later
    with pytest.raises(EngineDead):
        asks(made)


def test_prompt_that_cannot_be_submitted_ends_with_the_cause(serving: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(_: Job) -> None:
        raise KeyError("odd")

    monkeypatch.setattr(serving._engine, "submit", submit)
    assert [str(error) for error in asks(serving)] == ["KeyError: 'odd'"] * PROMPTS


def test_finalizer_on_the_hosts_own_thread_ends_it(serving: Host) -> None:
    serving._loop.call_soon_threadsafe(serving.close)
    serving._thread.join(LIMIT_S)
    assert not serving._thread.is_alive()


def test_finalizer_where_the_thread_waits_for_its_caller_gives_up(serving: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when garbage is collected while the log is locked, and the thread has something to log."""
    monkeypatch.setattr(host, "_JOIN_S", 0.1)
    held, entered = threading.Lock(), threading.Event()

    def log() -> None:
        entered.set()
        with held:
            pass

    with held:
        serving._loop.call_soon_threadsafe(log)
        assert entered.wait(LIMIT_S)
        serving.close()
    serving._thread.join(LIMIT_S)
    assert not serving._thread.is_alive()
