"""The frontend as a process: its sockets, the launcher's word, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import shutil
import socket
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import uvicorn
import zmq.asyncio
from fastapi import FastAPI

from tpserve.board import Board
from tpserve.child import Charge, Control
from tpserve.codec import MessageError
from tpserve.frontend import template
from tpserve.frontend.app import Service, create_app
from tpserve.frontend.engine import Engine
from tpserve.frontend.metrics import Metrics
from tpserve.frontend.prompts import PromptMaker
from tpserve.frontend.tokenizer import Tokenizer
from tpserve.messages import Drained, Message, Ready, Stop, Up, decode, encode

logger = logging.getLogger("tpserve")

_STOPPING = "the server is shutting down"
_FAREWELL_S = 1.0  # for telling clients that their requests are cut
_PROMPT_THREADS = 2
_KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that they and not we close them
_MAX_HEADER_BYTES = 64 * 1024


def serve(charge: Charge, control: Control, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Serve until the launcher says stop, or is gone."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each open stream is a descriptor
    asyncio.run(Frontend(charge, control, context).run())


class Frontend:
    """One life of the frontend process."""

    def __init__(self, charge: Charge, control: Control, context: zmq.Context[zmq.Socket[bytes]]):
        deployment = charge.deployment
        assert charge.listen_fd is not None
        folder = Path(deployment.tokenizer_path)
        tokenizer, chat_template = Tokenizer(folder), template.load(folder)
        if chat_template is None:
            logger.warning("the model has no chat template: /v1/chat/completions will refuse requests")
        self._charge = charge
        self._listening = socket.socket(fileno=charge.listen_fd)
        self._context = zmq.asyncio.Context.shadow(context.underlying)
        self._control = zmq.asyncio.Socket.from_socket(control.socket)
        self._executor = ThreadPoolExecutor(_PROMPT_THREADS, "prompts")
        metrics = Metrics(deployment.served_names[0])
        self._engine = Engine(deployment, tokenizer, metrics)
        prompts = PromptMaker(tokenizer, chat_template, deployment.spec.vocab_size, deployment.max_model_len)
        service = Service(deployment, Board(charge.board_fd), self._engine, metrics, prompts, self._executor)
        self._server = http_server(create_app(service))
        self._tasks: set[asyncio.Task[None]] = set()
        self._end: asyncio.Future[None]

    async def run(self) -> None:
        """Serve until the launcher says stop or is gone. Raises what ended any part of it."""
        self._end = asyncio.get_running_loop().create_future()
        http = self._start(self._server.serve(sockets=[self._listening]))
        self._start(self._obey())
        self._start(self._outlive_launcher())
        try:
            await self._end
        except Exception:
            await self._cut("the server failed")
            raise
        finally:
            self._server.should_exit = True
            await asyncio.wait([http])
            self._engine.close()
            self._executor.shutdown(wait=False, cancel_futures=True)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a part of the process; its failure ends the process."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._end.done():
            self._end.set_exception(error)

    # The launcher's word

    async def _obey(self) -> None:
        while True:
            epoch, message = decode(await self._control.recv())
            match message:
                case Up():
                    address = self._charge.model_copy(update={"epoch": epoch}).address("requests")
                    self._engine.connect(self._context, epoch, address, message.pages)
                    self._start(self._engine.receive())
                    await self._say(Ready("frontend", 0))
                case Stop(drain=True):
                    self._start(self._drain())
                case Stop():
                    self._start(self._stop(message.reason))
                case _:
                    raise MessageError(f"a {type(message).__name__} is not for the frontend")

    async def _say(self, message: Message) -> None:
        await self._control.send(encode(message, self._charge.epoch))

    async def _drain(self) -> None:
        """End when the open requests have ended. A stop that comes meanwhile is quicker."""
        self._engine.stop_taking(_STOPPING)
        await self._engine.idle()
        await self._finish()

    async def _stop(self, reason: str) -> None:
        await self._cut(reason or _STOPPING)
        await self._finish()

    async def _outlive_launcher(self) -> None:
        """When the launcher is gone, nobody else can clean up."""
        await _death(self._charge.launcher_pid)
        logger.error("the launcher is gone: ending")
        await self._cut("the server was killed")
        shutil.rmtree(self._charge.run_dir, ignore_errors=True)
        self._end_now()

    async def _cut(self, reason: str) -> None:
        """End open requests with an error, and give their clients a moment to read it."""
        self._engine.fail_all(reason)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FAREWELL_S):
                await self._engine.idle()

    async def _finish(self) -> None:
        if not self._end.done():
            await self._say(Drained())
            self._end_now()

    def _end_now(self) -> None:
        if not self._end.done():
            self._end.set_result(None)


async def _death(pid: int) -> None:
    """Wait until a process has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    dead = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(pidfd, dead.set)
    try:
        await dead.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers: signals are the launcher's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def http_server(app: FastAPI) -> uvicorn.Server:
    """A server for the app. h11, for it bounds the size of headers; uvicorn's log goes where ours goes."""
    log = logging.getLogger("uvicorn")
    log.handlers, log.propagate = logger.handlers, False
    log.setLevel(logging.WARNING)
    return _Server(
        uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
    )
