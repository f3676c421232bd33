"""A real coordinator process; the test takes the places of launcher, frontend and workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from launcher import rundir
from launcher.children import spawn
from tests.server import wait_for
from tests.specs import llama_spec
from tests.unit.coordinator.model_worker import make_submit, packed, unpacked
from tests.unit.frontend import small
from tpserve import board
from tpserve.child import Charge
from tpserve.deployment import Deployment
from tpserve.messages import (
    NO_SCORES,
    Abort,
    Failure,
    Finish,
    Hello,
    Message,
    PromptScores,
    Ready,
    Refusal,
    Refused,
    SampleMasks,
    Scores,
    Serve,
    Started,
    Stats,
    StepPlan,
    StepResult,
    Tokens,
    decode,
    encode,
)
from tpserve.settings import Settings
from tpserve.tokenizer import Tokenizer

EPOCH = 5
LIMIT_S = 30
RANKS = 2
PAGES = 16

SPEC = llama_spec(vocab=310, hidden=16, layers=1, heads=2, kv_heads=2, head_dim=8, intermediate=32)


class Server:
    """All that surrounds the coordinator."""

    def __init__(self, deployment: Deployment) -> None:
        self.run_dir = rundir.create()
        self.context = zmq.Context()
        self.workers: list[zmq.Socket[bytes]] = []
        self.control = self.context.socket(zmq.ROUTER)
        self.control.bind(f"ipc://{self.run_dir.path}/control")
        board_fd = board.create(RANKS)
        self.board = board.Board(board_fd)
        self.child = spawn(
            Charge(
                role="coordinator",
                epoch=EPOCH,
                run_dir=str(self.run_dir.path),
                launcher_pid=os.getpid(),
                board_fd=board_fd,
                deployment=deployment,
            )
        )
        os.close(board_fd)

    def close(self) -> None:
        self.child.kill()
        self.child.reap()
        self.context.destroy(linger=0)
        self.run_dir.remove()
        os.close(self.run_dir.lock_fd)

    def serve(self, pages: int) -> None:
        identity, _ = self.from_control(Started)
        self.control.send_multipart([identity, encode(Serve(pages), EPOCH)])

    def connect(self) -> None:
        """Two workers, which say hello, and a frontend."""
        for rank in range(RANKS):
            self.add_worker(rank)
        self.from_control(Ready)
        self.frontend = self.context.socket(zmq.PAIR)
        self.frontend.connect(f"ipc://{self.run_dir.path}/requests.{EPOCH}")

    def add_worker(self, rank: int) -> None:
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, str(rank).encode())
        socket.connect(f"ipc://{self.run_dir.path}/plans.{EPOCH}")
        socket.send(encode(Hello(rank), EPOCH))
        self.workers.append(socket)

    def from_control(self, kind: type) -> tuple[bytes, Any]:
        assert self.control.poll(LIMIT_S * 1000), "nothing came on control"
        identity, data = self.control.recv_multipart()
        epoch, message = decode(data)
        assert epoch == EPOCH
        assert isinstance(message, kind), message
        return identity, message

    def ask(self, message: Message, epoch: int = EPOCH) -> None:
        self.frontend.send(encode(message, epoch))

    def told(self, kind: type) -> Any:
        """The next message of this kind to the frontend; Stats come whenever they come."""
        while True:
            assert self.frontend.poll(LIMIT_S * 1000), f"no {kind.__name__} came"
            message = decode(self.frontend.recv())[1]
            if isinstance(message, kind):
                return message
            assert isinstance(message, Stats), message

    def plan(self) -> StepPlan:
        plan = self.to_workers()
        assert isinstance(plan, StepPlan), plan
        return plan

    def masks(self, step: int) -> list[int]:
        """The ids that the one row of the next masks, which are this step's, may sample."""
        masks = self.to_workers()
        assert isinstance(masks, SampleMasks), masks
        assert masks.step == step
        return np.flatnonzero(np.unpackbits(masks.words.view(np.uint8), bitorder="little")).tolist()

    def to_workers(self) -> Message:
        """The next plan or masks, which are the same bytes at every rank."""
        copies = []
        for worker in self.workers:
            assert worker.poll(LIMIT_S * 1000), "no plan came"
            copies.append(worker.recv())
        assert len(set(copies)) == 1
        epoch, message = decode(copies[0])
        assert epoch == EPOCH
        return message

    def answer(self, step: int, *ids: int, rank: int = 0, epoch: int = EPOCH, target_scores: Scores = NO_SCORES) -> None:
        result = StepResult(
            step,
            np.array(ids, np.int32),
            np.empty(0, np.uint8),
            0,
            NO_SCORES,
            target_scores,
            np.arange(5, dtype=np.float32),
            2,
            1,
        )
        self.workers[rank].send(encode(result, epoch))


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    return Deployment(
        settings=Settings(tp=RANKS),
        model_path="nowhere",
        tokenizer_path=str(small.write(tmp_path_factory.mktemp("small"))),
        served_names=("tiny",),
        spec=SPEC,
        device="cpu",
        dtype="float32",
        page_size=4,
        num_pages=PAGES,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        stop_ids=(small.END,),
        threads_per_rank=1,
    )


