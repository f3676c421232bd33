"""Every message that passes between processes. How they are put on the wire is in `codec`."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from tpserve.codec import I32, U16, U32, U64, Codec, F32s, I32s, MessageError, U8s, U16s, U32s, U64s


class Row(enum.IntFlag):
    """Flags of a row of a `StepPlan`."""

    SAMPLE = 1  # an id is sampled after the row's last token
    FIRST = 2  # first chunk of a slot: the slot's old state is dropped, its parameters are in the plan
    FROM_SLOT = 4  # the input is the id that the slot sampled last (count is 1)
    LOGITS = 8  # every rank answers with its slice of the logits of all the row's tokens


class Finish(enum.IntEnum):
    """Why a choice ended, or NONE while it goes on."""

    NONE = 0
    STOP = 1  # the id is an end-of-sequence or stop id
    LENGTH = 2
    ERROR = 3  # the logits were not finite; the id of that entry is -1


@dataclass(frozen=True, slots=True, eq=False)
class Sampling:
    """How a request's ids are chosen. Temperature 0 is greedy; top_k 0, top_p 1, min_p 0 are off, and so are
    a repetition penalty of 1 and the other penalties at 0.
    """

    temperature: float
    top_k: U32
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: U64

    @property
    def looks_back(self) -> bool:
        """Whether the ids so far change what comes next otherwise than through the model."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


# frontend -> coordinator


@dataclass(frozen=True, slots=True, eq=False)
class Submit:
    """A request. `choices` are the indices to generate; `generated[i]` the ids that choice already has."""

    request: U64
    prompt: I32s
    choices: U16s
    generated: list[I32s]
    max_tokens: U32  # per choice, counted from the prompt's end
    stop_ids: I32s
    sampling: Sampling

    def __post_init__(self) -> None:
        _same_length(self, "choices", "generated")


@dataclass(frozen=True, slots=True, eq=False)
class Abort:
    """Ends one choice, or all of the request (choice -1). Unknown numbers are ignored: it may be over."""

    request: U64
    choice: I32


# coordinator -> workers


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step for all ranks. Arrays are parallel per row unless said otherwise.

    A row advances one slot by `counts` tokens. `page_counts[r]` of the ids in `pages` (flat, in row
    order) are appended to the slot's page table before the step. `ids` (flat, in row order) holds the
    input ids of the rows that are not FROM_SLOT. Those from `starts` to `past_counts` have one entry per
    FIRST row: the position of the row's first token (a prefix hit precedes it), the slot's parameters, and
    of its prompt's ids how many there are. `past_counts[f]` of the ids in `past` (flat, in row order) are all
    that the slot has, its prompt's first; none where its parameters do not look back. Pages `copy_to` are
    overwritten with pages `copy_from` before any key or value of this step is written.
    """

    step: U64
    slots: U16s
    counts: U32s
    flags: U8s
    page_counts: U32s
    pages: I32s
    ids: I32s
    starts: U32s
    seeds: U64s
    choices: U16s
    temperatures: F32s
    top_ks: U32s
    top_ps: F32s
    min_ps: F32s
    repetition_penalties: F32s
    presence_penalties: F32s
    frequency_penalties: F32s
    prompt_counts: U32s
    past_counts: U32s
    past: I32s
    copy_from: I32s
    copy_to: I32s

    def __post_init__(self) -> None:
        _same_length(self, "slots", "counts", "flags", "page_counts")
        _same_length(self, "starts", "seeds", "choices", "temperatures", "top_ks", "top_ps", "min_ps")
        _same_length(self, "starts", "repetition_penalties", "presence_penalties", "frequency_penalties")
        _same_length(self, "starts", "prompt_counts", "past_counts")
        _same_length(self, "copy_from", "copy_to")
        given = (self.flags & Row.FROM_SLOT) == 0
        wanted = int(np.count_nonzero(self.flags & Row.FIRST)), int(self.page_counts.sum()), int(self.counts[given].sum())
        if wanted != (len(self.starts), len(self.pages), len(self.ids)):
            raise MessageError(f"StepPlan: rows want {wanted} starts, pages and ids")
        if int(self.past_counts.sum()) != len(self.past):
            raise MessageError(f"StepPlan: {len(self.past)} ids of the past, where {self.past_counts.tolist()} are said to be")


# worker -> coordinator


@dataclass(frozen=True, slots=True, eq=False)
class Hello:
    """First message of a worker on `plans`."""

    rank: U16


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """Rank 0's answer to a plan: one id per SAMPLE row, in row order; -1 where the logits were not finite.

    `seconds` has one entry per name in `STEP_PARTS`; `all_reduces` and `all_gathers` count the step's collectives.
    """

    step: U64
    ids: I32s
    seconds: F32s
    all_reduces: U32
    all_gathers: U32


STEP_PARTS = ("wait", "prepare", "forward", "collective", "sample")


@dataclass(frozen=True, slots=True, eq=False)
class Logits:
    """One rank's slice of the float32 logits of a LOGITS row: `values` is (count, columns), flat.

    Column 0 is vocabulary id `first_id`.
    """

    step: U64
    rank: U16
    row: U16
    first_id: U32
    count: U32
    values: F32s


# coordinator -> frontend


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """What one step brought, one entry per id. `cached` is the choice's prompt tokens found in the prefix cache.

    `waits` has one entry per choice planned for the first time since the last message: its seconds in the queue.
    """

    step: U64
    requests: U64s
    choices: U16s
    ids: I32s
    finishes: U8s
    cached: U32s
    seconds: F32s  # as in StepResult
    waits: F32s

    def __post_init__(self) -> None:
        _same_length(self, "requests", "choices", "ids", "finishes", "cached")


@dataclass(frozen=True, slots=True, eq=False)
class Refused:
    """The request can never be served; `reason` is for its client."""

    request: U64
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Stats:
    """State of the scheduler now, and its counters since the epoch began."""

    running: U32
    waiting: U32
    pages_used: U32
    pages_total: U32
    preemptions: U64
    prefix_hit_tokens: U64
    plan_bytes: U64
    all_reduces: U64
    all_gathers: U64


# control: launcher <-> every child


@dataclass(frozen=True, slots=True, eq=False)
class Started:
    """First message of a child on `control`, sent when its imports are done."""

    role: str
    rank: U16
    pid: U32


@dataclass(frozen=True, slots=True, eq=False)
class Loading:
    """Bytes of weights read so far by a rank."""

    rank: U16
    done_bytes: U64
    total_bytes: U64


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """The rank's weights are in place; it could hold `pages` pages."""

    rank: U16
    pages: U64


