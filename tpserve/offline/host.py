"""The engine behind an `LLM`: a launcher as a child, and a thread that takes the frontend's place.

The thread runs an event loop of its own, so the user's thread only waits: Ctrl-C cannot break anything, a loop that
the user runs (a notebook's) is left alone, and a death is noticed whether somebody waits for an answer or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import zmq

from launcher import offline
from launcher.children import cause_of_death
from tpserve.child import Control, Seat
from tpserve.deployment import Deployment
from tpserve.frontend.engine import Engine
from tpserve.frontend.errors import ApiError, EngineFault
from tpserve.frontend.link import Link, readable
from tpserve.frontend.metrics import Metrics
from tpserve.messages import Drained, Started
from tpserve.offline.job import Job
from tpserve.settings import UserError
from tpserve.tokenizer import Tokenizer

_END_S = 3.0  # for the launcher to end everything once it is told to
_LAST_WORD_S = 1.0  # for what a launcher that has ended said last
_JOIN_S = 10.0  # far more than the end takes
_CLOSED = "this LLM is closed"


class EngineDead(RuntimeError):
    """The engine is gone; the text says why. A new `LLM` can be made."""


class Host:
    """The engine as the user's threads see it; any number of them may use it at once."""

    def __init__(self, deployment: Deployment, tokenizer: Tokenizer):
        self._engine = Engine(deployment, tokenizer, Metrics(deployment.served_names[0]))
        self._deployment = deployment
        self._process = os.getpid()
        self._loop = asyncio.SelectorEventLoop()
        self._closing = asyncio.Event()
        self._up: Future[None] = Future()
        self._lock = threading.RLock()  # a finalizer may call `close` from anywhere
        self._is_over = False
        self._thread = threading.Thread(target=self._main, name="tpserve", daemon=True)

    def start(self) -> None:
        """Start the engine and wait until it takes requests. Raises UserError or EngineDead if it never does."""
        try:
            self._thread.start()
            self._up.result()
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def working_on(self, jobs: Sequence[Job]) -> Iterator[None]:
        """The engine works on the jobs; those that have not ended when this does are cut. Raises EngineDead."""
        try:
            self._call(self._submit, jobs)
            yield
        finally:
            with contextlib.suppress(EngineDead):
                self._call(self._finish, jobs)

    def close(self) -> None:
        """End the engine, and wait for that. Calls that wait for an answer get EngineDead."""
        if os.getpid() != self._process:  # a fork has the object, not the engine
            return
        with contextlib.suppress(EngineDead):
            self._call(lambda _: self._closing.set(), ())
        if self._thread.ident is None:  # it could not be started
            self._is_over = True
            self._loop.close()
        elif self._thread is not threading.current_thread():  # where a finalizer may run, too
            # Not for ever: a finalizer runs anywhere, also where the interrupted code holds what the thread waits for.
            self._thread.join(_JOIN_S)

    def _call(self, function: Callable[[Sequence[Job]], None], jobs: Sequence[Job]) -> None:
        """Have the thread do it."""
        if os.getpid() != self._process:
            raise RuntimeError(f"this LLM belongs to process {self._process}; a fork of it must make its own")
        with self._lock:
            if self._is_over:
                raise EngineDead(self._engine.refusal)
            self._loop.call_soon_threadsafe(function, jobs)

    # On the thread

    def _submit(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            try:
                self._engine.submit(job)
            except ApiError as error:
                job.fail(error)
            except Exception as error:  # nobody else would tell the one who waits for it
                job.fail(EngineFault(f"{type(error).__name__}: {error}"))

    def _finish(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._engine.finish(job)

    def _main(self) -> None:
        """Whatever ends it, nobody is left waiting."""
        try:
            end = self._loop.run_until_complete(self._live())
        except BaseException as error:
            end = _as_end(error)
        try:
            self._engine.fail_all(str(end))
        finally:
            if not self._up.done():
                self._up.set_exception(end)
            with self._lock:
                self._is_over = True
            self._loop.run_until_complete(asyncio.sleep(0))  # what was asked until now gets its refusal
            self._loop.close()

    async def _live(self) -> Exception:
        """From the start of the launcher to its end; returns why there is no engine any more."""
        with offline.started(self._deployment) as (process, run_dir), zmq.Context[zmq.Socket[bytes]]() as context:
            seat = Seat(role="frontend", epoch=1, run_dir=str(run_dir), deployment=self._deployment)
            life = Life(seat, context, self._engine, process)
            try:
                end = await life.run(self._up, self._closing)
            except Exception as error:
                end = _as_end(error)
            self._engine.fail_all(str(end))  # before the rest is taken down: who waits is told at once
            await life.close()
            return end


class Life(Link):
    """The link to one launcher."""

    def __init__(self, seat: Seat, context: zmq.Context[zmq.Socket[bytes]], engine: Engine, launcher: subprocess.Popen[bytes]):
        super().__init__(seat, Control(seat, context), context, engine)
        self._launcher = launcher
        self._reason = ""
        self._is_told = asyncio.Event()

    async def run(self, up: Future[None], closing: asyncio.Event) -> Exception:
        """Until the launcher ends, because it is told so when `closing` is set, or by itself; returns why."""
        self.start(self.obey())
        self.start(self._tell(up))
        await self.say(Started("frontend", 0, os.getpid()))
        gone = self.start(readable(os.pidfd_open(self._launcher.pid)))
        told = self.start(_wait(closing))
        await asyncio.wait([self.end, gone, told], return_when=asyncio.FIRST_COMPLETED)
        if self.end.done():
            await self.end  # raises
        if gone.done():
            return await self._cause()
        self._reason = _CLOSED
        self.engine.fail_all(_CLOSED)
        await self.say(Drained())
        await asyncio.wait([gone], timeout=_END_S)
        return EngineDead(_CLOSED)

    async def _tell(self, up: Future[None]) -> None:
        await self.up.wait()
        up.set_result(None)

    async def _cause(self) -> Exception:
        """Why the launcher has ended."""
        status = self._launcher.wait()
        if status < 0:
            return EngineDead(f"the launcher died: {cause_of_death(status)}")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_told.wait(), _LAST_WORD_S)
        reason = self._reason or f"the launcher died: {cause_of_death(status)}"
        return UserError(reason) if status == 2 else EngineDead(reason)

    async def drain(self) -> None:
        """Somebody told the launcher to stop: open requests may end."""
        self._reason = "the launcher was told to stop"
        self.engine.stop_taking(self._reason)
        await self.engine.idle()
        await self.say(Drained())

    async def stop(self, reason: str) -> None:
        """Cut what is open."""
        self._reason = reason or self._reason
        self.engine.fail_all(self._reason)
        self._is_told.set()

    async def close(self) -> None:
        """Let go of the sockets."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.engine.close()
        self._control.close(linger=0)


def _as_end(error: BaseException) -> Exception:
    """What a user gets when this has ended the engine."""
    if isinstance(error, OSError):  # no room, no descriptors, no processes left
        return UserError(f"cannot run a model on this machine: {error}")
    return EngineDead(f"{type(error).__name__}: {error}")


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
