"""The frontend's HTTP side on a real port, with a scripted coordinator behind the real `requests` socket."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import zmq
import zmq.asyncio

from tpserve import board
from tpserve.deployment import Deployment
from tpserve.frontend.chat import template
from tpserve.frontend.chat.message_format import MessageFormat
from tpserve.frontend.compiler.checker import GrammarChecker
from tpserve.frontend.engine import Engine
from tpserve.frontend.http.app import create_app
from tpserve.frontend.http.service import Service
from tpserve.frontend.http.threads import BodyThreads
from tpserve.frontend.metrics import Metrics
from tpserve.frontend.process import http_server
from tpserve.frontend.prompts import PromptMaker
from tpserve.messages import NO_SCORES, STEP_PARTS, Finish, Message, Scores, Submit, Tokens, decode, encode
from tpserve.tokenizer import Tokenizer

EPOCH = 4
LIMIT_S = 10.0
TEST_LIMIT_S = 30.0
T = TypeVar("T")


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test in a loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), TEST_LIMIT_S))

    return run


async def wait_for(condition: Callable[[], Any]) -> None:
    """Wait until the condition is true; fails after a limit."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.005)


class Coordinator:
    """Says what the test tells it to say, and keeps what it hears."""

    def __init__(self, socket_: zmq.asyncio.Socket):
        self._socket = socket_
        self._step = 0

    async def next(self, kind: type[T]) -> T:
        """The frontend's next message, which must be of this kind."""
        epoch, message = decode(await asyncio.wait_for(self._socket.recv(), LIMIT_S))
        assert epoch == EPOCH
        assert isinstance(message, kind), f"{message} came"
        return message

    async def is_told_nothing(self) -> bool:
        """Whether no message is there."""
        return not await self._socket.poll(0)

    async def say(self, message: Message, epoch: int = EPOCH) -> None:
        """Any message."""
        await self._socket.send(encode(message, epoch))

    async def tokens(
        self, *rows: tuple[int, int, int, Finish], cached: int = 0, epoch: int = EPOCH, scores: Scores = NO_SCORES
    ) -> None:
        """One step's ids, as (request, choice, id, finish)."""
        self._step += 1
        requests, choices, ids, finishes = zip(*rows) if rows else ((), (), (), ())
        await self.say(
            Tokens(
                step=self._step,
                requests=np.array(requests, "<u8"),
                choices=np.array(choices, "<u2"),
                ids=np.array(ids, "<i4"),
                finishes=np.array(finishes, "<u1"),
                cached=np.full(len(rows), cached, "<u4"),
                scores=scores,
                seconds=(np.arange(1, len(STEP_PARTS) + 1) / 1000).astype(np.float32),
                waits=np.array([0.25], "<f4"),
            ),
            epoch,
        )

    async def generate(self, submit: Submit, ids: list[int], finish: Finish = Finish.LENGTH, choice: int = 0) -> None:
        """The ids one step each, the last of them with `finish`, with what logprobs the submit asks for."""
        for place, id_ in enumerate(ids):
            row = (submit.request, choice, id_, finish if place == len(ids) - 1 else Finish.NONE)
            await self.tokens(row, scores=scores([id_], submit.logprobs))


def scores(ids: list[int], count: int) -> Scores:
    """For each id a logprob of its own, -id / 1000, and the same for the `count` lowest ids, which are the likeliest."""
    if count < 0:
        return NO_SCORES
    listed = [[id_, *range(count)] for id_ in ids]
    flat = np.array(listed, "<i4").reshape(-1)
    return Scores(np.full(len(ids), count + 1, "<u2"), flat, (flat / -1000).astype("<f4"))


