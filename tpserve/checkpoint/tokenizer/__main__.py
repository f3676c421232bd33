"""The converter's process: ``python -m tpserve.checkpoint.tokenizer MODEL_FOLDER FOLDER PARENT_PID``; see `converter_main`."""

from __future__ import annotations

import sys
from pathlib import Path

from tpserve.checkpoint.converter import converter_main
from tpserve.checkpoint.tokenizer.convert import convert

if __name__ == "__main__":
    sys.exit(converter_main(lambda model, folder: convert(Path(model), Path(folder))))
