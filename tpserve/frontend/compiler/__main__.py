"""The child: ``python -m tpserve.frontend.compiler PARENT FOLDER VOCABULARY STOP_ID...``

Grammars come on stdin; what is wrong with each goes to stdout, "" for nothing; a first "" says that it is ready.
Each grammar is compiled in a process of its own, forked from this one, so that what ends it costs no new start.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path
from typing import NoReturn

import setproctitle
from llguidance import LLTokenizer

from tpserve.child import die_with_parent
from tpserve.frontend.compiler.frames import read, write
from tpserve.grammar import GrammarError, first_mask, ll_tokenizer
from tpserve.interpreter import signals_are_ignored
from tpserve.tokenizer import Tokenizer

_MOST_S = 0.5  # of processor time; the coordinator will need as much of it again
_MOST_BYTES = 256 * 2**20
_TOO_LARGE = f"takes more than {_MOST_BYTES // 2**20} MiB to compile, which is the most"
_NICENESS = 5  # a server that is busy goes first, yet a grammar comes to its end


def main(parent: int, folder: Path, vocab_size: int, stop_ids: list[int]) -> None:
    """Answer until there is nothing more to read."""
    die_with_parent(parent)
    signals_are_ignored()
    setproctitle.setproctitle("tpserve: grammars")
    tokenizer = ll_tokenizer(Tokenizer(folder), vocab_size, stop_ids)
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    write(1, "")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what a compiler says that runs out of memory is no news
    while (grammar := read(0)) is not None:
        answer(tokenizer, grammar)


def answer(tokenizer: LLTokenizer, grammar: str) -> None:
    """Compile in a fork; say how it went."""
    here = os.getpid()
    fork = os.fork()
    if not fork:
        _compile(here, tokenizer, grammar)
    _, status = os.waitpid(fork, 0)
    if code := os.waitstatus_to_exitcode(status):
        write(1, _why(code))


def _compile(parent: int, tokenizer: LLTokenizer, grammar: str) -> NoReturn:
    """In the fork."""
    try:
        die_with_parent(parent)
        _limit()
        fault = _fault(tokenizer, grammar)
        signal.setitimer(signal.ITIMER_PROF, 0)  # none ends amid an answer
        write(1, fault)
        os._exit(0)
    finally:
        os._exit(1)


def _limit() -> None:
    """From here on, this process has that much processor time and memory more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + _MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, _MOST_S)


def _fault(tokenizer: LLTokenizer, grammar: str) -> str:
    try:
        first_mask(tokenizer, grammar)
    except GrammarError as error:
        return str(error)
    except MemoryError:
        return _TOO_LARGE
    return ""


def _why(code: int) -> str:
    match -code:
        case signal.SIGPROF:
            return f"takes more than {_MOST_S} s to compile, which is the most"
        case signal.SIGABRT:
            return _TOO_LARGE
        case signal.SIGKILL | signal.SIGTERM:  # from outside: nothing is known of the grammar
            sys.exit(1)
    return f"cannot be compiled (the compiler ended with {code})"


if __name__ == "__main__":
    parent, folder, vocab_size, *stop_ids = sys.argv[1:]
    main(int(parent), Path(folder), int(vocab_size), list(map(int, stop_ids)))
