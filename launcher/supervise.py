"""The launcher: starts the processes of a server, watches them, and ends them all."""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import setproctitle
import zmq

from launcher import children, rundir, signals
from launcher.children import Child, Parent
from launcher.progress import LoadProgress
from launcher.timeline import Timeline
from tpserve import board
from tpserve.child import Charge
from tpserve.codec import MessageError
from tpserve.deployment import Deployment
from tpserve.memory import host_memory
from tpserve.messages import (
    Drained,
    Failure,
    Loaded,
    Loading,
    Message,
    Ready,
    Serve,
    Started,
    Stop,
    Up,
    decode,
    encode,
)
from tpserve.parallel import segment

logger = logging.getLogger("tpserve")

_FRONTEND_PATIENCE_S = 3.0  # for telling its clients that it ends


class State(enum.Enum):
    """What the server is doing."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    ENDING = "ending"


def supervise(deployment: Deployment, bound: socket.socket, timeline: Timeline) -> int:
    """Run a server until it ends; returns the exit status. `bound`, the socket to listen on, is taken over."""
    with begun(rundir.create) as run:
        return Server(deployment, timeline, run, bound).run()


@dataclass(frozen=True)
class Run:
    """What the launcher holds from its beginning to its end."""

    dir: rundir.RunDir
    control: zmq.Socket[bytes]
    signals: socket.socket  # a byte for each signal


@contextlib.contextmanager
def begun(make_dir: Callable[[], rundir.RunDir]) -> Iterator[Run]:
    """This process as a launcher."""
    setproctitle.setproctitle("tpserve: launcher")
    with (
        signals.caught() as caught,  # before there is anything that a signal could leave behind
        make_dir() as run_dir,
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as control,
    ):
        control.setsockopt(zmq.LINGER, 500)
        control.bind(f"ipc://{run_dir.path}/control")
        yield Run(run_dir, control, caught)


class Supervisor:
    """The processes of one run, and its state. Everything happens in `run`'s loop, on one thread.

    Who the frontend is, and so how it begins and ends, is the subclasses' to say.
    """

    epoch = 1
    # What the frontend tells of a fault, and of a signal.
    fault_reason = "{}"
    stop_reason = "the launcher was told to stop"

    def __init__(self, deployment: Deployment, timeline: Timeline, run: Run):
        self.deployment = deployment
        self.timeline = timeline
        self.run_dir = run.dir
        self.control = run.control
        self.signals = run.signals
        self.board_fd = board.create(deployment.settings.tp)
        self.board = board.Board(self.board_fd)
        self.children: dict[str, Child | Parent] = {}
        self.state = State.STARTING
        self.deadline = float("inf")  # of draining, or of the frontend's farewell
        self.status = 0
        self.progress = LoadProgress(deployment.settings.tp)
        self.pages: list[int] = []
        self.heard: set[tuple[type, str]] = set()
        self.phases = self._phases()

    def run(self) -> int:
        """Start the children and serve until a signal or a fault ends it all."""
        try:
            self._spawn_all()
            self._loop()
        finally:
            self.progress.close()
            for child in self.children.values():
                child.kill()
        return self.status

    # The start: phases, each over when certain children have said a certain thing.

    def _phases(self) -> list[tuple[str, type, set[str], Callable[[], None]]]:
        workers = {f"worker {rank}/{self.deployment.settings.tp}" for rank in range(self.deployment.settings.tp)}
        engine = {"coordinator", *workers}
        return [
            ("processes", Started, {"frontend", *engine}, lambda: None),
            ("imports", Loading, workers, lambda: None),
            ("weights", Loaded, workers, self._allocate),
            ("pools", Ready, engine, lambda: self.send("frontend", Up(min(self.pages)))),
            ("frontend", Ready, {"frontend"}, self._announce),
        ]

    def _advance(self) -> None:
        """End every phase that is over, in order."""
        while self.phases and all((self.phases[0][1], title) in self.heard for title in self.phases[0][2]):
            name, _, _, then = self.phases.pop(0)
            self.timeline.end(name)
            then()

    def _allocate(self) -> None:
        self.progress.close()
        pages, page_size = min(self.pages), self.deployment.page_size
        if pages * page_size < self.deployment.max_model_len:
            self._fault(
                f"--max-model-len {self.deployment.max_model_len} does not fit: the KV pool holds {pages * page_size} tokens;"
                f" give --max-model-len {pages * page_size} or less, or more --gpu-memory-utilization"
            )
            return
        for title in self.children:
            if title != "frontend":
                self.send(title, Serve(pages))

    def _announce(self) -> None:
        self.state = State.SERVING
        logger.info("%s", self.timeline)
        logger.info("%s", _capacity(self.deployment, min(self.pages)))
        self.announce()

    def _spawn_all(self) -> None:
        self.timeline.end("checks")
        self.start_frontend()
        self.spawn("coordinator")
        on_one_cpu_host = self.deployment.device == "cpu" and self.deployment.settings.tp > 1
        shm_fd = segment.create(self.deployment.settings.tp) if on_one_cpu_host else None
        for rank in range(self.deployment.settings.tp):
            self.spawn("worker", rank=rank, shm_fd=shm_fd)
        if shm_fd is not None:
            os.close(shm_fd)

    def spawn(self, role: str, inherited: tuple[int, ...] = (), **details: int | None) -> None:
        """Start a child that is told these details, and inherits these descriptors beside those that they name."""
        charge = Charge.model_validate(
            dict(
                role=role,
                epoch=self.epoch,
                run_dir=str(self.run_dir.path),
                launcher_pid=os.getpid(),
                board_fd=self.board_fd,
                deployment=self.deployment,
                **details,
            )
        )
        self.children[charge.title] = children.spawn(charge, inherited)

    # The loop

    def _loop(self) -> None:
        poller = zmq.Poller()
        for source in (self.control, self.signals.fileno(), *(child.pidfd for child in self.children.values())):
            poller.register(source, zmq.POLLIN)
        by_fd = {child.pidfd: child for child in self.children.values()}
        while self.children:
            events = dict(poller.poll(int(1000 * max(0.0, min(self.deadline - time.monotonic(), 1.0))) + 1))
            self._receive_all()  # before deaths: a child's last words say why
            if self.signals.fileno() in events:
                for number in self.signals.recv(64):
                    self._on_signal(number)
            for fd in events.keys() & by_fd.keys():
                poller.unregister(fd)
                self._on_death(by_fd.pop(fd))
            if time.monotonic() >= self.deadline:
                self._on_deadline()

    def _receive_all(self) -> None:
        while self.control.poll(0):
            sender, data = self.control.recv_multipart()
            try:
                epoch, message = decode(data)
            except MessageError as error:
                self._fault(f"{sender.decode(errors='replace')} sent an invalid message: {error}")
                continue
            if epoch == self.epoch:
                self._on_message(sender.decode(), message)

    def _on_message(self, sender: str, message: Message) -> None:
        match message:
            case Failure():
                # Whoever misses a killed process says so as well; that it was killed is the cause.
                ours = (child for child in self.children.values() if isinstance(child, Child))
                killed = next((child for child in ours if child.was_killed()), None)
                self._fault(self._death_line(killed) if killed else _failure_line(sender, message, self.state), message)
            case Loading():
                self.progress.update(message.rank, message.done_bytes, message.total_bytes)
            case Loaded():
                self.pages.append(message.pages)
            case Drained():
                self._end()
        self.heard.add((type(message), sender))
        if self.state is State.STARTING:
            self._advance()

    def _on_signal(self, number: int) -> None:
        self.status = self.status or (130 if number == signal.SIGINT else 0)
        name = signal.Signals(number).name
        if self.state is State.SERVING:
            logger.info("%s: open requests get %g s to end; a second signal stops at once", name, self.drain_timeout_s)
            self.state, self.deadline = State.DRAINING, time.monotonic() + self.drain_timeout_s
            self.send("frontend", Stop(True, ""))
        elif self.state is not State.ENDING:
            logger.info("%s: stopping now", name)
            self._end(self.stop_reason)

    def _on_deadline(self) -> None:
        if self.state is State.DRAINING:
            logger.warning("requests still open after %g s are cut", self.drain_timeout_s)
            self._end(self.stop_reason)
        else:
            for child in self.children.values():
                child.kill()
            self.deadline = float("inf")

    def _on_death(self, child: Child | Parent) -> None:
        self.children.pop(child.title, None)
        child.reap()
        if self.state is State.ENDING:
            return
        if self.ends_well(child):
            self._end()
        else:
            assert isinstance(child, Child)
            self._fault(self._death_line(child))

    def _death_line(self, child: Child) -> str:
        step = f" at step {self.board.read(child.charge.rank + 1).last_step}" if child.charge.role == "worker" else ""
        return f"{child.title} died{step}: {child.cause_of_death()}"

    # The end

    @property
    def drain_timeout_s(self) -> float:
        """Seconds that open requests get after the first signal."""
        return self.deployment.settings.drain_timeout

    def _fault(self, line: str, failure: Failure | None = None) -> None:
        """Say once what went wrong, and end everything: exit status 2 for a user's mistake, else 1."""
        if self.state is State.ENDING:
            return
        logger.error("%s", line)
        users_mistake = failure is not None and not failure.detail and self.state is State.STARTING
        if failure is not None and failure.detail and self.deployment.settings.debug:
            logger.error("%s", failure.detail)
        self.status = 2 if users_mistake else 1
        self._end(self.fault_reason.format(line))

    def _end(self, reason: str = "") -> None:
        """Stop computing now. `reason` is for those whose requests are cut."""
        self.dismiss_frontend(reason)
        self.state = State.ENDING
        for child in self.children.values():
            if child.title != "frontend":
                child.kill()

    def send(self, title: str, message: Message) -> None:
        """Tell a process of this run; one that is not connected misses it."""
        self.control.send_multipart([title.encode(), encode(message, self.epoch)])

    # Who the frontend is

    def start_frontend(self) -> None:
        """Enter it into `children`."""
        raise NotImplementedError

    def announce(self) -> None:
        """Everything is up."""

    def ends_well(self, child: Child | Parent) -> bool:
        """Whether the child's death is no fault, but the end."""
        raise NotImplementedError

    def dismiss_frontend(self, reason: str) -> None:
        """Have it end, while `state` still says what was before."""
        raise NotImplementedError


