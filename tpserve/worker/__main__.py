"""`python -m tpserve.worker FD`: one rank, as the launcher starts it."""

from __future__ import annotations

import sys

import zmq

from tpserve.child import Charge, Control, begin, run


def main(charge: Charge) -> int:
    """Run the rank until it is killed or fails; returns the exit status."""
    beats = charge.beats()
    control = Control(charge, zmq.Context.instance())

    def work() -> None:
        # torch takes a second to import: by now the process has its name, and dies with the launcher.
        from tpserve.worker.process import Worker

        Worker(charge, control, beats).run()

    return run(charge, control, work, lambda: beats.last_step)


if __name__ == "__main__":
    sys.exit(main(begin(sys.argv)))