@dataclass(frozen=True, slots=True, eq=False)
class Serve:
    """Launcher -> coordinator and workers: allocate this many pages and go to work."""

    pages: U64


@dataclass(frozen=True, slots=True, eq=False)
class Up:
    """Launcher -> frontend: an epoch's coordinator and workers are ready."""

    pages: U64


@dataclass(frozen=True, slots=True, eq=False)
class Ready:
    """Child -> launcher: answer to `Serve` and `Up`."""

    role: str
    rank: U16


@dataclass(frozen=True, slots=True, eq=False)
class Failure:
    """Child -> launcher: it cannot go on. `text` is one line; `detail` a traceback, or empty for a user's mistake."""

    role: str
    rank: U16
    step: U64
    text: str
    detail: str


@dataclass(frozen=True, slots=True, eq=False)
class Stop:
    """Launcher -> frontend: take no new request; end the open ones (drain), or cut them with `reason` (not drain)."""

    drain: bool
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Drained:
    """Frontend -> launcher: no request is open and none will be."""


MESSAGES: tuple[type, ...] = (
    Submit, Abort, StepPlan, Hello, StepResult, Logits, Tokens, Refused, Stats,
    Started, Loading, Loaded, Serve, Up, Ready, Failure, Stop, Drained,
)  # fmt: skip
Message = (
    Submit | Abort | StepPlan | Hello | StepResult | Logits | Tokens | Refused | Stats
    | Started | Loading | Loaded | Serve | Up | Ready | Failure | Stop | Drained
)  # fmt: skip

_CODEC = Codec(MESSAGES)


def encode(message: Message, epoch: int) -> bytes:
    """The wire form. Raises MessageError when a field does not fit its annotation."""
    return _CODEC.encode(message, epoch)


def decode(data: bytes | memoryview) -> tuple[int, Message]:
    """(epoch, message). Raises MessageError for anything that `encode` cannot have made."""
    return _CODEC.decode(data)


def _same_length(message: object, *names: str) -> None:
    lengths = {name: len(getattr(message, name)) for name in names}
    if len(set(lengths.values())) > 1:
        raise MessageError(f"{type(message).__name__}: lengths differ: {lengths}")
