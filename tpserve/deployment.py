"""What will run: the settings with everything that follows from the model and the machine.

Made once by `preflight` before any process starts; every child gets it as one JSON document.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from tpserve.model.spec import ModelSpec
from tpserve.sampling import SamplingDefaults
from tpserve.settings import Settings


class ApiKey(BaseModel):
    """A client's key, and what its requests are granted."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: str  # SHA-256, in hexadecimal
    name: str
    priority: int  # the most urgent that its requests can have; lower is more urgent
    max_wait_s: float  # the longest that they wait for a place; 0 is no limit


class Native(BaseModel):
    """The native kernels that all ranks use."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    level: str  # of the instruction set
    sources: str  # digest of what they were built of


class RankMemory(BaseModel):
    """What one rank holds, in bytes; of what ranks share, its part."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    weights: int
    pool: int  # of KV pages
    buffers: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.pool + self.buffers


class Deployment(BaseModel):
    """Resolved values. `num_pages` is None where only a loaded device can tell (CUDA)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    settings: Settings  # without the keys that clients send
    model_path: str  # folder with the weights
    tokenizer_path: str  # folder with tokenizer.json and the chat template
    served_names: tuple[str, ...]  # the first is the model's id
    spec: ModelSpec
    device: Literal["cpu", "cuda"]
    dtype: Literal["bfloat16", "float16", "float32"]  # of weights and KV pages
    native: Native | None = None  # None: torch computes
    page_size: int  # tokens
    num_pages: int | None
    memory: tuple[RankMemory, ...] = ()  # of each rank, where it is known beforehand (CPUs)
    max_model_len: int  # tokens of prompt and answer
    max_num_seqs: int
    max_num_batched_tokens: int
    stop_ids: tuple[int, ...]  # end-of-sequence ids
    sampling: SamplingDefaults = SamplingDefaults()  # of requests that leave these parameters out
    chat_template: str | None = None  # Jinja that takes the place of the model's own
    keys: tuple[ApiKey, ...] = ()  # none: any client may connect
    threads_per_rank: int
    notes: tuple[str, ...] = ()  # what the user should know, one line each
