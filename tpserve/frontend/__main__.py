"""``python -m tpserve.frontend FD``: started by the launcher only."""

import os
import sys

import zmq

from tpserve.child import Control, begin, run
from tpserve.frontend.process import serve
from tpserve.machine import take_short_turns


def main() -> int:
    """The exit status; 0 when the launcher said stop."""
    charge = begin(sys.argv)
    take_short_turns()
    context = zmq.Context[zmq.Socket[bytes]]()
    control = Control(charge, context)
    status = run(charge, control, lambda: serve(charge, control, context))
    context.destroy(linger=500)  # the launcher must get the last word
    return status


if __name__ == "__main__":
    os._exit(main())  # not waiting for threads: a prompt may still be in the making, for nobody
