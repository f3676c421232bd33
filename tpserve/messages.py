"""Every message that passes between processes; those to the workers are in `plans`. The wire form is in `codec`."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import get_args

from tpserve.codec import I32, U16, U32, U64, Codec, F32s, I32s, U8s, U16s, U32s, U64s, adds_up, empty, same_length
from tpserve.plans import NO_FIRST_ROWS as NO_FIRST_ROWS
from tpserve.plans import FirstRows as FirstRows
from tpserve.plans import Row as Row
from tpserve.plans import SampleMasks as SampleMasks
from tpserve.plans import StepPlan as StepPlan


class Finish(enum.IntEnum):
    """Why a choice ended, or NONE while it goes on."""

    NONE = 0
    STOP = 1  # the id is an end-of-sequence or stop id
    LENGTH = 2
    ERROR = 3  # the logits were not finite; the id of that entry is -1
    COMPLETE = 4  # nothing can follow the id under the grammar; the id belongs to the answer
    TOO_COMPLEX = 5  # the grammar took more work than is allowed


class Refusal(enum.IntEnum):
    """Why a request is not served."""

    NEVER = 0  # it cannot be, at any time
    QUEUE_FULL = 1
    WAITED = 2  # too long


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


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Logprobs at some positions, of the raw logits. Position p has `counts[p]` entries of `ids` and `logprobs`
    (flat, in order): the id that stands there, then the likeliest ids, best first; none where they are not wanted.
    """

    counts: U16s
    ids: I32s
    logprobs: F32s

    def __post_init__(self) -> None:
        same_length(self, "ids", "logprobs")
        adds_up(self, counts="ids")


NO_SCORES: Scores = empty(Scores)


# frontend -> coordinator


@dataclass(frozen=True, slots=True, eq=False)
class Submit:
    """A prompt and its choices. `choices` are the indices to generate; `generated[i]` the ids that choice already has.

    Of `logprobs` and `prompt_logprobs`, -1 is none and k the k likeliest ids beside the one that stands there.
    Submits with the same `group` are one request of a client's, which is queued and refused as a whole.
    """

    request: U64
    group: U64
    prompt: I32s
    choices: U16s
    generated: list[I32s]
    max_tokens: U32  # per choice, counted from the prompt's end
    min_tokens: U32  # before which no stop id is sampled
    stop_ids: I32s
    sampling: Sampling
    bias_ids: I32s  # what is added to these ids' logits: `bias_values`
    bias_values: F32s
    logprobs: I32
    prompt_logprobs: I32
    grammar: str  # for llguidance; "" is none
    priority: I32  # the lower runs first, under the policy that heeds it
    max_wait_s: float  # in the queue; 0 is no limit
    cache_salt: str  # prefixes are shared only between requests with the same

    def __post_init__(self) -> None:
        same_length(self, "choices", "generated")
        same_length(self, "bias_ids", "bias_values")


@dataclass(frozen=True, slots=True, eq=False)
class Abort:
    """Ends one choice, or all of the request (choice -1). Unknown numbers are ignored: it may be over."""

    request: U64
    choice: I32


# worker -> coordinator


@dataclass(frozen=True, slots=True, eq=False)
class Hello:
    """First message of a worker on `plans`."""

    rank: U16


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """Rank 0's answer to a plan: the ids of its SAMPLE rows, in row order; -1 where the logits were not finite. Each row has
    one, or `id_counts` of them if the plan allowed drafts, of which there were `drafted` in all.

    `scores` has a position for each of these ids, or none at all if no row wants logprobs; `target_scores` has one
    for each target of the SCORE rows. `seconds` has one entry per name in `STEP_PARTS`; `all_reduces` and
    `all_gathers` count the step's collectives.
    """

    step: U64
    ids: I32s
    id_counts: U8s
    drafted: U32
    scores: Scores
    target_scores: Scores
    seconds: F32s
    all_reduces: U32
    all_gathers: U32

    def __post_init__(self) -> None:
        if len(self.id_counts):
            adds_up(self, id_counts="ids")


STEP_PARTS = ("plan", "reply", "prepare", "linear", "attention", "rows", "other", "wait", "transfer", "sample")


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
    """What one step brought, one entry per id, a choice's in order. `cached` is its prompt tokens found in the prefix cache.

    `scores` has a position for each id, or none at all if no choice wants logprobs.
    `waits` has one entry per choice planned for the first time since the last message: its seconds in the queue.
    """

    step: U64
    requests: U64s
    choices: U16s
    ids: I32s
    finishes: U8s
    cached: U32s
    scores: Scores
    seconds: F32s  # as in StepResult
    waits: F32s

    def __post_init__(self) -> None:
        same_length(self, "requests", "choices", "ids", "finishes", "cached")


@dataclass(frozen=True, slots=True, eq=False)
class PromptScores:
    """Logprobs of a prompt's next ids in order, the second id of the prompt first; all come before its first token."""

    request: U64
    scores: Scores


@dataclass(frozen=True, slots=True, eq=False)
class Refused:
    """The request is not served; `reason` is for its client, `kind` a `Refusal`."""

    request: U64
    kind: U16
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Stats:
    """State of the scheduler now, and its counters since the epoch began.

    `kv_tokens` are in the used pages: those of a page that choices share count once.
    """

    running: U32 = 0
    waiting: U32 = 0
    pages_used: U32 = 0
    pages_total: U32 = 0
    kv_tokens: U64 = 0
    preemptions: U64 = 0
    prefix_hit_tokens: U64 = 0
    drafted: U64 = 0
    accepted: U64 = 0  # of those that were drafted
    plan_bytes: U64 = 0
    all_reduces: U64 = 0
    all_gathers: U64 = 0


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


Message = (
    Submit | Abort | StepPlan | Hello | StepResult | Logits | Tokens | Refused | Stats
    | Started | Loading | Loaded | Serve | Up | Ready | Failure | Stop | Drained | SampleMasks | PromptScores
)  # fmt: skip
MESSAGES: tuple[type, ...] = get_args(Message)

_CODEC = Codec(MESSAGES)


def encode(message: Message, epoch: int) -> bytes:
    """The wire form. Raises MessageError when a field does not fit its annotation."""
    return _CODEC.encode(message, epoch)


def decode(data: bytes | memoryview) -> tuple[int, Message]:
    """(epoch, message). Raises MessageError for anything that `encode` cannot have made."""
    return _CODEC.decode(data)
