"""What is timed: one attention call, one training step, one prefill; each on one engine."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig

from burst_attention.comm.mesh import CONTEXT, make_mesh
from burst_attention.engines import Engine
from burst_attention.engines.whole import whole_attention
from burst_attention.training.model import NextTokenModel, build_model, plans_for

from .job import Job
from .trace import Trace, traced


class Subject(Protocol):
    """One engine, ready to run again and again."""

    def run(self) -> None:
        """One call: what is timed."""
        ...

    def fingerprint(self) -> list[float]:
        """A few numbers of the last call, alike for every engine that is right. Every rank must call it."""
        ...

    @property
    def sent(self) -> int:
        """Bytes that this rank has sent so far for activations, by its plan's transport."""
        ...

    @property
    def predicted(self) -> int:
        """Bytes that this rank sends in one call."""
        ...


def make_subject(job: Job, engine: Engine, trace: Trace) -> Subject:
    """The subject of ``job`` on ``engine``. Every rank must call it.

    Raises:
        ValueError: the engine can't do it.
    """
    engine.check(job.sizes, job.seq_len, dist.get_world_size())
    if job.task == "attention" and not engine.posts:
        raise ValueError(f"--engine {engine.name} exchanges around the attention, not in it: see train and prefill")
    return AttentionSubject(job, engine, trace) if job.task == "attention" else ModelSubject(job, engine, trace)


def random_qkv(job: Job) -> list[Tensor]:
    """Global q, k, v, dout [1, heads, S, D], the same on every rank."""
    make = torch.Generator().manual_seed(job.seed)
    heads = (job.heads, job.kv_heads, job.kv_heads, job.heads)
    return [torch.randn(1, h, job.seq_len, job.head_dim, generator=make).to(job.torch_dtype) for h in heads]


class AttentionSubject:
    """Causal attention over shards, forward and backward."""

    def __init__(self, job: Job, engine: Engine, trace: Trace) -> None:
        self.plan = traced(engine.plan(job.seq_len, group=None, timeout=job.timeout), trace)
        self.inputs = [self.plan.shard(x, 2) for x in random_qkv(job)]
        self.attend = getattr(engine, "attend", whole_attention)
        self.predicted = sum(engine.sent([self.plan], job.sizes, batch=1, dtype=job.torch_dtype))
        self.results: list[Tensor] = []

    def run(self) -> None:
        self.results = []
        q, k, v = (x.detach().requires_grad_() for x in self.inputs[:3])
        out = self.attend(q, k, v, self.plan)
        self.results = [out.detach(), *torch.autograd.grad(out, (q, k, v), self.inputs[3])]

    def fingerprint(self) -> list[float]:
        squares = torch.stack([x.double().square().sum() for x in self.results])
        dist.all_reduce(squares)
        return squares.sqrt().tolist()

    @property
    def sent(self) -> int:
        return self.plan.transport.sent


class ModelSubject:
    """A Llama of ``job``'s size: an optimizer step on random tokens, or a forward to the next token's logits.

    Args:
        groups: how many groups of ranks each do the same; more than one for the engine that is a rank's own.
    """

    def __init__(self, job: Job, engine: Engine, trace: Trace, *, groups: int = 1) -> None:
        self.job, self.groups = job, groups
        mesh = make_mesh("cpu", data_parallel=groups)
        everyone = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = build_model(
            "tiny", llama_config(job), engine, dtype=job.torch_dtype, mesh=mesh, everyone=everyone, seed=job.seed
        )
        plan = traced(engine.plan(job.seq_len, group=mesh[CONTEXT], timeout=job.timeout), trace)
        self.plans = plans_for(plan, [None], None)
        ids = random_ids(job)
        self.shard = engine.shard({"input_ids": ids, "labels": ids}, self.plans)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        sent = engine.sent([self.plans[None]] * job.layers, job.sizes, batch=1, dtype=job.torch_dtype)
        self.predicted = sum(sent) if job.task == "train" else sent[0]
        self._told: list[float] = []

    def run(self) -> None:
        if self.job.task == "prefill":
            logits = self.logits()
            self._told = [] if logits is None else [logits.double().norm().item()]
            return
        loss = self.backward()
        self._told = [loss, global_norm(self.model)]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def logits(self) -> Tensor | None:
        """Of the next token [1, V], on the rank that holds the last one."""
        logits = self.model.last_logits
        return logits(self.shard, self.plans)

    def backward(self) -> float:
        """The gradients of the mean loss; returns it."""
        loss = self.model(self.shard, self.plans, (self.job.seq_len - 1) * self.groups)
        loss.backward()
        return loss.item()

    def fingerprint(self) -> list[float]:
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, self._told)
        return next(values for values in told if values)

    @property
    def sent(self) -> int:
        return self.plans[None].transport.sent


def random_ids(job: Job) -> Tensor:
    """int64 [1, S], the same on every rank."""
    make = torch.Generator().manual_seed(job.seed)
    return torch.randint(0, job.vocabulary, (1, job.seq_len), generator=make)


def llama_config(job: Job) -> LlamaConfig:
    """A Llama of ``job``'s sizes."""
    return LlamaConfig(
        vocab_size=job.vocabulary,
        hidden_size=job.hidden,
        intermediate_size=job.intermediate,
        num_hidden_layers=job.layers,
        num_attention_heads=job.heads,
        num_key_value_heads=job.kv_heads,
        head_dim=job.head_dim,
        max_position_embeddings=2**20,
        initializer_range=0.0625,
    )


def global_norm(model: NextTokenModel) -> float:
    """Of the gradient of all parameters."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
