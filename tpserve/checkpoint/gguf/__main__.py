"""The converter's process: ``python -m tpserve.checkpoint.gguf STAGE FILE... FOLDER PARENT_PID``; see `converter_main`."""

from __future__ import annotations

import sys
from pathlib import Path

from tpserve.checkpoint.converter import converter_main
from tpserve.checkpoint.gguf import convert

_STAGES = {"description": convert.describe, "weights": convert.write_weights}


def _convert(stage: str, *paths: str) -> None:
    *parts, folder = map(Path, paths)
    _STAGES[stage](parts, folder)


if __name__ == "__main__":
    sys.exit(converter_main(_convert))
