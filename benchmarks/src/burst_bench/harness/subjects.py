"""What is timed: one attention call, one training step, one prefill; each on one engine."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from burst_train.engines import Engine, SequenceEngine
from burst_train.engines.whole import whole_attention
from burst_train.step.model import build_model
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import LlamaConfig

from burst_attention.attention.batch import Plans
from burst_attention.attention.hardware import shape_of
from burst_attention.attention.plan import Plan
from burst_attention.launch.mesh import CONTEXT, make_mesh
from burst_attention.plan.assignment import TRAVELS
from burst_attention.plan.rows import Direction
from burst_attention.planner.choice import Candidate

from .trace import Trace, traced
from .workload import Workload, random_qkv


class Fingerprint(NamedTuple):
    """A tensor's product with a random one, the same for every engine, and the size that its error is measured by."""

    value: float
    size: float


class Subject(Protocol):
    """One engine, ready to run again and again."""

    def run(self) -> None:
        """One call: what is timed."""
        ...

    def warm_up(self) -> None:
        """Make what is made on first use, without a whole call."""
        ...

    def fingerprints(self) -> list[Fingerprint]:
        """Of the last call's results, alike for every engine that is right. Every rank must call it."""
        ...

    @property
    def sent(self) -> int:
        """Bytes that this rank has sent so far for activations, by its plan's transport."""
        ...

    @property
    def predicted(self) -> int:
        """Bytes that this rank sends in one call."""
        ...

    @property
    def chosen(self) -> str | None:
        """:func:`in_words`."""
        ...


def refusal(workload: Workload, engine: Engine) -> str | None:
    """Why ``engine`` can't do ``workload`` over the ranks at hand; None if it can."""
    try:
        engine.check(workload.sizes, workload.seq_len, dist.get_world_size())
    except ValueError as error:
        return str(error)
    if workload.task == "attention" and not engine.posts:
        return f"--engine {engine.name} exchanges around the attention, not in it: see train and prefill"
    return None


def planned(engine: Engine, workload: Workload, group: Any) -> Plan:
    """The engine's plan for the workload."""
    sizes = {"heads": workload.sizes, "dtype": workload.torch_dtype}
    return engine.plan(workload.seq_len, group=group, timeout=workload.timeout, rates=workload.rates, **sizes)


def in_words(engine: Engine, plan: Plan, workload: Workload) -> str | None:
    """What burst's plan came to: its layout, how heads are cut, what travels; None of an engine that has no choice."""
    if not isinstance(engine, SequenceEngine) or engine.name != "burst" or plan.world == 1:
        return None
    sizes = workload.sizes
    heads = {"q_heads": sizes.q_heads, "kv_heads": sizes.kv_heads, "head_dim": sizes.head_dim}
    shape, travels = shape_of(workload.torch_dtype, batch=1, **heads), engine.travels or "auto"
    return f"{plan.layout}, {Candidate(*plan.schedule.decide(shape, travels))}"


def make_subject(workload: Workload, engine: Engine, trace: Trace) -> Subject:
    """The subject of ``workload`` on ``engine``, which can do it. Every rank must call it."""
    return (
        AttentionSubject(workload, engine, trace)
        if workload.task == "attention"
        else ModelSubject(workload, engine, trace)
    )


class AttentionSubject:
    """Causal attention over shards, forward and backward."""

    def __init__(self, workload: Workload, engine: Engine, trace: Trace) -> None:
        self.plan = traced(planned(engine, workload, None), trace)
        self.workload, self.inputs = workload, random_qkv(workload, self.plan.positions)
        self.attend = getattr(engine, "attend", whole_attention)
        self.predicted = sum(engine.sent([self.plan], workload.sizes, batch=1, dtype=workload.torch_dtype))
        self.chosen = in_words(engine, self.plan, workload)
        self.results: list[Tensor] = []

    def run(self) -> None:
        self.results = []
        q, k, v = (x.detach().requires_grad_() for x in self.inputs[:3])
        out = self.attend(q, k, v, self.plan)
        self.results = [out.detach(), *torch.autograd.grad(out, (q, k, v), self.inputs[3])]

    def warm_up(self) -> None:
        schedule, sizes = self.plan.schedule, self.workload.sizes
        heads = {"q_heads": sizes.q_heads, "kv_heads": sizes.kv_heads, "head_dim": sizes.head_dim}
        shape = shape_of(self.workload.torch_dtype, batch=1, **heads)
        for asked in ("auto", *TRAVELS):  # the programs of all, for it is the attention that chooses
            groups, travels = schedule.decide(shape, asked)
            assert all(schedule.program(travels, direction, groups) for direction in Direction)

    def fingerprints(self) -> list[Fingerprint]:
        positions = self.plan.positions
        totals = torch.zeros(len(self.results), 2, dtype=torch.float64)
        for n, result in enumerate(self.results):
            make = torch.Generator().manual_seed(n)
            by_position = torch.randn(self.plan.seqlen, generator=make, dtype=torch.float64)[positions]
            by_number = torch.randn(result.shape[1], result.shape[3], generator=make, dtype=torch.float64)
            product = torch.einsum("bhsd,s,hd->", result.double(), by_position, by_number)
            totals[n] = torch.stack([product, result.double().square().sum()])
        dist.all_reduce(totals)
        return [Fingerprint(value.item(), size.sqrt().item()) for value, size in totals]

    @property
    def sent(self) -> int:
        return self.plan.transport.sent


