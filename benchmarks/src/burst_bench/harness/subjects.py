"""The timed calls: one attention call, one training step, or one prefill, on one strategy."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import LlamaConfig

from burst_attention.attention.batch import Plans
from burst_attention.attention.hardware import shape_of
from burst_attention.attention.plan import Plan
from burst_attention.launch.join import CONTEXT, TENSOR, make_mesh
from burst_attention.plan.rows import Direction
from burst_train.parallel import Parallelism, SequenceParallelism, choose
from burst_train.parallel.contract import whole_attention
from burst_train.step.model import build_model

from .trace import Trace, traced
from .workload import Workload, random_qkv


class Fingerprint(NamedTuple):
    """A tensor's product with a random tensor, and the size to which errors are relative.

    All strategies use the same random tensor.
    """

    value: float
    size: float


def shared(spec: str) -> Parallelism:
    """Return how ranks share a sequence: a strategy, or ``STRATEGY/tp:N``, by which N neighbours share their tokens.

    ValueError: There is no such strategy, or it has no tensor parallelism.
    """
    name, _, cut = spec.partition("/tp:")
    parallelism = choose(name)
    if not cut:
        return parallelism
    if not cut.isdecimal() or int(cut) < 1 or not isinstance(parallelism, SequenceParallelism) or parallelism.alone:
        raise ValueError(f"{spec}: give a strategy of burst attention and a number of ranks, such as auto/tp:2")
    return replace(parallelism, name=spec, tensor_parallel=int(cut))


def _cut(parallelism: Parallelism) -> int:
    """Return how many ranks share their tokens and cut the layers."""
    return getattr(parallelism, "tensor_parallel", 1)


def refusal(workload: Workload, parallelism: Parallelism) -> str | None:
    """Return why ``parallelism`` can't run ``workload`` over these ranks; None if it can."""
    world, cut = dist.get_world_size(), _cut(parallelism)
    if world % cut or workload.kv_heads % cut:
        return f"tp:{cut} must divide the {world} ranks and the {workload.kv_heads} key-value heads"
    if cut > 1 and workload.task == "attention":
        return f"--strategies {parallelism.name} cuts layers, not attention alone; compare it in train or prefill"
    try:
        parallelism.check(workload.sizes.of_rank(cut), workload.seq_len, world // cut)
    except ValueError as error:
        return str(error)
    if workload.task == "attention" and not parallelism.posts:
        return f"--strategies {parallelism.name} exchanges around attention, not in it; compare it in train or prefill"
    return None


def planned(parallelism: Parallelism, workload: Workload, group: Any) -> Plan:
    """Return the strategy's plan for the workload."""
    sizes = {"heads": workload.sizes.of_rank(_cut(parallelism)), "dtype": workload.torch_dtype}
    rates: Any = workload.rates  # groups of one tensor-parallel axis must choose alike, so they don't measure
    rates = "preset" if rates is None and _cut(parallelism) > 1 else rates
    return parallelism.plan(workload.seq_len, group=group, timeout=workload.timeout, rates=rates, **sizes)


def in_words(parallelism: Parallelism, plan: Plan, workload: Workload) -> str | None:
    """Describe what was chosen by ``auto``: layout, Ulysses degree and what circulates; None for other strategies."""
    automatic = parallelism.name.partition("/")[0] == "auto"
    if not isinstance(parallelism, SequenceParallelism) or not automatic or plan.world == 1:
        return None
    sizes = workload.sizes.of_rank(_cut(parallelism))
    heads = {"q_heads": sizes.q_heads, "kv_heads": sizes.kv_heads, "head_dim": sizes.head_dim}
    shape = shape_of(workload.torch_dtype, batch=1, **heads)
    return f"{plan.layout}, {plan.planner.decide(plan.schedule, shape)}"


class AttentionSubject:
    """Causal attention over sharded tensors, forward and backward; ``predicted``: bytes that this rank sends in it."""

    def __init__(self, workload: Workload, parallelism: Parallelism, trace: Trace) -> None:
        self.plan = traced(planned(parallelism, workload, None), trace)
        self.workload, self.inputs = workload, random_qkv(workload, self.plan.positions)
        self.attend = getattr(parallelism, "attend", whole_attention)
        self.predicted = sum(parallelism.sent([self.plan], workload.sizes, batch=1, dtype=workload.torch_dtype))
        self.chosen = in_words(parallelism, self.plan, workload)
        self.results: list[Tensor] = []

    def run(self) -> None:
        """Run one call; this is timed."""
        self.results = []
        q, k, v = (x.detach().requires_grad_() for x in self.inputs[:3])
        out = self.attend(q, k, v, self.plan)
        self.results = [out.detach(), *torch.autograd.grad(out, (q, k, v), self.inputs[3])]

    def warm_up(self) -> None:
        """Prepare everything that is made on first use, without a whole call."""
        schedule, sizes = self.plan.schedule, self.workload.sizes
        heads = {"q_heads": sizes.q_heads, "kv_heads": sizes.kv_heads, "head_dim": sizes.head_dim}
        shape = shape_of(self.workload.torch_dtype, batch=1, **heads)
        groups, circulate = self.plan.planner.decide(schedule, shape)
        assert all(schedule.program(circulate, direction, groups) for direction in Direction)

    def fingerprints(self) -> list[Fingerprint]:
        """Return fingerprints of the last results; all correct strategies have equal ones. Every rank must call it."""
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
        """Return the bytes of activations that this rank's transport has sent so far."""
        return self.plan.transport.sent


class ModelSubject:
    """A Llama of ``workload``'s size: an optimizer step on random tokens, or a forward to the next token's logits.

    The learning rate is 0, so that the whole step is computed and the loss and gradients of all calls can be compared.
    ``groups``: of ranks that each compute the same; more than one for the strategy ``single``.
    """

    def __init__(self, workload: Workload, parallelism: Parallelism, trace: Trace, *, groups: int = 1) -> None:
        self.groups = groups
        self._parallelism, self._trace, self._mesh, everyone = parallelism, trace, *_meshes(groups, _cut(parallelism))
        options = {"dtype": workload.torch_dtype, "mesh": self._mesh, "everyone": everyone, "seed": workload.seed}
        options["tensor"] = self._mesh[TENSOR] if _cut(parallelism) > 1 else None
        self.model = build_model("tiny", llama_config(workload), parallelism, **options)
        self._take(workload)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0)
        sizes = workload.sizes.of_rank(_cut(parallelism))
        sent = parallelism.sent([self.plans[None]] * workload.layers, sizes, batch=1, dtype=workload.torch_dtype)
        self.predicted: int | None = sum(sent) if workload.task == "train" else sent[0]
        if _cut(parallelism) > 1:  # its sums are not counted
            self.predicted = None
        self.chosen = in_words(parallelism, self.plans[None], workload)
        self._loss = 0.0
        self._logits: Tensor | None = None

    def _take(self, workload: Workload) -> None:
        """Set the tokens of the next calls."""
        plan = planned(self._parallelism, workload, self._mesh[CONTEXT])
        self.workload, self.plans = workload, Plans.by_windows(traced(plan, self._trace), [None], None)
        ids = random_ids(workload)
        self.shard = self._parallelism.shard({"input_ids": ids, "labels": ids}, self.plans)

    def run(self) -> None:
        if self.workload.task == "prefill":
            self._logits = self.logits()
            return
        self.optimizer.zero_grad(set_to_none=True)  # before the backward, so that the gradients stay for comparison
        self._loss = self.backward()
        self.optimizer.step()

    def warm_up(self) -> None:
        """Run a call on a few tokens, because FSDP and AdamW create their states on first use."""
        full = self.workload, self.plans, self.shard
        self._take(self.workload.at(min(self.workload.seq_len, 32 * dist.get_world_size())))
        self.run()
        self.workload, self.plans, self.shard = full

    @torch.no_grad()
    def logits(self) -> Tensor | None:
        """Return the next token's logits [1, V], on the rank that holds the last token."""
        return self.model.last_logits(self.shard, self.plans)

    def backward(self) -> float:
        """Compute the gradients of the mean loss, and return the loss."""
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