class Server(Supervisor):
    """A run with a frontend process that speaks HTTP."""

    fault_reason = "the server failed: {}"
    stop_reason = "the server is shutting down"

    def __init__(self, deployment: Deployment, timeline: Timeline, run: Run, bound: socket.socket):
        super().__init__(deployment, timeline, run)
        self.bound = bound
        self.port: int = bound.getsockname()[1]

    def start_frontend(self) -> None:
        """Spawn it with the bound socket."""
        self.spawn("frontend", (self.run_dir.lock_fd,), listen_fd=self.bound.fileno())
        self.bound.close()  # only the frontend answers: a connection must not hang when it is gone

    def announce(self) -> None:
        """Print the ready line."""
        host = self.deployment.settings.host
        print(f"ready http://{f'[{host}]' if ':' in host else host}:{self.port}", flush=True)

    def ends_well(self, child: Child | Parent) -> bool:
        """Whether it is the frontend, which has drained."""
        drained = self.state is State.DRAINING and isinstance(child, Child) and child.process.returncode == 0
        return drained and child.title == "frontend"

    def dismiss_frontend(self, reason: str) -> None:
        """If it serves, it gets a moment to tell its clients."""
        if self.state is not State.STARTING:
            self.deadline = time.monotonic() + _FRONTEND_PATIENCE_S
            self.send("frontend", Stop(False, reason))
        elif "frontend" in self.children:
            self.children["frontend"].kill()


def _failure_line(sender: str, failure: Failure, state: State) -> str:
    when = f"failed at step {failure.step}" if failure.step else "could not start" if state is State.STARTING else "failed"
    return f"{sender} {when}: {failure.text}"


def _capacity(deployment: Deployment, pages: int) -> str:
    tokens, length = pages * deployment.page_size, deployment.max_model_len
    workers = "worker" if deployment.settings.tp == 1 else "workers"
    return (
        f"serving {deployment.served_names[0]} in {deployment.dtype} on {deployment.device}, {deployment.settings.tp}"
        f" {workers}: up to {length} tokens a request, KV cache of {tokens} tokens{_memory(deployment)}"
    )


def _memory(deployment: Deployment) -> str:
    if not deployment.memory:
        return ""
    held = host_memory(deployment.memory)
    parts = {"weights": held.weights, "KV pages": held.pool, "buffers": held.buffers}
    return "; memory: " + ", ".join(f"{name} {size / 1024**2:.0f} MiB" for name, size in parts.items())