class ModelSubject:
    """A Llama of ``workload``'s size: an optimizer step on random tokens, or a forward to the next token's logits.

    The step is of rate 0: all of it is computed, and every call's loss and gradients can be compared.

    Args:
        groups: how many groups of ranks each do the same; more than one for the engine that is a rank's own.
    """

    def __init__(self, workload: Workload, engine: Engine, trace: Trace, *, groups: int = 1) -> None:
        self.groups = groups
        self._engine, self._trace, self._mesh, everyone = engine, trace, *_meshes(groups)
        options = {"dtype": workload.torch_dtype, "mesh": self._mesh, "everyone": everyone, "seed": workload.seed}
        self.model = build_model("tiny", llama_config(workload), engine, **options)
        self._take(workload)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0)
        sent = engine.sent([self.plans[None]] * workload.layers, workload.sizes, batch=1, dtype=workload.torch_dtype)
        self.predicted = sum(sent) if workload.task == "train" else sent[0]
        self.chosen = in_words(engine, self.plans[None], workload)
        self._loss = 0.0
        self._logits: Tensor | None = None

    def _take(self, workload: Workload) -> None:
        """Compute these tokens from now on."""
        plan = planned(self._engine, workload, self._mesh[CONTEXT])
        self.workload, self.plans = workload, Plans.by_windows(traced(plan, self._trace), [None], None)
        ids = random_ids(workload)
        self.shard = self._engine.shard({"input_ids": ids, "labels": ids}, self.plans)

    def run(self) -> None:
        if self.workload.task == "prefill":
            self._logits = self.logits()
            return
        self.optimizer.zero_grad(set_to_none=True)  # first, so that the gradients are there to be looked at
        self._loss = self.backward()
        self.optimizer.step()

    def warm_up(self) -> None:
        """A step, or a forward, on a few tokens: FSDP and AdamW make their states on first use."""
        full = self.workload, self.plans, self.shard
        self._take(self.workload.at(min(self.workload.seq_len, 32 * dist.get_world_size())))
        self.run()
        self.workload, self.plans, self.shard = full

    @torch.no_grad()
    def logits(self) -> Tensor | None:
        """Of the next token [1, V], on the rank that holds the last one."""
        return self.model.last_logits(self.shard, self.plans)

    def backward(self) -> float:
        """The gradients of the mean loss; returns it."""
        loss = self.model(self.shard, self.plans, (self.workload.seq_len - 1) * self.groups)
        loss.backward()
        return loss.item()

    def fingerprints(self) -> list[Fingerprint]:
        if self.workload.task == "prefill":
            return [_fingerprint(whole_logits(self._logits), 0)]
        grads: list[Any] = [parameter.grad for parameter in self.model.parameters()]
        return [
            Fingerprint(self._loss, self._loss),
            *(_fingerprint(grad.full_tensor(), n) for n, grad in enumerate(grads)),
        ]

    @property
    def sent(self) -> int:
        return self.plans[None].transport.sent


@cache
def _meshes(groups: int) -> tuple[DeviceMesh, DeviceMesh]:
    """Of this process's ranks, made once: each has sockets, and no engine is given groups of its own."""
    return make_mesh("cpu", data_parallel=groups), init_device_mesh("cpu", (dist.get_world_size(),))


def random_ids(workload: Workload) -> Tensor:
    """int64 [1, S], the same on every rank."""
    make = torch.Generator().manual_seed(workload.seed)
    return torch.randint(0, workload.vocabulary, (1, workload.seq_len), generator=make)


def llama_config(workload: Workload) -> LlamaConfig:
    """A Llama of ``workload``'s sizes."""
    return LlamaConfig(
        vocab_size=workload.vocabulary,
        hidden_size=workload.hidden,
        intermediate_size=workload.intermediate,
        num_hidden_layers=workload.layers,
        num_attention_heads=workload.heads,
        num_key_value_heads=workload.kv_heads,
        head_dim=workload.head_dim,
        max_position_embeddings=2**20,
        initializer_range=0.0625,
    )


def whole_logits(logits: Tensor | None) -> Tensor:
    """On every rank what the rank that holds the last token has."""
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, logits)
    return next(x for x in by_rank if x is not None)


def _fingerprint(tensor: Tensor, seed: int) -> Fingerprint:
    make = torch.Generator().manual_seed(seed)
    direction = torch.randn(tensor.shape, generator=make, dtype=torch.float64)
    return Fingerprint((tensor.double() * direction).sum().item(), tensor.double().norm().item())