@pytest.fixture
def fresh(deployment: Deployment) -> Iterator[Server]:
    server = Server(deployment)
    yield server
    server.close()


@pytest.fixture
def server(fresh: Server) -> Server:
    fresh.serve(PAGES)
    fresh.connect()
    return fresh


def test_coordinator_serves_requests_from_submit_to_idle(server: Server) -> None:
    server.ask(make_submit(1, [1, 2, 3, 4, 5], max_tokens=2))
    first = server.plan()
    assert (first.step, first.counts.tolist(), first.ids.tolist()) == (1, [5], [1, 2, 3, 4, 5])
    second = server.plan()  # although the first has no answer
    assert (second.step, second.counts.tolist(), second.ids.tolist()) == (2, [1], [])
    server.answer(1, 99, epoch=EPOCH - 1)  # dropped
    server.answer(1, 40)
    tokens = server.told(Tokens)
    assert (tokens.step, tokens.requests.tolist(), tokens.ids.tolist()) == (1, [1], [40])
    assert tokens.seconds.tolist() == [0, 1, 2, 3, 4]
    server.answer(2, 41)
    assert server.told(Tokens).finishes.tolist() == [Finish.LENGTH]
    stats = server.told(Stats)
    while stats.running:
        stats = server.told(Stats)
    assert (stats.waiting, stats.pages_used, stats.pages_total) == (0, 0, PAGES)
    assert (stats.all_reduces, stats.all_gathers) == (4, 2)
    assert stats.plan_bytes > 0

    server.ask(make_submit(2, [1] * 64))
    refused = server.told(Refused)
    assert (refused.request, "64" in refused.reason) == (2, True)

    server.ask(make_submit(3, [7, 7]), epoch=EPOCH + 1)  # dropped
    server.ask(make_submit(4, [8, 8]))
    third = server.plan()
    assert (third.step, third.ids.tolist()) == (3, [8, 8])
    server.ask(Abort(4, -1))
    server.plan()
    server.answer(3, 1)
    assert len(server.told(Tokens).ids) == 0
    assert server.board.read(0).last_step == 4


def test_coordinator_is_ready_only_when_every_rank_has_said_hello_and_beats_meanwhile(fresh: Server) -> None:
    fresh.serve(PAGES)
    fresh.add_worker(1)
    ages = [0.0]

    def has_beaten_twice() -> bool:
        ages.append(fresh.board.read(0).age_s or 0.0)
        return sum(later < earlier for earlier, later in pairwise(ages)) == 2

    wait_for(has_beaten_twice, LIMIT_S, "two beats")
    assert not fresh.control.poll(0)
    fresh.add_worker(0)
    ready = fresh.from_control(Ready)[1]
    assert (ready.role, ready.rank) == ("coordinator", 0)


