"""Where answers stand in their grammars, and the compilation of grammars beside the loop.

A grammar has been compiled before, by the frontend's child, so few fail here. The tokenizer is prepared as soon as the
process begins, while workers load their weights: it takes up to seconds, through some of which the loop would stand.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import numpy as np
from llguidance import LLMatcher

from tpserve.deployment import Deployment
from tpserve.grammar import GrammarError, compile, ll_tokenizer
from tpserve.messages import Abort, Finish, Refusal, Refused, Submit
from tpserve.tokenizer import Tokenizer

_MOST_GROUPS = 64  # whose grammars are not compiled yet


class GrammarMatcher:
    """A `Matcher`: one choice's place in its grammar."""

    def __init__(self, matcher: LLMatcher, words: np.ndarray, end_ids: frozenset[int]):
        """`words` is room for a mask of the size that llguidance wants; others may use it as well."""
        self._matcher = matcher
        self._words = words
        self._end_ids = end_ids

    def accept(self, token: int) -> Finish:
        """Take the next id. TOO_COMPLEX also where the last mask was."""
        if not self._matcher.consume_token(token) or self._matcher.is_error():
            return Finish.TOO_COMPLEX
        if not self._matcher.is_stopped():
            return Finish.NONE
        return Finish.STOP if token in self._end_ids else Finish.COMPLETE

    def fill(self, words: np.ndarray) -> None:
        """Write which ids may follow; all when it took too much work to find out, which ends the choice with the next."""
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        words[:] = 0xFFFFFFFF if self._matcher.is_error() else self._words[: len(words)]


class Compiler:
    """Makes matchers of grammars. All choices of a group have copies of one, which share a lexer. Its states add up, so
    no copy outlives its group.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_ids: tuple[int, ...]):
        self._vocabulary = ll_tokenizer(tokenizer, vocab_size, stop_ids)
        self._words = np.zeros(-(-self._vocabulary.vocab_size // 32), np.uint32)
        self._end_ids = frozenset(stop_ids)
        self._group = 0  # the last one
        self._grammar = ""
        self._compiled: LLMatcher | None = None

    def matchers(self, submit: Submit) -> list[GrammarMatcher]:
        """A matcher for each choice, which has taken its generated ids. Raises GrammarError."""
        if self._compiled is None or (submit.group, submit.grammar) != (self._group, self._grammar):
            self._compiled = None
            self._group, self._grammar = submit.group, submit.grammar
            self._compiled = compile(self._vocabulary, submit.grammar)
        return [self._matcher(self._compiled.deep_copy(), ids.tolist()) for ids in submit.generated]

    def _matcher(self, matcher: LLMatcher, generated: list[int]) -> GrammarMatcher:
        if not matcher.consume_tokens(generated):
            raise GrammarError(f"the {len(generated)} ids generated so far do not follow it")
        return GrammarMatcher(matcher, self._words, self._end_ids)


@dataclass(slots=True, eq=False)
class Pending:
    """A Submit with a grammar. When that is compiled there are matchers, or a reason why not."""

    submit: Submit
    arrived_s: float
    matchers: list[GrammarMatcher] = field(default_factory=list)
    reason: str = ""
    aborted: list[int] = field(default_factory=list)  # choices that were aborted meanwhile


class Grammars:
    """Holds Submits while a thread compiles their grammars. All methods are for the loop's thread."""

    def __init__(self, deployment: Deployment):
        self._deployment = deployment
        self._pending: dict[int, Pending] = {}  # by request
        self._wanted: SimpleQueue[Pending] = SimpleQueue()
        self._done: deque[Pending | BaseException] = deque()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC)
        threading.Thread(target=self._work, name="grammars", daemon=True).start()

    def fileno(self) -> int:
        """A descriptor that is readable when there is something to `take`."""
        return self._bell

    def add(self, submit: Submit, arrived_s: float) -> Refused | None:
        """Have the Submit's grammar compiled, or say why not: too many wait for that."""
        groups = {pending.submit.group for pending in self._pending.values()}
        if len(groups) >= _MOST_GROUPS and submit.group not in groups:
            return Refused(submit.request, Refusal.QUEUE_FULL, f"{len(groups)} requests wait for their grammars already")
        self._pending[submit.request] = pending = Pending(submit, arrived_s)
        self._wanted.put(pending)
        return None

    def abort(self, abort: Abort) -> bool:
        """Whether the request is held here; then the abort is heeded."""
        pending = self._pending.get(abort.request)
        if pending is None:
            return False
        if abort.choice < 0:
            del self._pending[abort.request]
        else:
            pending.aborted.append(abort.choice)
        return True

    def take(self) -> list[Pending]:
        """Those that are done, in order of arrival. Raises what ended the thread."""
        os.eventfd_read(self._bell)
        taken = []
        while self._done:
            done = self._done.popleft()
            if isinstance(done, BaseException):
                raise done
            if self._is_wanted(done):
                del self._pending[done.submit.request]
                taken.append(done)
        return taken

    def _is_wanted(self, pending: Pending) -> bool:
        return self._pending.get(pending.submit.request) is pending

    # The thread

    def _work(self) -> None:
        try:
            deployment = self._deployment
            tokenizer = Tokenizer(Path(deployment.tokenizer_path))
            compiler = Compiler(tokenizer, deployment.spec.vocab_size, deployment.stop_ids)
            del tokenizer  # it is large, and needed no more
            while True:
                pending = self._wanted.get()
                if self._is_wanted(pending):
                    _compile(compiler, pending)
                    self._tell(pending)
        except BaseException as error:  # a fault of this process, which the loop raises
            self._tell(error)

    def _tell(self, done: Pending | BaseException) -> None:
        self._done.append(done)
        os.eventfd_write(self._bell, 1)


def _compile(compiler: Compiler, pending: Pending) -> None:
    try:
        pending.matchers = compiler.matchers(pending.submit)
    except GrammarError as error:
        pending.reason = f"the grammar cannot be used: {error}"
