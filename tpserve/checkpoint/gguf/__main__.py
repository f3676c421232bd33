"""The converter's process: ``python -m tpserve.checkpoint.gguf FILE... FOLDER PARENT_PID``.

Its imports take seconds and do not belong in the launcher. It prints why it failed on stdout; progress is on stderr.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from safetensors import SafetensorError

from tpserve.checkpoint.gguf.convert import convert
from tpserve.child import die_with_parent
from tpserve.settings import UserError


def main() -> int:
    """Convert what the arguments name. Returns the exit status."""
    *parts, folder, parent = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends this process and cleans up
    die_with_parent(int(parent))
    try:
        convert([Path(part) for part in parts], Path(folder))
    except UserError as error:
        print(error)
        return 1
    except (OSError, SafetensorError) as error:
        print(f"cannot convert {parts[0]} into {folder}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
