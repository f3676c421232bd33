"""What the scheduler may use, and which requests can never be served with it."""

from __future__ import annotations

from dataclasses import dataclass

from tpserve.memory import pages_for
from tpserve.messages import Submit


@dataclass(frozen=True)
class Capacity:
    """Sizes under which every request that `refusal` lets pass will be served.

    Raises ValueError for sizes under which some request would wait for ever.
    """

    num_pages: int
    page_size: int  # tokens
    max_model_len: int  # tokens of prompt and answer
    max_num_seqs: int
    max_num_batched_tokens: int  # in one step
    chunked_prefill: bool
    prefix_caching: bool
    by_priority: bool  # who is admitted first, and preempted last
    max_queue: int | None  # most requests that wait
    target_itl_s: float | None = None  # between an answer's tokens; None: steps are as large as they may be
    speculative: bool = False  # whether workers may draft ids

    def __post_init__(self) -> None:
        pages = pages_for(self.max_model_len, self.page_size)
        if pages > self.num_pages:
            raise ValueError(f"{self.max_model_len} tokens take {pages} pages of {self.page_size}; there are {self.num_pages}")
        least = self.max_num_seqs if self.chunked_prefill else max(self.max_num_seqs, self.max_model_len)
        if self.target_itl_s is not None and not self.chunked_prefill:
            raise ValueError("a target for the gaps between tokens needs chunked prefill")
        if self.max_num_batched_tokens < least:
            raise ValueError(f"max_num_batched_tokens is {self.max_num_batched_tokens}; at least {least} is needed")

    def max_len(self, submit: Submit) -> int:
        """Most ids, of prompt and answer, that a choice of this request comes to have."""
        return min(len(submit.prompt) + submit.max_tokens, self.max_model_len)

    def refusal(self, submit: Submit) -> str:
        """Why this request can never be served, or ''."""
        num_prompt, num_generated = len(submit.prompt), max(map(len, submit.generated))
        if not num_prompt:
            return "the prompt is empty"
        if num_prompt + 1 > self.max_model_len:
            return f"the prompt has {num_prompt} tokens; with one of answer that is over the limit of {self.max_model_len}"
        if not submit.max_tokens:
            return "max_tokens is 0; at least 1 is needed"
        if num_prompt + num_generated >= self.max_len(submit):
            return f"a choice has {num_generated} generated tokens; at {self.max_len(submit) - num_prompt} it is over"
        return ""
