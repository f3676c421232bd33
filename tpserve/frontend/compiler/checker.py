"""The frontend's side of the child that compiles."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from collections.abc import Sequence

from tpserve.frontend.compiler.frames import LENGTH, frame
from tpserve.frontend.errors import EngineFault, InvalidRequest, Unavailable
from tpserve.interpreter import command, environment, signals_wait

logger = logging.getLogger("tpserve")

_START_S = 60.0  # imports and the tokenizer, on a machine that is loading a model
_MOST_S = 20.0  # for a grammar, which the child gives much less of processor time
_MOST_OPEN = 16  # grammars that wait, the one that is compiled among them
_MOST_KNOWN = 256


class GrammarChecker:
    """Compiles grammars one by one, in a child that is started for the first of them; remembers what it found."""

    def __init__(self, tokenizer_path: str, vocab_size: int, stop_ids: Sequence[int]):
        self._arguments = (tokenizer_path, str(vocab_size), *map(str, stop_ids))
        self._child: Process | None = None
        self._turn = asyncio.Lock()
        self._open: dict[bytes, asyncio.Task[str]] = {}  # by digest, as the next: a grammar may be long
        self._known: OrderedDict[bytes, str] = OrderedDict()  # what is wrong with each, if anything

    async def check(self, grammar: str, field: str) -> None:
        """Raises InvalidRequest if the grammar cannot be used, Unavailable if too many wait or the machine is too busy.

        `field` is where the client has it.
        """
        digest = hashlib.sha256(grammar.encode()).digest()
        fault = self._known.pop(digest, None)
        if fault is None:
            fault = await self._asked(grammar, digest)
        self._remember(digest, fault)
        if fault:
            raise InvalidRequest(f"{field}: {fault}", field)

    async def close(self) -> None:
        """End the child."""
        for task in self._open.values():
            task.cancel()
        await self._kill()

    async def _asked(self, grammar: str, digest: bytes) -> str:
        """One compilation for all who ask for the same; it goes on when they leave."""
        task = self._open.get(digest)
        if task is None:
            if len(self._open) >= _MOST_OPEN:
                raise Unavailable(f"{_MOST_OPEN} grammars wait to be compiled, which is the most")
            task = self._open[digest] = asyncio.create_task(self._compile(grammar))
            task.add_done_callback(lambda done: self._closed(digest, done))
        return await asyncio.shield(task)

    def _closed(self, digest: bytes, task: asyncio.Task[str]) -> None:
        del self._open[digest]
        if not task.cancelled() and not task.exception():  # which is for those who still wait, if any
            self._remember(digest, task.result())

    def _remember(self, digest: bytes, fault: str) -> None:
        self._known[digest] = fault
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)

    async def _compile(self, grammar: str) -> str:
        async with self._turn:
            try:
                child = await self._running()
                assert child.stdin is not None
                child.stdin.write(frame(grammar))
                return await _next(child, _MOST_S)
            except TimeoutError:
                await self._kill()
                raise Unavailable("the machine is too busy to compile the grammar") from None
            except (EOFError, ConnectionError):  # which nothing in a grammar can bring about
                logger.error("the child that compiles grammars has ended")
                await self._gone()
                raise EngineFault("the grammar could not be compiled, through no fault of its own") from None

    async def _running(self) -> Process:
        """The child, when it is ready."""
        if self._child is None or self._child.returncode is not None:
            asked = command("tpserve.frontend.compiler", str(os.getpid()), *self._arguments)
            with signals_wait():
                self._child = await asyncio.create_subprocess_exec(*asked, stdin=PIPE, stdout=PIPE, env=environment())
            await _next(self._child, _START_S)
        return self._child

    async def _kill(self) -> None:
        if self._child is not None and self._child.returncode is None:
            self._child.kill()
        await self._gone()

    async def _gone(self) -> None:
        """Wait until the child has ended."""
        if self._child is not None:
            await self._child.wait()


async def _next(child: Process, limit_s: float) -> str:
    """The child's next text. Raises EOFError, TimeoutError."""
    assert child.stdout is not None
    async with asyncio.timeout(limit_s):
        (length,) = LENGTH.unpack(await child.stdout.readexactly(LENGTH.size))
        return (await child.stdout.readexactly(length)).decode()
