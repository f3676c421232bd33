"""A frontend's link to the launcher, and through it to the engine. The HTTP process holds one, and so does an `LLM`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from typing import Any

import zmq
import zmq.asyncio

from tpserve.child import Control, Seat
from tpserve.codec import MessageError
from tpserve.frontend.engine import Engine
from tpserve.messages import Message, Ready, Stop, Up, decode, encode


class Link:
    """One life of a frontend, as far as HTTP has no part in it. Everything happens on one event loop's thread.

    `end` is done when it is over: with an exception when a part of it failed.
    """

    def __init__(self, seat: Seat, control: Control, context: zmq.Context[zmq.Socket[bytes]], engine: Engine):
        self.engine = engine
        self.up = asyncio.Event()  # set once the engine takes requests
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._seat = seat
        self._context = zmq.asyncio.Context.shadow(context.underlying)
        self._control = zmq.asyncio.Socket.from_socket(control.socket)
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a part of this life; its failure ends the whole."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.end.done():
            self.end.set_exception(error)

    def end_now(self) -> None:
        """It is over, and well."""
        if not self.end.done():
            self.end.set_result(None)

    async def obey(self) -> None:
        """Do what the launcher says, for ever."""
        while True:
            epoch, message = decode(await self._control.recv())
            match message:
                case Up():
                    address = self._seat.model_copy(update={"epoch": epoch}).address("requests")
                    self.engine.connect(self._context, epoch, address, message.pages)
                    self.start(self.engine.receive())
                    await self.say(Ready("frontend", 0))
                    self.up.set()
                case Stop(drain=True):
                    self.start(self.drain())
                case Stop():
                    self.start(self.stop(message.reason))
                case _:
                    raise MessageError(f"a {type(message).__name__} is not for the frontend")

    async def say(self, message: Message) -> None:
        """Tell the launcher."""
        await self._control.send(encode(message, self._seat.epoch))

    async def drain(self) -> None:
        """The launcher wants no new request taken."""
        raise NotImplementedError

    async def stop(self, reason: str) -> None:
        """The launcher is ending everything; `reason` is for those whose requests are cut."""
        raise NotImplementedError


async def readable(fd: int) -> None:
    """Wait until a descriptor is readable (a pidfd: until its process has ended), and close it."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(fd, event.set)
    try:
        await event.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
