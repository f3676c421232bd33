"""How answers are made: the parameters of `LLM.generate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tpserve.frontend import schema
from tpserve.frontend.errors import InvalidRequest
from tpserve.offline.plain import plain

_ANY_VOCABULARY = 2**31  # the model's own is told only where the parameters are used


@dataclass
class SamplingParams:
    """Names and defaults are vLLM's; values are checked as those of an HTTP request are, by the same code.

    Raises ValueError for a value that is wrong, or that asks for what is not supported yet.
    """

    n: int = 1  # answers to each prompt
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0  # 0: always the likeliest id
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    seed: int | None = None  # None: another one for every prompt
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: as many as the model's length allows; 0: only the prompt is worked through
    min_tokens: int = 0
    logprobs: int | None = None  # of each id, and of so many likeliest ones
    prompt_logprobs: int | None = None  # the same of the prompt's ids
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    bad_words: list[str] | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    structured_outputs: Any = None

    def __post_init__(self) -> None:
        if self.structured_outputs is not None:
            raise ValueError("structured_outputs is not supported yet in SamplingParams")
        try:
            schema.completion_request({"prompt": "-", **self.body()}, None, _ANY_VOCABULARY)
        except InvalidRequest as error:
            raise ValueError(str(error)) from None

    def body(self) -> dict[str, Any]:
        """The same as fields of an HTTP body."""
        return {name: plain(value) for name, value in vars(self).items()}
