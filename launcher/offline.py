"""The launcher as a child: for a process that takes the frontend's place, as `LLM` does.

That process calls `start`; the rest runs in the child. Whichever of the two ends, the other notices by its pidfd.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from launcher import children, rundir
from launcher.children import Child, Parent
from launcher.supervise import Run, Supervisor, begun
from launcher.timeline import Timeline
from tpserve import log
from tpserve.deployment import Deployment
from tpserve.messages import Stop

logger = logging.getLogger("tpserve")

_CONNECT_S = 3.0


class Order(BaseModel):
    """What the launcher is told by the process that starts it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    deployment: Deployment
    run_dir: str
    lock_fd: int
    parent_pid: int


# In the process that starts it


@contextlib.contextmanager
def started(deployment: Deployment) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A launcher and its run directory. Afterwards both are gone: it should have ended by then, and is killed if it has not.

    Its session is its own, so that a terminal's Ctrl-C is for its parent alone.
    """
    log.fill_standard_streams()  # so that none of the descriptors to come is one of theirs
    with rundir.create() as run_dir:
        order = Order(deployment=deployment, run_dir=str(run_dir.path), lock_fd=run_dir.lock_fd, parent_pid=os.getpid())
        process = children.interpreter("launcher", order, (run_dir.lock_fd,), new_session=True)
        try:
            yield process, run_dir.path
        finally:
            process.kill()
            process.wait()


# In the launcher


def main(order: Order) -> int:
    """Run workers and coordinator until the parent ends or says so; returns the exit status."""
    timeline = Timeline()
    deployment = order.deployment
    log.setup("launcher", deployment.settings.log_level, deployment.settings.log_format)
    for note in deployment.notes:
        logger.warning("%s", note)
    with begun(lambda: rundir.RunDir(Path(order.run_dir), order.lock_fd)) as run:
        parent = Parent(os.pidfd_open(order.parent_pid))
        if os.getppid() != order.parent_pid:  # it died before the call
            return 1
        return Offline(deployment, timeline, run, parent).run()


class Offline(Supervisor):
    """A run whose frontend is the parent."""

    def __init__(self, deployment: Deployment, timeline: Timeline, run: Run, parent: Parent):
        super().__init__(deployment, timeline, run)
        self.parent = parent

    def run(self) -> int:
        """As for a server; what this machine refuses is the parent's to tell."""
        try:
            return super().run()
        except OSError as error:  # no room, no descriptors, no processes left
            self.send("frontend", Stop(False, f"cannot run a model on this machine: {error}"))
            return 2

    def start_frontend(self) -> None:
        """It runs already; once it is connected, it can be told of whatever happens."""
        self.children[self.parent.title] = self.parent
        self.control.poll(int(1000 * _CONNECT_S))

    def ends_well(self, child: Child | Parent) -> bool:
        """Whether it is the parent: it ends when its user likes."""
        return child is self.parent

    def dismiss_frontend(self, reason: str) -> None:
        """It is told, and left alone."""
        self.send("frontend", Stop(False, reason))
        self.children.pop(self.parent.title, None)
