"""How far answers may run ahead on ids that workers draft (`worker/lookup.py`): the one place where it is decided. Pure."""

from __future__ import annotations

from tpserve.limits import MOST_COLUMNS
from tpserve.messages import Submit


def most_drafts(rows: int, most_tokens: int) -> int:
    """How many drafts each of a step's decode rows may have; the step holds `most_tokens` at most.

    A CPU multiplies a few columns in little more than the time that it takes to read the weights, which one column takes as
    well, so drafts among the first few hardly cost anything when they are wrong. Beyond, they take as long as ids of other
    requests, which are never wrong: so there are none when many decode. Half of a step is left to prompts.
    """
    return max(0, min(MOST_COLUMNS, most_tokens // 2) // rows - 1) if rows else 0


def can_speculate(submit: Submit) -> bool:
    """Whether its answers may: not under a grammar, whose masks take each id before the next one's, nor with logprobs."""
    return not submit.grammar and submit.logprobs < 0
