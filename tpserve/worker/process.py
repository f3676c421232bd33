"""A worker's life: load the shard, join the other ranks, then run one plan after the other."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import numpy as np
import torch
import zmq
from torch import Tensor

from tpserve import machine
from tpserve.board import Writer
from tpserve.checkpoint.weights import Dummy, Safetensors, load
from tpserve.child import Charge, Control
from tpserve.codec import MessageError
from tpserve.kernels import memory
from tpserve.kernels.choice import chosen
from tpserve.kernels.interface import Kernels
from tpserve.kernels.native.kernels import NativeKernels
from tpserve.kernels.native.library import Team
from tpserve.kernels.torch_kernels import TorchKernels
from tpserve.limits import most_samples
from tpserve.memory import page_bytes, pages_for, weight_bytes
from tpserve.messages import (
    Hello,
    Loaded,
    Loading,
    Logits,
    Message,
    Ready,
    SampleMasks,
    Serve,
    StepPlan,
    StepResult,
    decode,
    encode,
)
from tpserve.model.decoder import Decoder
from tpserve.parallel.backends import open_collectives
from tpserve.parallel.collectives import Alone, Collectives
from tpserve.parallel.partition import partition
from tpserve.parallel.shared_memory_native import NativeSharedMemory
from tpserve.worker.biases import Biases
from tpserve.worker.lookup import Lookup
from tpserve.worker.native_passes import NativePasses
from tpserve.worker.passes import TORCH
from tpserve.worker.penalties import Penalties
from tpserve.worker.runner import Runner, StepOutcome
from tpserve.worker.sampler import Sampler
from tpserve.worker.scripted import ScriptedDecoder
from tpserve.worker.slots import Slots

logger = logging.getLogger("tpserve")

_IDLE_MS = 500  # how often an idle worker shows that it is alive
_STORAGE = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Worker:
    """Rank `charge.rank`. Everything that depends on the device or on N is a value that is chosen here."""

    def __init__(self, charge: Charge, control: Control, beats: Writer, context: zmq.Context[zmq.Socket[bytes]]):
        self.charge = charge
        self.control = control
        self.beats = beats
        self.context = context
        self.step = 0
        self.deployment = charge.deployment
        self.shard = partition(charge.deployment.spec, charge.deployment.settings.tp)[charge.rank]
        host_cores = os.sched_getaffinity(0)  # of which this rank gets its share now
        self.device = _device(charge)
        # Memory is nearest to the core that touches it first, so no core of another NUMA node helps.
        self.near_cores = host_cores & machine.near(min(os.sched_getaffinity(0)))
        self.storage = _STORAGE[charge.deployment.dtype]
        # float16 products on a CPU are slow and lose range; float32 holds every float16 value.
        self.compute = torch.float32 if (self.device.type, self.storage) == ("cpu", torch.float16) else self.storage
        self.lib = chosen(charge.deployment.native)
        if self.lib is not None and charge.rank == 0:
            logger.info("native kernels: %s", self.lib.name)

    def run(self) -> None:
        """Load, wait for the word to serve, and serve until killed."""
        # Before the long part, in which one rank may be much slower than another.
        collectives = self._collectives()
        decoder = self._load(collectives)
        pages = self._wait_for_serve()
        runner = self._runner(decoder, collectives, pages)
        plans = self.context.socket(zmq.DEALER)
        plans.setsockopt(zmq.IDENTITY, str(self.charge.rank).encode())
        plans.setsockopt(zmq.SNDHWM, 0)
        plans.setsockopt(zmq.RCVHWM, 0)
        plans.connect(self.charge.address("plans"))
        plans.send(encode(Hello(self.charge.rank), self.charge.epoch))
        self.control.send(Ready("worker", self.charge.rank))
        self._serve(runner, plans)

    def _load(self, collectives: Collectives) -> Decoder | ScriptedDecoder:
        deployment, spec, rank = self.deployment, self.deployment.spec, self.charge.rank
        total = weight_bytes(spec, self.shard, deployment.dtype)
        self.control.send(Loading(rank, 0, total))
        source = Dummy(spec) if deployment.settings.load_format == "dummy" else Safetensors(Path(deployment.model_path))

        def progress(done_bytes: int) -> None:
            self.beats.beat()
            self.control.send(Loading(rank, min(done_bytes, total), total))  # norms are kept in a wider type

        if deployment.settings.script is not None:
            return ScriptedDecoder(spec, self.shard, Path(deployment.settings.script))
        kernels = self._kernels(collectives)
        weights = load(spec, self.shard, source, self.device, self.storage, kernels, progress)
        if isinstance(source, Safetensors):
            logger.debug("read %d bytes of tensor slices", source.requested_bytes)
        return Decoder(spec, self.shard, weights, kernels, self.compute)

    def _kernels(self, collectives: Collectives) -> Kernels:
        deployment = self.deployment
        if self.lib is None:
            return TorchKernels(deployment.spec, collectives, self.compute, self.device, deployment.page_size)
        assert isinstance(collectives, Alone | NativeSharedMemory)
        memory.give_back_large_ones()  # weights are packed elsewhere than they are read to
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[:1])  # each thread of the team has a core of its own
        torch.set_num_threads(1)
        return NativeKernels(
            deployment.spec, self.shard, collectives, self.compute, deployment.page_size, Team(self.lib, cores),
            deployment.max_num_batched_tokens, most_samples(deployment.settings, deployment.max_num_seqs),
        )  # fmt: skip

    def _collectives(self) -> Collectives:
        charge, settings = self.charge, self.deployment.settings
        return open_collectives(
            "nccl" if self.device.type == "cuda" else "shared_memory" if self.lib is None else "native",
            charge.rank,
            settings.tp,
            limit_s=settings.step_timeout,
            store_path=f"{charge.run_dir}/group.{charge.epoch}",
            memory_fd=charge.shm_fd,
        )

    def _wait_for_serve(self) -> int:
        self.control.send(Loaded(self.charge.rank, self._possible_pages()))
        while True:
            message = self.control.receive(_IDLE_MS)
            self.beats.beat()
            if isinstance(message, Serve):
                return message.pages

    def _possible_pages(self) -> int:
        """The pages that fit beside the weights: fixed beforehand on a CPU, measured on a GPU."""
        deployment = self.deployment
        if deployment.num_pages is not None:
            return deployment.num_pages
        free, total = torch.cuda.mem_get_info(self.device)
        budget = free - total * (1 - deployment.settings.gpu_memory_utilization)
        return max(0, int(budget // self._page_bytes()))

    def _page_bytes(self) -> int:
        return page_bytes(self.deployment.spec, self.shard, self.deployment.dtype, self.deployment.page_size)

    def _runner(self, decoder: Decoder | ScriptedDecoder, collectives: Collectives, pages: int) -> Runner:
        deployment, spec = self.deployment, self.deployment.spec
        kv_heads = len(self.shard.layers[0].kv_heads)
        shape = (spec.num_layers, 2, pages, kv_heads, deployment.page_size, spec.head_dim)
        pools = self._pools(shape)
        assert pools.nbytes == pages * self._page_bytes()
        passes = TORCH if self.lib is None else NativePasses(self.lib)
        sampler = Sampler(collectives, self.shard.vocab.start, deployment.settings.corrupt_id, passes)
        most = pages_for(deployment.max_model_len, deployment.page_size)
        slots = Slots(deployment.max_num_seqs, most, deployment.page_size, self.device)
        penalties = Penalties(deployment.max_num_seqs, self.shard.vocab, passes)
        biases = Biases(deployment.max_num_seqs, self.shard.vocab)
        lookup = Lookup(deployment.max_num_seqs, deployment.max_model_len) if deployment.settings.speculates else None
        return Runner(decoder, collectives, sampler, slots, penalties, biases, pools, passes, lookup)

    def _pools(self, shape: tuple[int, ...]) -> Tensor:
        if self.device.type == "cpu":
            return memory.touch(memory.zeros(shape, self.storage), self.near_cores)
        return torch.zeros(shape, dtype=self.storage, device=self.device)

    def _serve(self, runner: Runner, plans: zmq.Socket[bytes]) -> None:
        answered, reply_s = time.perf_counter(), 0.0
        while True:
            plan, data = self._receive(plans)
            if not isinstance(plan, StepPlan) or plan.step != self.step + 1:
                raise _unexpected(plan, f"plan {self.step + 1}")
            self.step = plan.step
            self.beats.step(plan.step)
            plan_s = time.perf_counter() - answered
            outcome = runner.step(plan, data, lambda: self._receive_masks(plans))
            done = time.perf_counter()
            self._answer(plans, plan, outcome, (plan_s, reply_s))
            answered = time.perf_counter()
            reply_s = answered - done

    def _receive(self, plans: zmq.Socket[bytes]) -> tuple[Message, bytes]:
        """The coordinator's next message of this epoch, and its wire form."""
        while True:
            if not plans.poll(_IDLE_MS):
                self.beats.beat()
                continue
            data = plans.recv()
            epoch, message = decode(data)
            if epoch == self.charge.epoch:
                return message, data

    def _receive_masks(self, plans: zmq.Socket[bytes]) -> tuple[SampleMasks, bytes]:
        message, data = self._receive(plans)
        if not isinstance(message, SampleMasks) or message.step != self.step:
            raise _unexpected(message, f"the masks of step {self.step}")
        return message, data

    def _answer(self, plans: zmq.Socket[bytes], plan: StepPlan, outcome: StepOutcome, before: tuple[float, float]) -> None:
        rank, epoch = self.charge.rank, self.charge.epoch
        for row in outcome.logits:
            values = row.values.float().cpu().numpy()
            message = Logits(plan.step, rank, row.row, self.shard.vocab.start, len(values), values.reshape(-1))
            plans.send(encode(message, epoch))
        if rank == 0:
            seconds = np.asarray((*before, *outcome.seconds), np.float32)
            result = StepResult(
                step=plan.step,
                ids=outcome.ids.astype(np.int32),
                id_counts=outcome.id_counts,
                drafted=outcome.drafted,
                scores=outcome.scores,
                target_scores=outcome.target_scores,
                seconds=seconds,
                all_reduces=outcome.all_reduces,
                all_gathers=outcome.all_gathers,
            )
            plans.send(encode(result, epoch))


def _unexpected(message: Message, wanted: str) -> MessageError:
    return MessageError(f"expected {wanted}, got {type(message).__name__} {getattr(message, 'step', '')}")


def _device(charge: Charge) -> torch.device:
    """This rank's device, with its share of the cores on a CPU."""
    deployment, rank = charge.deployment, charge.rank
    if deployment.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        return torch.device("cuda", rank % torch.cuda.device_count())
    cores, threads = sorted(os.sched_getaffinity(0)), deployment.threads_per_rank
    os.sched_setaffinity(0, {cores[(rank * threads + thread) % len(cores)] for thread in range(threads)})
    torch.set_num_threads(threads)
    return torch.device("cpu")
