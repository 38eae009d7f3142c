"""The memory of a training step, foretold for a rank before anything starts.

The model itself is run, forward, loss and backward, over tensors without data (torch's FakeTensorMode), recomputed and
by pieces as the flags ask, and what is alive is counted tensor by tensor: no second account of activations to keep.
The attention is foretold the same way by :mod:`burst_attention.attention.footprint`, which runs the sweep. By formula
are: shards of weights, gradients and moments, weights that FSDP2 gathers, and its buffers when it sums gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, PreTrainedConfig

from burst_attention import Mask
from burst_attention.attention.batch import Plans
from burst_attention.attention.footprint import WALKED, LiveBytes, peak_of
from burst_attention.attention.hardware import guessed, resolve_rates, shape_of
from burst_attention.attention.operator import FORMULA_VERSION, attend, gradients_wanted
from burst_attention.attention.plan import Plan, lone_plan, plan_of
from burst_attention.integrations import hf
from burst_attention.loss import Head
from burst_attention.loss.tokens import Measurement, measure
from burst_attention.plan.cost import Shape
from burst_attention.plan.rows import Direction
from burst_attention.planner.choice import Planner
from burst_attention.planner.schedule import make_schedule

from ..engines import Engine, Heads, SequenceEngine
from ..memory import MemoryConfig
from ..step.activations import keep_less

PARTS = ("weights", "gradients", "AdamW", "gathered", "activations", "attention", "loss")


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
) -> dict[str, int] | None:
    """Bytes at the peak of an optimizer step by part, on the rank with most; their sum is the peak.

    ``weights``, ``gradients``, ``AdamW``: this rank's shards, as far as they are there at the peak. ``gathered``: what
    FSDP2 has whole: weights in use, and gradients that are summed. ``activations``: all else that the model's passes
    hold. ``attention``, ``loss``: buffers of an attention call, logits and their gradients, where the peak is in one.
    Not counted: the process itself, kernels' own workspace, and what a data set needs. Where offloading asks for it,
    what lies in host memory is left out; all is on one device otherwise.

    Args:
        engine: that has the attention of :func:`burst_attention`, or ``single``; for others None is returned.
        world: all ranks, in ``groups`` that read sequences of their own.
        dtype: of the computation.
        memory: what is done to keep less.
    """
    if not isinstance(engine, SequenceEngine) or (engine.travels is None and not engine.alone):
        return None
    memory, sharing = memory or MemoryConfig(), world // groups
    hf.register()
    # One mode for all of it: to another one the weights would be other tensors.
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=hf.NAME, dtype=dtype).train()
    keep_less(model.model.layers, _on_cpu(memory))
    heads = Heads.of(config)
    sizes = {"q_heads": heads.q_heads, "kv_heads": heads.kv_heads, "head_dim": heads.head_dim}
    schedules = _Schedules(engine, seq_len, sharing, shape_of(dtype, batch=batch, **sizes))
    windows = hf.layer_windows(config)
    cuts = {window: schedules.cut(window) for window in {*windows}}
    step = _Step(model, world, _calls(config, schedules, batch, dtype), cuts, accumulates=accumulate > 1)
    with fake, step:
        step.run(batch, schedules.most_tokens, windows)
    return _parts(step, model, world, memory)


def _on_cpu(memory: MemoryConfig) -> MemoryConfig:
    """What changes which tensors there are: copies in host memory are none of these, and compiling makes fewer."""
    return MemoryConfig(remat=memory.remat, mlp_chunks=memory.mlp_chunks)


@dataclass(frozen=True)
class _Schedules:
    """Who holds which tokens under an engine, as far as memory goes."""

    engine: SequenceEngine
    seq_len: int
    world: int
    shape: Shape  # of a call

    @property
    def most_tokens(self) -> int:
        return max(self.of(None, 0).layout.lengths)

    def of(self, window: int | None, rank: int) -> Any:
        # A mask of documents leaves less to hold than the whole sequence's.
        layout = self.engine.layout.removesuffix("-per-document")
        route = "direct" if self.engine.route == "auto" else self.engine.route
        options: dict[str, Any] = {
            "layout": layout,
            "route": route,
            "heads": self.engine.heads,
            "keep": self.engine.keep,
            "waves": self.engine.waves,
        }
        mask = Mask(window=window)
        return make_schedule(self.seq_len, mask=mask, **options, rank=rank, world=self.world, planner=self.planner)

    def cut(self, window: int | None) -> tuple[int, int]:
        """Into how many groups heads are cut, and rows that the rank with most tokens keeps of its context slice."""
        lengths = self.of(window, 0).layout.lengths
        schedule = self.of(window, lengths.index(max(lengths)))
        groups, _ = schedule.decide(self.shape, self.travels)
        return groups.query, schedule.slice_length(groups) if groups.keep else 0

    @property
    def travels(self) -> str:
        return self.engine.travels or "query"

    @cached_property
    def planner(self) -> Planner:
        return Planner(resolve_rates(None, on_gpus=False), None, self.shape, guessed(None), self.engine.remat)

    @property
    def ranks(self) -> Sequence[int]:
        """Some, spread over the group."""
        walked = min(self.world, WALKED)
        return sorted({n * (self.world - 1) // max(1, walked - 1) for n in range(walked)})


def _calls(
    config: PreTrainedConfig, schedules: _Schedules, batch: int, dtype: torch.dtype
) -> dict[tuple[int | None, Direction], int]:
    """What an attention call holds at its peak besides its inputs, by window and direction."""
    heads = Heads.of(config)
    shape = schedules.shape
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    token = batch * dtype.itemsize * heads.head_dim
    results = heads.q_heads * (2 * token + batch * wide.itemsize)  # out and its gradient, and lse
    calls = {}
    for window in {*hf.layer_windows(config)}:
        for direction in Direction:
            beside = []
            for rank in schedules.ranks:
                schedule = schedules.of(window, rank)
                tokens = schedule.layout.lengths[rank]
                held = tokens * token * (heads.q_heads + 2 * heads.kv_heads)
                if direction is Direction.BACKWARD:
                    groups, _ = schedule.decide(shape, schedules.travels)
                    if groups.keep:  # what was kept of the slice is there in place of q, k and v
                        of_slice = heads.q_heads // groups.query + 2 * (heads.kv_heads // groups.key)
                        held = schedule.slice_length(groups) * token * of_slice
                    held += tokens * results
                beside.append(peak_of(schedule, shape, dtype, schedules.travels, direction) - held)
            calls[window, direction] = max(0, *beside)
    return calls


@dataclass
class _Peak:
    bytes: int = 0
    attention: int = 0
    gradients: int = 0
    phase: str = ""


class _Step(LiveBytes):
    """One step of a model without data. What its tensors hold by the bytes is counted; numbers that are asked are 1.

    Args:
        calls: of :func:`_calls`.
        cuts: of :meth:`_Schedules.cut`, by window.
        accumulates: whether sums of gradients are there from before.
    """

    def __init__(
        self,
        model: nn.Module,
        world: int,
        calls: Mapping[tuple[int | None, Direction], int],
        cuts: Mapping[int | None, tuple[int, int]],
        *,
        accumulates: bool,
    ) -> None:
        self._phase, self._gradients = "", 0
        super().__init__()
        self.model: Any = model
        self.peak, self.before_loss = _Peak(), 0
        self._world, self._calls, self._cuts, self._accumulates = world, calls, cuts, accumulates
        self.leave_out(model.parameters())
        self.leave_out(model.buffers())

    def run(self, batch: int, tokens: int, windows: Sequence[int | None]) -> None:
        """Forward, loss and backward of so many tokens of each sequence, a rank's own; this mode being on."""
        model, out = self.model, self.model.get_output_embeddings()
        whole = lone_plan(tokens)
        plans = Plans({w: whole if w is None else whole.with_mask(Mask(window=w)) for w in {*windows}})
        self._sum_by_group()
        ids = torch.zeros(batch, tokens, dtype=torch.int64)
        self._phase = "forward"
        hidden = model.model(
            input_ids=ids, position_ids=ids, use_cache=False, plan=plans, attend=self._attend
        ).last_hidden_state
        self._phase, self.before_loss = "loss", self.alive()
        last = hidden.detach().requires_grad_()
        measurement = Measurement("training_memory", Head(out.weight).form)
        _, log_probs = measure(last, Head(out.weight, out.bias), ids, -100, measurement)
        (-log_probs.sum()).backward()
        self._phase = "backward"
        gradient, last = last.grad, None
        hidden.backward(gradient)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float | None) -> Tensor:
        """As :func:`burst_attention` calls the operator over several ranks: this plan is of one."""
        heads, kept_rows = self._cuts[plan.mask.window]
        cut = {"heads": heads, "kept_rows": kept_rows, "wanted": gradients_wanted(q, k, v)}
        open_ = {"scale": scale, "travels": "auto", "kernel": "auto", "return_lse": False}
        return attend(q, k, v, handle=plan.handle, **cut, **open_, formula_version=FORMULA_VERSION)[0]

    def _sum_by_group(self) -> None:
        """Let gradients go when a group of FSDP2's has all of them, and its shards be there from then on."""
        groups = [[*layer.parameters()] for layer in self.model.model.layers]
        inside = {id(p) for group in groups for p in group}
        groups.append([p for p in self.model.parameters() if id(p) not in inside])
        for group in groups:
            awaited = {id(p) for p in group}
            for p in group:
                p.register_post_accumulate_grad_hook(lambda p, g=group, left=awaited: self._sum(p, g, left))

    def _sum(self, parameter: Tensor, group: Sequence[Tensor], left: set[int]) -> None:
        left.discard(id(parameter))
        if left:
            return
        # Copied side by side, in fp32; of several ranks, the others' parts arrive beside it.
        flat = sum(p.numel() for p in group) * 4
        self.expect(flat if self._world == 1 else 2 * flat)
        for p in group:
            p.grad = None
        if not self._accumulates:
            self._gradients += sum(shard_of(p, self._world) for p in group)

    def leave_out(self, tensors: Any) -> None:
        """Don't count these."""
        super()._see([*tensors])
        self._live = {key: (ref, 0) for key, (ref, _) in self._live.items()}
        self.most = self._now = 0

    def alive(self) -> int:
        """Bytes that are alive now."""
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        self._now = sum(size for _, size in self._live.values())
        return self._now

    def expect(self, more: int, *, attention: bool = False) -> None:
        """So many bytes more are alive at this moment."""
        if self._now + self._gradients + more > self.peak.bytes:
            now = self.alive() + self._gradients + more
            if now > self.peak.bytes:
                self.peak = _Peak(now, more if attention else 0, self._gradients, self._phase)

    def _see(self, tensors: Any) -> None:
        super()._see(tensors)
        if self._phase:
            self.expect(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0
        if func is torch.ops.aten.nonzero.default:  # of which token has a label: of all
            rows = args[0].new_empty(args[0].numel(), args[0].dim(), dtype=torch.int64)
            self._see(rows)
            return rows
        for operator, direction, handle in (
            (torch.ops.burst_attention.attend.default, Direction.FORWARD, 3),
            (torch.ops.burst_attention.attend_backward.default, Direction.BACKWARD, 8),
        ):
            if func is operator:
                self.expect(self._calls[plan_of(args[handle]).mask.window, direction], attention=True)
        return super().__torch_dispatch__(func, types, args, kwargs)


def shard_of(parameter: Tensor, world: int) -> int:
    """Bytes of the largest shard of a weight, or of its gradient, in fp32 (fp64)."""
    rows = -(-parameter.shape[0] // world)
    return rows * (parameter.numel() // max(1, parameter.shape[0])) * max(4, parameter.dtype.itemsize)


def _parts(step: _Step, model: Any, world: int, memory: MemoryConfig) -> dict[str, int]:
    weights = sum(shard_of(p, world) for p in model.parameters())
    layers = [sum(p.numel() * p.dtype.itemsize for p in layer.parameters()) for layer in model.model.layers]
    whole = sum(p.numel() * p.dtype.itemsize for p in model.parameters())
    # The root's weights all the time; a layer's, and what arrives of the next.
    gathered = whole - sum(layers) + 2 * max(layers)
    peak, gradients = step.peak, weights if step._accumulates else step.peak.gradients
    loss = peak.bytes - peak.gradients - step.before_loss if peak.phase == "loss" else 0
    held = peak.bytes - peak.gradients - peak.attention - loss
    parts = [weights, gradients, 2 * weights, gathered, held, peak.attention, loss]
    # An update has all gradients, and of one weight at a time its root and its quotient.
    update = 4 * weights + 2 * max(shard_of(p, world) for p in model.parameters())
    if update > sum(parts):
        parts = [weights, weights, update - 2 * weights, 0, 0, 0, 0]
    told = dict(zip(PARTS, parts, strict=True))
    if memory.optimizer_offload:
        told |= dict.fromkeys(("weights", "gradients", "AdamW"), 0)
    return told
