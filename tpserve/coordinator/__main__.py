"""``python -m tpserve.coordinator FD``: started by the launcher only."""

import sys

import zmq

from tpserve.child import Control, begin, run
from tpserve.coordinator.process import Coordinator
from tpserve.machine import take_short_turns


def main() -> int:
    """The exit status; it ends only by a failure, or is killed."""
    charge = begin(sys.argv)
    take_short_turns()
    context = zmq.Context[zmq.Socket[bytes]]()
    control = Control(charge, context)
    coordinator = Coordinator(charge, control, context)
    status = run(charge, control, coordinator.serve, lambda: coordinator.step)
    context.destroy(linger=0)
    return status


if __name__ == "__main__":
    sys.exit(main())