Subject = AttentionSubject | ModelSubject


def make_subject(workload: Workload, parallelism: Parallelism, trace: Trace) -> Subject:
    """Return the subject of ``workload`` with ``parallelism``, which must support it. All ranks must call this."""
    return (AttentionSubject if workload.task == "attention" else ModelSubject)(workload, parallelism, trace)


@cache
def _meshes(groups: int, cut: int) -> tuple[DeviceMesh, DeviceMesh]:
    """Return meshes of this job's ranks, made once because each opens sockets; all strategies share them."""
    mesh = make_mesh("cpu", data_parallel=groups, tensor_parallel=cut)
    return mesh, init_device_mesh("cpu", (dist.get_world_size(),))


def random_ids(workload: Workload) -> Tensor:
    """Return random token ids, int64 [1, S], the same on every rank."""
    make = torch.Generator().manual_seed(workload.seed)
    return torch.randint(0, workload.vocabulary, (1, workload.seq_len), generator=make)


def llama_config(workload: Workload) -> LlamaConfig:
    """Return the configuration of a Llama of ``workload``'s sizes."""
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
    """Return, on every rank, the logits of the rank with the last token."""
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, logits)
    return next(x for x in by_rank if x is not None)


def _fingerprint(tensor: Tensor, seed: int) -> Fingerprint:
    make = torch.Generator().manual_seed(seed)
    direction = torch.randn(tensor.shape, generator=make, dtype=torch.float64)
    return Fingerprint((tensor.double() * direction).sum().item(), tensor.double().norm().item())