@pytest.mark.parametrize(
    ("break_protocol", "says"),
    [
        (lambda server: server.answer(2, 5), "result of step 2 came; in flight are [1, 2]"),
        (lambda server: server.answer(1), "result of step 1 has 0 ids for 1 rows"),
        (lambda server: server.answer(1, 5, rank=1), "StepResult came from rank 1"),
        (lambda server: server.add_worker(7), "from b'7' on plans, which is no rank"),
        (lambda server: server.frontend.send(b"?"), "not an array that begins with tag and epoch"),
        (lambda server: server.ask(Hello(0)), "Hello came from the frontend"),
        (lambda server: server.ask(make_submit(1, [1])), "request 1 is already open"),
    ],
)
def test_broken_protocol_ends_the_coordinator_with_a_failure_that_names_it(
    server: Server, break_protocol: Callable[[Server], None], says: str
) -> None:
    server.ask(make_submit(1, [1, 2], max_tokens=9))
    server.plan()
    server.plan()
    break_protocol(server)
    failure = server.from_control(Failure)[1]
    assert (failure.role, failure.step) == ("coordinator", 2)
    assert says in failure.text
    assert "Traceback" in failure.detail
    assert server.child.process.wait(LIMIT_S) == 1


def test_pool_too_small_for_the_longest_request_is_a_users_error(fresh: Server) -> None:
    fresh.serve(PAGES - 1)
    failure = fresh.from_control(Failure)[1]
    assert failure.text == f"64 tokens take {PAGES} pages of 4; there are {PAGES - 1}"
    assert failure.detail == ""
    assert fresh.child.process.wait(LIMIT_S) == 1


def test_prompt_scores_are_told_before_the_first_token(server: Server) -> None:
    server.ask(make_submit(2, [1, 2, 3], max_tokens=1, prompt_logprobs=0))
    assert server.plan().targets.tolist() == [2, 3]
    found = [[(2, -0.5)], [(3, -1.5)]]
    server.answer(1, 9, target_scores=packed(found))
    scores = server.told(PromptScores)
    assert (scores.request, unpacked(scores.scores)) == (2, found)
    assert server.told(Tokens).ids.tolist() == [9]


def test_request_that_waits_too_long_is_refused_although_no_message_comes(server: Server) -> None:
    server.ask(make_submit(2, [1], choices={choice: [] for choice in range(4)}))
    server.plan()
    server.plan()  # all slots are taken, and no answer will come
    server.ask(make_submit(4, [1], max_wait_s=0.01))
    refused = server.told(Refused)
    assert (refused.request, refused.kind) == (4, Refusal.WAITED)


def test_masks_of_a_step_come_before_the_next_plan(server: Server, deployment: Deployment) -> None:
    tokenizer = Tokenizer(Path(deployment.tokenizer_path))
    a, b, c, d = (tokenizer.id_of(char) for char in "abcd")
    server.ask(make_submit(2, [1], max_tokens=3, grammar="start: /a[bc]d/"))
    assert server.plan().step == 1
    assert server.masks(1) == [a]
    assert server.plan().step == 2
    server.answer(1, a)
    assert server.masks(2) == [b, c]
    assert server.plan().step == 3
    server.answer(2, c)
    assert server.masks(3) == [d]
    server.answer(3, d)
    assert [server.told(Tokens).finishes.tolist() for _ in range(3)] == [[Finish.NONE], [Finish.NONE], [Finish.COMPLETE]]


def test_grammar_that_does_not_compile_is_refused(server: Server) -> None:
    server.ask(make_submit(2, [1], grammar="start: /(/"))
    refused = server.told(Refused)
    assert (refused.request, refused.kind) == (2, Refusal.NEVER)
    assert refused.reason.startswith("the grammar cannot be used: ")


def test_tokenizer_that_cannot_be_read_ends_the_coordinator(tmp_path: Path, deployment: Deployment) -> None:
    server = Server(deployment.model_copy(update={"tokenizer_path": str(tmp_path)}))
    try:
        server.serve(PAGES)
        server.connect()
        assert f"no tokenizer.json in {tmp_path}" in server.from_control(Failure)[1].text
    finally:
        server.close()
