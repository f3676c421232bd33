"""The converter's process: ``python -m tpserve.checkpoint.tokenizer MODEL_FOLDER FOLDER PARENT_PID``.

It prints why it failed on stdout.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from tpserve.checkpoint.tokenizer.convert import convert
from tpserve.child import die_with_parent
from tpserve.settings import UserError


def main() -> int:
    """Convert what the arguments name. Returns the exit status."""
    model, folder, parent = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends this process and cleans up
    die_with_parent(int(parent))
    try:
        convert(Path(model), Path(folder))
    except UserError as error:
        print(error)
        return 1
    except OSError as error:
        print(f"cannot convert the tokenizer of {model} into {folder}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
