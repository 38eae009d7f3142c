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

from burst_attention.attention.call import burst_attention
from burst_attention.attention.hardware import shape_of
from burst_attention.attention.plan import Plan
from burst_attention.launch.join import CONTEXT, TENSOR, make_mesh
from burst_attention.plan.rows import Direction
from burst_train.step.compare import whole_attention
from burst_train.step.model import build_model
from burst_train.strategies import FOREIGN, SINGLE, Sharing, choose

from .trace import Trace, traced
from .workload import Workload, random_qkv


class Fingerprint(NamedTuple):
    """A tensor's product with a random tensor, and the size to which errors are relative.

    All strategies use the same random tensor.
    """

    value: float
    size: float


def shared(spec: str) -> Sharing:
    """Return how ranks share a sequence: a strategy, or ``STRATEGY/tp:N``, by which N neighbours share their tokens.

    ValueError: There is no such strategy, or it has no tensor parallelism.
    """
    name, _, cut = spec.partition("/tp:")
    sharing = choose(name)
    if not cut:
        return sharing
    if not cut.isdecimal() or int(cut) < 1 or name in FOREIGN:
        raise ValueError(f"{spec}: give a strategy of burst attention and a number of ranks, such as auto/tp:2")
    return replace(sharing, name=spec, tensor_parallel=int(cut))


def refusal(workload: Workload, sharing: Sharing) -> str | None:
    """Return why ``sharing`` can't run ``workload`` over these ranks; None if it can."""
    world, cut = dist.get_world_size(), sharing.tensor_parallel
    if world % cut or workload.kv_heads % cut:
        return f"tp:{cut} must divide the {world} ranks and the {workload.kv_heads} key-value heads"
    if cut > 1 and workload.task == "attention":
        return f"--strategies {sharing.name} cuts layers, not attention alone; compare it in train or prefill"
    try:
        sharing.check(workload.sizes.of_rank(cut), workload.seq_len, world // cut)
    except ValueError as error:
        return str(error)
    if workload.task == "attention" and sharing.cuts_layers:
        return f"--strategies {sharing.name} exchanges around attention, not in it; compare it in train or prefill"
    return None


def planned(sharing: Sharing, workload: Workload, group: Any) -> Plan:
    """Return the strategy's plan for the workload."""
    sizes = {"heads": workload.sizes.of_rank(sharing.tensor_parallel), "dtype": workload.torch_dtype}
    rates: Any = workload.rates  # groups of one tensor-parallel axis must choose alike, so they don't measure
    rates = "preset" if rates is None and sharing.tensor_parallel > 1 else rates
    return sharing.plan(workload.seq_len, group=group, timeout=workload.timeout, rates=rates, **sizes)


def in_words(sharing: Sharing, plan: Plan, workload: Workload) -> str | None:
    """Describe what was chosen by ``auto``: layout, Ulysses degree and what circulates; None for other strategies."""
    automatic = sharing.name.partition("/")[0] == "auto"
    if not automatic or plan.world == 1:
        return None
    sizes = workload.sizes.of_rank(sharing.tensor_parallel)
    heads = {"q_heads": sizes.q_heads, "kv_heads": sizes.kv_heads, "head_dim": sizes.head_dim}
    shape = shape_of(workload.torch_dtype, batch=1, **heads)
    return f"{plan.layout}, {plan.planner.decide(plan.schedule, shape)}"


class AttentionSubject:
    """Causal attention over sharded tensors, forward and backward; ``predicted``: bytes that this rank sends in it."""

    def __init__(self, workload: Workload, sharing: Sharing, trace: Trace) -> None:
        self.plan = traced(planned(sharing, workload, None), trace)
        self.workload, self.inputs = workload, random_qkv(workload, self.plan.positions)
        self.attend = _alone if sharing.name == SINGLE else burst_attention
        self.predicted = sum(sharing.sent([self.plan], workload.sizes, batch=1, dtype=workload.torch_dtype))
        self.chosen = in_words(sharing, self.plan, workload)
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

    def __init__(self, workload: Workload, sharing: Sharing, trace: Trace, *, groups: int = 1) -> None:
        self.groups = groups
        self._sharing, self._trace, self._mesh, everyone = sharing, trace, *_meshes(groups, sharing.tensor_parallel)
        self.plan = traced(planned(sharing, workload, self._mesh[CONTEXT]), trace)
        options = {"dtype": workload.torch_dtype, "mesh": self._mesh, "everyone": everyone, "seed": workload.seed}
        options["tensor"] = self._mesh[TENSOR] if sharing.tensor_parallel > 1 else None
        self.model = build_model("tiny", llama_config(workload), sharing, self.plan, **options)
        self.workload, self.batch = workload, random_batch(workload)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0)
        sizes = workload.sizes.of_rank(sharing.tensor_parallel)
        sent = sharing.sent([self.plan] * workload.layers, sizes, batch=1, dtype=workload.torch_dtype)
        self.predicted: int | None = sum(sent) if workload.task == "train" else sent[0]
        if sharing.tensor_parallel > 1:  # its sums are not counted
            self.predicted = None
        self.chosen = in_words(sharing, self.plan, workload)
        self._loss = 0.0
        self._logits: Tensor | None = None

    def run(self) -> None:
        if self.workload.task == "prefill":
            self._logits = self.logits()
            return
        self.optimizer.zero_grad(set_to_none=True)  # before the backward, so that the gradients stay for comparison
        self._loss = self.backward()
        self.optimizer.step()

    def warm_up(self) -> None:
        """Run a call on a few tokens, because FSDP and AdamW create their states on first use."""
        full = self.workload, self.batch
        self.workload = self.workload.at(min(self.workload.seq_len, 32 * dist.get_world_size()))
        self.batch = random_batch(self.workload)
        self.run()
        self.workload, self.batch = full

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Return the next token's logits [1, V]."""
        last: Tensor = self.model(input_ids=self.batch["input_ids"], logits_to_keep=1).logits[:, 0]
        return last

    def backward(self) -> float:
        """Compute the gradients of the mean loss, and return the loss."""
        loss = self.model(**self.batch, num_items_in_batch=(self.workload.seq_len - 1) * self.groups).loss
        loss.backward()
        return float(loss.item())

    def fingerprints(self) -> list[Fingerprint]:
        if self.workload.task == "prefill":
            return [_fingerprint(self._logits, 0)]
        grads: list[Any] = [parameter.grad for parameter in self.model.parameters()]
        return [
            Fingerprint(self._loss, self._loss),
            *(_fingerprint(grad.full_tensor(), n) for n, grad in enumerate(grads)),
        ]

    @property
    def sent(self) -> int:
        return self.plan.transport.sent


