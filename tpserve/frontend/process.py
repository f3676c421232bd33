"""The frontend as a process: its HTTP server, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn
import zmq
from starlette.types import ASGIApp

from tpserve.board import Board
from tpserve.child import Charge, Control
from tpserve.frontend.chat import template
from tpserve.frontend.chat.message_format import MessageFormat
from tpserve.frontend.compiler.checker import GrammarChecker
from tpserve.frontend.engine import Engine
from tpserve.frontend.http.app import create_app
from tpserve.frontend.http.protocol import MAX_HEADER_BYTES, Protocol
from tpserve.frontend.http.service import Service
from tpserve.frontend.http.threads import BodyThreads
from tpserve.frontend.link import Link, readable
from tpserve.frontend.metrics import Metrics
from tpserve.frontend.prompts import PromptMaker
from tpserve.listen import listen
from tpserve.messages import Drained
from tpserve.tokenizer import Tokenizer

logger = logging.getLogger("tpserve")

_STOPPING = "the server is shutting down"
_FAREWELL_S = 1.0  # for telling clients that their requests are cut
_KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that they and not we close them


def serve(charge: Charge, control: Control, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Serve until the launcher says stop, or is gone."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each open stream is a descriptor
    asyncio.run(_serve(charge, control, context))


async def _serve(charge: Charge, control: Control, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    await Frontend(charge, control, context).run()


class Frontend(Link):
    """One life of the frontend process."""

    def __init__(self, charge: Charge, control: Control, context: zmq.Context[zmq.Socket[bytes]]):
        deployment = charge.deployment
        assert charge.listen_fd is not None
        folder = Path(deployment.tokenizer_path)
        tokenizer, chat_template = Tokenizer(folder), template.load(folder, deployment.chat_template)
        if chat_template is None:
            logger.warning("the model has no chat template: chats are refused; give one with --chat-template FILE")
        metrics = Metrics(deployment.served_names[0])
        super().__init__(charge, control, context, Engine(deployment, tokenizer, metrics))
        self._charge = charge
        self._bound = socket.socket(fileno=charge.listen_fd)
        self._threads = BodyThreads()
        prompts = PromptMaker(tokenizer, chat_template, deployment.spec.vocab_size, deployment.max_model_len)
        settings = deployment.settings
        message_format = MessageFormat(chat_template, tokenizer, settings.tool_call_parser, settings.reasoning_parser)
        logger.info("tool calls: %s", message_format.described)
        self._grammars = GrammarChecker(deployment.tokenizer_path, deployment.spec.vocab_size, deployment.stop_ids)
        board = Board(charge.board_fd)
        service = Service(deployment, board, self.engine, metrics, prompts, message_format, self._grammars, self._threads)
        self._server = http_server(create_app(service))

    async def run(self) -> None:
        """Serve until the launcher says stop or is gone. Raises what ended any part of it."""
        listen(self._bound)  # not before: who connects gets an answer, and until then a refusal
        http = self.start(self._server.serve(sockets=[self._bound]))
        self.start(self.obey())
        self.start(self._outlive_launcher())
        try:
            await self.end
        except Exception:
            await self._cut("the server failed")
            raise
        finally:
            self._server.finish()
            await asyncio.wait([http])
            self.engine.close()
            await self._grammars.close()
            self._threads.close()

    async def drain(self) -> None:
        """End when the open requests have ended. A stop that comes meanwhile is quicker."""
        self.engine.stop_taking(_STOPPING)
        await self.engine.idle()
        await self._finish()

    async def stop(self, reason: str) -> None:
        """End now."""
        await self._cut(reason or _STOPPING)
        await self._finish()

    async def _outlive_launcher(self) -> None:
        """When the launcher is gone, nobody else can clean up."""
        with contextlib.suppress(ProcessLookupError):
            await readable(os.pidfd_open(self._charge.launcher_pid))
        logger.error("the launcher is gone: ending")
        await self._cut("the server was killed")
        shutil.rmtree(self._charge.run_dir, ignore_errors=True)
        self.end_now()

    async def _cut(self, reason: str) -> None:
        """End open requests with an error, and give their clients a moment to read it."""
        self.engine.fail_all(reason)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FAREWELL_S):
                await self.engine.idle()

    async def _finish(self) -> None:
        if not self.end.done():
            await self.say(Drained())
            self.end_now()


class Server(uvicorn.Server):
    """Uvicorn without its signal handlers (signals are the launcher's), and without its ten looks a second at its end."""

    def __init__(self, config: uvicorn.Config):
        super().__init__(config)
        self._finished = asyncio.Event()

    def finish(self) -> None:
        """Take no more connections, and end with the last request."""
        self.should_exit = True
        self._finished.set()

    async def main_loop(self) -> None:
        """Once a second, for the header with the date."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await self._finished.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def http_server(app: ASGIApp) -> Server:
    """A server for the app. uvicorn's log goes where ours goes; what it warns of, clients could fill the log with."""
    log = logging.getLogger("uvicorn")
    log.handlers, log.propagate = logger.handlers, False
    log.setLevel(logging.ERROR)
    return Server(
        uvicorn.Config(
            app,
            http=Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
    )
