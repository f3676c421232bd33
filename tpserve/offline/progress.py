"""The progress bar of `generate`: where somebody can see it."""

from __future__ import annotations

import sys
import warnings

from tqdm import TqdmWarning

with warnings.catch_warnings():
    warnings.simplefilter("ignore", TqdmWarning)  # in a notebook without ipywidgets a bar of text does
    from tqdm.auto import tqdm


def progress_bar(prompts: int, wanted: bool) -> tqdm[None]:
    """A bar of so many prompts; it shows in a terminal and in a notebook only, and only if it is wanted."""
    seen = "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())
    return tqdm(total=prompts, unit="prompt", disable=not (wanted and seen))
