"""Predict a rank's memory in a training step before the run starts.

The model's forward, loss and backward run over tensors without data (torch's FakeTensorMode), with the recomputation
and chunking that the flags ask for. The program counts the bytes of live tensors, so no formula for activations is
needed. :mod:`burst_attention.attention.footprint` predicts the attention in the same way.

Formulas give the rest: shards of weights, gradients and moments, weights gathered by FSDP2, and its reduction buffers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from transformers import AutoModelForCausalLM, PreTrainedConfig

from burst_attention.attention.batch import Plans, Reach, mask_of
from burst_attention.attention.checks import caches_results
from burst_attention.attention.footprint import WALKED, LiveBytes, peak_of
from burst_attention.attention.hardware import known_rates, shape_of, usual_rates
from burst_attention.attention.new_plan import single_rank_plan
from burst_attention.attention.operator import FORMULA_VERSION, attend, gradients_wanted
from burst_attention.attention.plan import Plan
from burst_attention.comm.agreement import Agreement
from burst_attention.comm.transport import Transport
from burst_attention.integrations import hf
from burst_attention.integrations.hf.stub_forward import body_of
from burst_attention.kernels.precision import accumulation_dtype
from burst_attention.loss import Head
from burst_attention.loss.tokens import Measurement, measure
from burst_attention.memory.store import MOST_WRITES
from burst_attention.plan.balance import most_tokens
from burst_attention.plan.cost import Shape
from burst_attention.plan.layout import BALANCED
from burst_attention.plan.rows import Direction, Side
from burst_attention.planner.planner import Planner

from ..engines import Engine, Heads, SequenceEngine
from ..engines.body import attention_reaches, hidden_states, run_on_shards, sharded_layers
from ..memory import MemoryConfig
from ..step.activations import keep_less
from ..step.lora import add_adapters
from .step_memory import OVERLAPPING, PARTS


def training_memory(
    config: PreTrainedConfig,
    *,
    engine: Engine,
    seq_len: int,
    world: int,
    groups: int = 1,
    batch: int = 1,
    accumulate: int = 1,
    dtype: torch.dtype,
    memory: MemoryConfig | None = None,
    lora: int | None = None,
) -> dict[str, int] | None:
    """Predict the peak memory of an optimizer step on the rank that needs most.

    Parts of the result, at the moment of the peak:

    - ``weights``, ``gradients``, ``AdamW``: this rank's shards.
    - ``gathered``: tensors that FSDP2 holds whole: weights in use and gradients being reduced.
    - ``activations``: all other tensors of the model's passes.
    - ``attention``: buffers of an attention call, if the peak is in one.
    - ``loss``: logits and their gradients, if the peak is in the loss.

    The process, kernels' workspace and the data set are not counted. With offloading, tensors in host memory are not
    counted either; otherwise all tensors are on one device.

    Args:
        engine: an engine that calls :func:`burst_attention`, or ``single``.
        world: number of all ranks. Each of the ``groups`` of ranks reads different sequences.
        dtype: dtype of the computation.
        memory: options that save memory.
        lora: the rank of adapters, if only they are trained.

    Returns:
        Bytes by part, which add up to the peak; None for other engines, and for experts that don't compute in bfloat16.
    """
    if not isinstance(engine, SequenceEngine) or not (engine.ours or engine.alone):
        return None
    memory = memory or MemoryConfig()
    if _has_experts(config) and dtype != torch.bfloat16:
        return None  # torch's grouped product of tensors without data knows bfloat16 only
    step = live_step(
        config,
        engine=engine,
        seq_len=seq_len,
        world=world,
        groups=groups,
        batch=batch,
        accumulates=accumulate > 1,
        dtype=dtype,
        memory=memory,
        lora=lora,
    )
    return parts_at(step, step.model, world, memory)


def _has_experts(config: PreTrainedConfig) -> bool:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return any(type(part).__name__.endswith("Experts") for part in model.modules())


def live_step(
    config: PreTrainedConfig,
    *,
    engine: SequenceEngine,
    seq_len: int,
    world: int,
    groups: int = 1,
    batch: int = 1,
    accumulates: bool = False,
    dtype: torch.dtype,
    memory: MemoryConfig,
    lora: int | None = None,
    kind: type[LiveStep] | None = None,
) -> LiveStep:
    """Run a step on tensors without data; the arguments are those of :func:`training_memory`.

    Args:
        kind: the class that counts; None: :class:`LiveStep`.
    """
    hf.register()
    # One mode for model and step: a second mode would treat the weights as foreign tensors.
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        model = _without_data(config, dtype, lora).train()
    store = None if memory.offload == "none" else _Elsewhere()
    keep_less(body_of(model), _on_cpu(memory), Agreement(Transport(None)), store=store)
    run_on_shards(model)
    heads = Heads.of(config)
    sizes = {"q_heads": max(1, heads.q_heads), "kv_heads": max(1, heads.kv_heads), "head_dim": heads.head_dim}
    sharing = world // groups
    if engine.strategy.layout == BALANCED:  # as if all ranks held as many tokens as the fullest one may
        seq_len = sharing * most_tokens(seq_len, sharing)
    schedules = _Schedules(engine, seq_len, sharing, shape_of(dtype, batch=batch, **sizes))
    windows = attention_reaches(model)
    cuts = {window: schedules.split(window) for window in {*windows}} if memory.attention_chunks == 1 else None
    chunks = memory.attention_chunks
    calls = _calls(heads.of_chunk(chunks), {*windows}, schedules, batch, dtype, chunks) if windows else {}
    step = (kind or LiveStep)(model, world, calls, cuts, accumulates=accumulates)
    with fake, step:
        step.run(batch, schedules.most_tokens, windows)
    return step


def _without_data(config: PreTrainedConfig, dtype: torch.dtype, lora: int | None) -> Any:
    """Return the model; call it with the mode active."""
    options: dict[str, Any] = {"attn_implementation": hf.NAME, "dtype": dtype}
    if lora is None:
        return AutoModelForCausalLM.from_config(config, **options)
    with unset_fake_temporarily(), torch.device("meta"):  # PEFT moves weights, which the mode's tensors don't allow
        model = AutoModelForCausalLM.from_config(config, **options)
        add_adapters(model, lora)
    model.to_empty(device="cpu")
    model.tie_weights()
    return model


def _on_cpu(memory: MemoryConfig) -> MemoryConfig:
    """Keep only the options that change which tensors the model creates.

    Copies in host memory are not counted, and compilation creates fewer tensors.
    """
    return replace(memory, offload="none", compile=False)


@dataclass(frozen=True)
class _Schedules:
    """The schedules of an engine's ranks, as far as memory depends on them."""

    engine: SequenceEngine
    seq_len: int
    world: int
    shape: Shape  # of an attention call

    @property
    def most_tokens(self) -> int:
        """The tokens of the fullest rank."""
        return max(self.of(None, 0).layout.lengths)

    def of(self, window: Reach, rank: int) -> Any:
        """Return the schedule of ``rank`` for layers with this window."""
        # Packed documents never need more memory than one document.
        asked = self.engine.strategy
        route = "direct" if asked.route == "auto" else asked.route
        strategy = replace(asked, layout=asked.layout.removesuffix("-per-document"), route=route)
        mask = mask_of(window, self.seq_len, None)
        return self.planner.choose(self.seq_len, mask=mask, strategy=strategy, rank=rank, world=self.world)

    def split(self, window: Reach) -> tuple[int, int]:
        """Return (Ulysses degree, rows of its sequence group that the rank with most tokens caches)."""
        lengths = self.of(window, 0).layout.lengths
        schedule = self.of(window, lengths.index(max(lengths)))
        groups, _ = self.planner.decide(schedule, self.shape)
        return groups.query, schedule.slice_length(groups) if groups.keep else 0

    @cached_property
    def planner(self) -> Planner:
        """The planner that chooses the schedules and what a rank caches."""
        found = known_rates(None, on_gpus=False, world=self.world)
        rates = found or usual_rates(on_gpus=False)
        return Planner(rates, None, self.shape, found is None, self.engine.remat)

    @property
    def ranks(self) -> Sequence[int]:
        """A sample of ranks, spread evenly over the group."""
        walked = min(self.world, WALKED)
        return sorted({n * (self.world - 1) // max(1, walked - 1) for n in range(walked)})


def _calls(
    heads: Heads, windows: Iterable[Reach], schedules: _Schedules, batch: int, dtype: torch.dtype, chunks: int
) -> dict[tuple[Reach, Direction], int]:
    """Return the bytes of an attention call at its peak, without its inputs, by window and direction.

    With several ``chunks`` of heads, a call is one chunk's with its ``heads``, and its neighbours are on the wire.
    """
    shape = replace(schedules.shape, q_heads=heads.q_heads, kv_heads=heads.kv_heads)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    token = batch * dtype.itemsize * heads.head_dim
    lse_and_out = token + batch * wide.itemsize
    results = heads.q_heads * (token + lse_and_out)  # out and its gradient, and lse
    calls = {}
    for window in windows:
        for direction in Direction:
            beside = []
            for rank in schedules.ranks:
                schedule = schedules.of(window, rank)
                tokens = schedule.layout.lengths[rank]
                held = tokens * token * (heads.q_heads + 2 * heads.kv_heads)
                chosen = schedules.planner.decide(schedule, shape, caches=chunks == 1, lse="sinks" in heads.options)
                groups = chosen.groups
                if direction is Direction.BACKWARD:
                    if groups.keep:  # the cached tensors of the sequence group replace q, k and v
                        of_slice = heads.q_heads // groups.query + 2 * (heads.kv_heads // groups.key)
                        held = schedule.slice_length(groups) * token * of_slice
                    if groups.results:  # so do its out and lse
                        held += schedule.slice_length(groups) * (heads.q_heads // groups.query) * lse_and_out
                        held += tokens * heads.q_heads * token
                    else:
                        held += tokens * (results if chunks == 1 else heads.q_heads * token)
                peak = peak_of(schedule, shape, dtype, chosen, direction, calls=min(chunks, OVERLAPPING))
                beside.append(peak - held)
            calls[window, direction] = max(0, *beside)
    return calls


@dataclass
class Peak:
    bytes: int = 0
    attention: int = 0
    gradients: int = 0
    phase: str = ""


class LiveStep(LiveBytes):
    """Count the bytes of live tensors while a model without data runs one step.

    Every read of a tensor's value gives 1.

    Args:
        calls: result of :func:`_calls`.
        cuts: results of :meth:`_Schedules.split`, by window; None with attention in chunks of heads.
        accumulates: whether accumulated gradients exist before the step.
    """

    def __init__(
        self,
        model: nn.Module,
        world: int,
        calls: Mapping[tuple[Reach, Direction], int],
        cuts: Mapping[Reach, tuple[int, int]] | None,
        *,
        accumulates: bool,
    ) -> None:
        self._phase, self._gradients = "", 0
        super().__init__()
        self.model: Any = model
        self.peak, self.before_loss = Peak(), 0
        self._world, self._calls, self._cuts, self._accumulates = world, calls, cuts, accumulates
        self._reaches: dict[int, Reach] = {}  # by the handle of the plan
        self.leave_out(model.parameters())
        self.leave_out(model.buffers())

    def run(self, batch: int, tokens: int, windows: Sequence[Reach]) -> None:
        """Run forward, loss and backward over ``tokens`` tokens per sequence; call it with this mode active."""
        model, out = self.model, self.model.get_output_embeddings()
        whole = single_rank_plan(tokens)
        plans = Plans({reach: whole.with_mask(mask_of(reach, tokens, None)) for reach in {None, *windows}})
        self._reaches = {plan.handle: reach for reach, plan in plans.items()}
        self._sum_by_group()
        ids = torch.zeros(batch, tokens, dtype=torch.int64)
        self._phase = "forward"
        attend = _Simulated(self) if self._cuts is None else self._attend
        hidden = hidden_states(model, {"input_ids": ids, "position_ids": ids}, plans, attend)  # type: ignore[arg-type]
        self._phase, self.before_loss = "loss", self.alive()
        hidden.register_hook(self._enter_backward)
        measurement = Measurement("training_memory", Head(out.weight).form)
        _, log_probs = measure(hidden, Head(out.weight, out.bias), ids, -100, measurement)
        del hidden
        loss = -log_probs.sum()
        del log_probs
        loss.backward()

    def _enter_backward(self, _: Tensor) -> None:
        self._phase = "backward"

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: Plan,
        *,
        scale: float | None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Call the operator as :func:`burst_attention` does on several ranks, although this plan has one."""
        assert self._cuts is not None
        heads, cached_rows = self._cuts[self._reaches[plan.handle]]
        results = caches_results(heads, cached_rows, self._world, sinks=sinks, return_lse=False)
        split = {"heads": heads, "cached_rows": cached_rows, "cached_results": results}
        split["wanted"] = gradients_wanted(q, k, v, sinks)
        open_ = {"scale": scale, "softcap": softcap, "kernel": "auto", "return_lse": False}
        return attend(q, k, v, sinks, handle=plan.handle, **split, **open_, formula_version=FORMULA_VERSION)[0]

    def _sum_by_group(self) -> None:
        """Replace gradients by their shards once an FSDP2 group has all of its gradients."""
        groups = [[*layer.parameters()] for layer in sharded_layers(self.model)]
        inside = {id(p) for group in groups for p in group}
        groups.append([p for p in self.model.parameters() if id(p) not in inside])
        for group in groups:
            trained = [p for p in group if p.requires_grad]
            awaited = {id(p) for p in trained}
            for p in trained:
                p.register_post_accumulate_grad_hook(lambda p, g=trained, left=awaited: self._sum(p, g, left))

    def _sum(self, parameter: Tensor, group: Sequence[Tensor], left: set[int]) -> None:
        left.discard(id(parameter))
        if left:
            return
        # FSDP2 copies the gradients into one fp32 buffer; with several ranks a second one receives the others' parts.
        flat = sum(p.numel() for p in group) * 4
        self.expect(flat if self._world == 1 else 2 * flat)
        for p in group:
            p.grad = None
        if not self._accumulates:
            self._gradients += sum(shard_of(p, self._world) for p in group)

    def leave_out(self, tensors: Any) -> None:
        """Exclude these tensors from the count."""
        super()._see([*tensors])
        self._live = {key: (ref, 0) for key, (ref, _) in self._live.items()}
        self.most = self._now = 0

    def alive(self) -> int:
        """Return the bytes of all live tensors."""
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        self._now = sum(size for _, size in self._live.values())
        return self._now

    def expect(self, more: int, *, attention: bool = False) -> None:
        """Record a peak if ``more`` bytes in addition to the live tensors exceed it."""
        if self._now + self._gradients + more > self.peak.bytes:
            now = self.alive() + self._gradients + more
            if now > self.peak.bytes:
                self.peak = Peak(now, more if attention else 0, self._gradients, self._phase)

    def expect_call(self, direction: Direction) -> None:
        """Record a peak in one chunk's attention, of the layers whose attention needs most."""
        self.expect(max(self._calls[window, side] for window, side in self._calls if side is direction), attention=True)

    def _see(self, tensors: Any) -> None:
        super()._see(tensors)
        if self._phase:
            self.expect(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0
        if func is torch.ops.aten.nonzero.default:  # asks which tokens have a label: assume all
            rows = args[0].new_empty(args[0].numel(), args[0].dim(), dtype=torch.int64)
            self._see(rows)
            return rows
        for operator, direction, handle in (
            (torch.ops.burst_attention.attend.default, Direction.FORWARD, 4),
            (torch.ops.burst_attention.attend_backward.default, Direction.BACKWARD, 9),
        ):
            if func is operator:
                self.expect(self._calls[self._reaches[args[handle]], direction], attention=True)
        return super().__torch_dispatch__(func, types, args, kwargs)


@dataclass(frozen=True)
class _Simulated:
    """Stands for :func:`burst_attention` in chunks of heads: allocates results, and computes nothing."""

    step: LiveStep

    def sweeps(self, passes: Iterable[tuple[Any, Any]], *_: Any, **__: Any) -> Iterator[dict[Side, Any]]:
        """Record each pass's peak, and yield its results."""
        for _, work in passes:
            self.step.expect_call(work.direction)
            q, k, v = work.q, work.k, work.v
            wide = accumulation_dtype(q.dtype)
            if work.direction is Direction.FORWARD:
                yield {Side.QUERY: (q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=wide))}
            else:
                yield {
                    Side.QUERY: (torch.empty_like(q, dtype=wide),),
                    Side.KEY: (torch.empty_like(k, dtype=wide), torch.empty_like(v, dtype=wide)),
                }


class _Elsewhere:
    """A store without data: it holds tensors on the device as long as real stores do."""

    def __init__(self) -> None:
        self._writes = deque[Tensor](maxlen=MOST_WRITES)
        self._ahead: tuple[Any, Tensor] | None = None

    def put(self, x: Tensor) -> Any:
        """Hold ``x`` until it counts as written; return a function that makes it again."""
        self._writes.append(x.detach())
        return partial(torch.empty, x.shape, dtype=x.dtype)

    def fetch(self, ticket: Any) -> None:
        """Make the tensor ahead."""
        self._writes.clear()
        self._ahead = ticket, ticket()

    def get(self, ticket: Any) -> Tensor:
        """Return the tensor."""
        (ahead, x), self._ahead = self._ahead or (None, None), None
        return x if ahead is ticket and x is not None else ticket()

    def free(self, ticket: Any) -> None:
        """Do nothing: a ticket holds no data."""


def shard_of(parameter: Tensor, world: int) -> int:
    """Return the bytes of a weight's largest shard in fp32 (fp64); its gradient's shard is as large."""
    rows = -(-parameter.shape[0] // world)
    return rows * (parameter.numel() // max(1, parameter.shape[0])) * max(4, parameter.dtype.itemsize)


def parts_at(step: Any, model: Any, world: int, memory: MemoryConfig) -> dict[str, int]:
    """Return the bytes of each of ``PARTS`` on the rank that needs most, from the peak of a step without data."""
    weights = sum(shard_of(p, world) for p in model.parameters())
    trained = [shard_of(p, world) for p in model.parameters() if p.requires_grad]
    most = sum(trained)
    layers = [sum(p.numel() * p.dtype.itemsize for p in layer.parameters()) for layer in sharded_layers(model)]
    whole = sum(p.numel() * p.dtype.itemsize for p in model.parameters())
    # The root's weights are always gathered; with them one layer's, and those of the next layer as they arrive.
    gathered = whole - sum(layers) + 2 * max(layers, default=0)
    peak, gradients = step.peak, most if step._accumulates else step.peak.gradients
    loss = peak.bytes - peak.gradients - step.before_loss if peak.phase == "loss" else 0
    held = peak.bytes - peak.gradients - peak.attention - loss
    moments = most // 2 if memory.optimizer == "adamw-8bit" else 2 * most
    parts = [weights, gradients, moments, gathered, held, peak.attention, loss]
    # AdamW's update needs all gradients and two temporaries (root and quotient) of one weight at a time.
    update = moments + 2 * max(trained)
    if weights + most + update > sum(parts):
        parts = [weights, most, update, 0, 0, 0, 0]
    predicted = dict(zip(PARTS, parts, strict=True))
    if memory.optimizer_offload:
        predicted |= dict.fromkeys(("weights", "gradients", "AdamW"), 0)
    return predicted