class Rig:
    """What a test has in hand."""

    def __init__(self, service: Service, coordinator: Coordinator, tokenizer: Tokenizer, port: int, ranks: list[board.Writer]):
        self.service = service
        self.engine = service.engine
        self.coordinator = coordinator
        self.tokenizer = tokenizer
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.beats = ranks  # of the coordinator, then of each rank
        self.client = httpx.AsyncClient(base_url=self.url, trust_env=False, verify=False, timeout=LIMIT_S)

    def ids(self, text: str) -> list[int]:
        """The text's ids."""
        return self.tokenizer.encode(text, False)

    def post(self, path: str, **body: Any) -> asyncio.Task[httpx.Response]:
        """A request on its way."""
        return asyncio.create_task(self.client.post(path, json=body))

    def complete(self, **body: Any) -> asyncio.Task[httpx.Response]:
        """A completion on its way."""
        return self.post("/v1/completions", **{"prompt": "the fox", **body})

    def chat(self, **body: Any) -> asyncio.Task[httpx.Response]:
        """A chat completion on its way."""
        return self.post("/v1/chat/completions", **{"messages": [{"role": "user", "content": "hi"}], **body})

    async def answer(self, sent: asyncio.Task[httpx.Response], text: str, finish: Finish = Finish.LENGTH) -> httpx.Response:
        """Let the engine answer a request with this text."""
        await self.coordinator.generate(await self.coordinator.next(Submit), self.ids(text), finish)
        return await sent

    def metric(self, name: str, **labels: str) -> float:
        """A sample's value."""
        value = self.service.metrics.registry.get_sample_value(f"tpserve_{name}", {"model_name": "small", **labels})
        assert value is not None, f"no metric {name} {labels}"
        return value


@asynccontextmanager
async def rig(deployment: Deployment, connected: bool = True, send_buffer_bytes: int | None = None) -> AsyncIterator[Rig]:
    """A server on a free port. Fails when it leaves a request open that nobody waits for."""
    folder = Path(deployment.tokenizer_path)
    tokenizer, metrics = Tokenizer(folder), Metrics(deployment.served_names[0])
    chat_template, settings = template.load(folder), deployment.settings
    message_format = MessageFormat(chat_template, tokenizer, settings.tool_call_parser, settings.reasoning_parser)
    engine = Engine(deployment, tokenizer, metrics)
    prompts = PromptMaker(tokenizer, chat_template, deployment.spec.vocab_size, deployment.max_model_len)
    board_fd = board.create(deployment.settings.tp)
    shown = board.Board(board_fd)
    os.close(board_fd)
    listening = socket.create_server(("127.0.0.1", 0))
    if send_buffer_bytes is not None:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    with (
        closing(BodyThreads()) as threads,
        tempfile.TemporaryDirectory() as run_dir,
        zmq.asyncio.Context() as context,
        context.socket(zmq.PAIR) as requests,
    ):
        requests.setsockopt(zmq.LINGER, 0)
        requests.bind(f"ipc://{run_dir}/requests")
        grammars = GrammarChecker(deployment.tokenizer_path, deployment.spec.vocab_size, deployment.stop_ids)
        service = Service(deployment, shown, engine, metrics, prompts, message_format, grammars, threads)
        server = http_server(create_app(service))
        http = asyncio.create_task(server.serve(sockets=[listening]))
        made = Rig(service, Coordinator(requests), tokenizer, listening.getsockname()[1], [shown.writer(r) for r in range(3)])
        receiving = None
        if connected:
            engine.connect(context, EPOCH, f"ipc://{run_dir}/requests", pages=64)
            receiving = asyncio.create_task(engine.receive())
        try:
            yield made
            await asyncio.wait_for(engine.idle(), LIMIT_S)
        finally:
            await made.client.aclose()
            if receiving is not None:
                receiving.cancel()
            engine.close()
            await grammars.close()
            await wait_for(lambda: not server.server_state.connections)
            http.cancel()  # its own shutdown takes its time
            for accepting in server.servers:
                accepting.close()


def events(body: str) -> list[dict[str, Any]]:
    """The chunks of a stream that ended with [DONE]."""
    *chunks, done = body.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]
