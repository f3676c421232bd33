"""`python -m tpserve.worker FD`: one rank, as the launcher starts it."""

from __future__ import annotations

import sys

import zmq

from tpserve.child import Control, begin, run


def main() -> int:
    """Run the rank until it is killed or fails; returns the exit status."""
    charge = begin(sys.argv)
    context = zmq.Context[zmq.Socket[bytes]]()
    control = Control(charge, context)
    beats = charge.beats()

    def work() -> None:
        # torch takes a second to import: by now the process has its name, and dies with the launcher.
        from tpserve.worker.process import Worker

        Worker(charge, control, beats, context).run()

    status = run(charge, control, work, lambda: beats.last_step)
    context.destroy(linger=0)
    return status


if __name__ == "__main__":
    sys.exit(main())