Subject = AttentionSubject | ModelSubject


def make_subject(workload: Workload, sharing: Sharing, trace: Trace) -> Subject:
    """Return the subject of ``workload`` with ``sharing``, which must support it. All ranks must call this."""
    return (AttentionSubject if workload.task == "attention" else ModelSubject)(workload, sharing, trace)


@cache
def _meshes(groups: int, cut: int) -> tuple[DeviceMesh, DeviceMesh]:
    """Return meshes of this job's ranks, made once because each opens sockets; all strategies share them."""
    mesh = make_mesh("cpu", data_parallel=groups, tensor_parallel=cut)
    return mesh, init_device_mesh("cpu", (dist.get_world_size(),))


def random_ids(workload: Workload) -> Tensor:
    """Return random token ids, int64 [1, S], the same on every rank."""
    make = torch.Generator().manual_seed(workload.seed)
    return torch.randint(0, workload.vocabulary, (1, workload.seq_len), generator=make)


def random_batch(workload: Workload) -> dict[str, Tensor]:
    """Return :func:`random_ids` as a model's whole batch."""
    ids = random_ids(workload)
    return {"input_ids": ids, "shift_labels": torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)}


def _alone(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
    return whole_attention(q, k, v, (0, plan.seqlen))


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


def _fingerprint(tensor: Any, seed: int) -> Fingerprint:
    make = torch.Generator().manual_seed(seed)
    direction = torch.randn(tensor.shape, generator=make, dtype=torch.float64)
    return Fingerprint((tensor.double() * direction).sum().item(), tensor.double().norm().item())
