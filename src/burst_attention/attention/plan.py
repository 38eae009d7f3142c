"""Plan: a Schedule and its Transport, and what a user does with one sequence and many ranks."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from functools import cached_property
from typing import Any, Literal, NoReturn, SupportsIndex

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..comm.agreement import Agreement
from ..comm.transport import Transport
from ..plan.cost import Shape, Traffic
from ..plan.groups import Groups
from ..plan.layout import STRETCHES, Layout
from ..plan.mask import Mask
from ..plan.rows import Direction, Side
from ..plan.schedule import Schedule
from ..planner.choice import Candidate
from ..planner.explain import explain
from ..planner.planner import Planner
from .hardware import checked_shape
from .passes import CallKind
from .sweep import DeviceIndices
from .unshard import reshard

MOST_CALLS = 16


class Usage:
    """The batches that a plan cut into shards, whether a model's attention used the plan for each, and calls' shapes.

    A model with another attention silently ignores its plan; the loss then refuses the batch's labels.
    """

    def __init__(self) -> None:
        self._batches = WeakIdKeyDictionary()  # tensor given out -> its batch: [whether an attention used the plan]
        self._latest = [True]  # nothing was given out yet, so nothing to refuse
        self._noted = False
        self.calls: dict[tuple[Shape, Groups], None] = {}  # the kinds of calls so far, the latest last

    def mark_sharded(self, positions: Tensor, labels: Tensor | None) -> None:
        """Record that a batch was cut into shards with these positions and labels."""
        self._latest = batch = [False]
        for tensor in (positions, labels):
            if tensor is not None:
                self._batches[tensor] = batch

    def note(self, positions: Any) -> None:
        """Record that an attention uses the plan for tokens at these positions; unknown ones mark every batch."""
        self._noted = True
        is_batch = isinstance(positions, Tensor) and positions in self._batches
        for batch in [self._batches[positions]] if is_batch else self._batches.values():
            batch[0] = True

    def note_kind(self, shape: Shape, groups: Groups) -> None:
        """Record a call's shape and how its heads were split."""
        self.calls.pop((shape, groups), None)  # another thread may do the same
        self.calls[shape, groups] = None
        for oldest in tuple(self.calls)[:-MOST_CALLS]:
            self.calls.pop(oldest, None)

    def note_call(self) -> None:
        """Record a call of the attention: by a model, which has noted its positions already, or directly."""
        if not self._noted:
            self.note(None)
        self._noted = False

    def check(self, labels: Tensor) -> None:
        """Raise ValueError if no attention has used the plan for the batch of these labels."""
        if not self._batch_of(labels)[0]:
            raise ValueError(
                "no attention has used the plan for this batch, so each rank attended to its own shard only; load the "
                'model with attn_implementation="burst" (or call model.set_attn_implementation) and pass it plan=plan'
            )

    def _batch_of(self, labels: Tensor) -> list[bool]:
        """Return the batch of these labels."""
        if labels in self._batches:
            return self._batches[labels]
        for tensor, batch in reversed(list(self._batches.items())):
            if tensor.shape == labels.shape and torch.equal(tensor.to(labels.device, labels.dtype), labels):
                return batch
        return self._latest


# torch operators take numbers, not plans. This registry holds plans weakly: each belongs to its caller.
_PLANS: weakref.WeakValueDictionary[int, Plan] = weakref.WeakValueDictionary()
_HANDLES = itertools.count(1)
MOST_TOKENS = 2**31  # the square fits an int64


def plan_of(handle: int) -> Plan:
    """Return the plan with this handle."""
    plan = _PLANS.get(handle)
    if plan is None:
        raise ValueError(
            f"the plan with handle {handle} was freed; keep a plan until the backward of its calls is done"
        )
    return plan


class Plan:
    """One sequence over the ranks of a group: which rank holds which tokens, who sees whom, and how shards move.

    Made by :func:`make_plan`; immutable. Use one plan for all layers and steps with one sequence length and mask.

    A plan of one rank can be pickled and copied. A plan over a group is tied to this process's rank and refuses to be
    pickled or deep-copied; ``copy.copy`` returns another plan over the same group. It is not a dataclass, because
    FSDP2's mixed precision rebuilds the dataclasses among a module's inputs.
    """

    schedule: Schedule
    planner: Planner
    transport: Transport
    agreement: Agreement
    usage: Usage  # shared with the plans derived by with_mask
    indices: DeviceIndices  # of the schedule's programs
    length: int  # S_local, tokens held here; set early, because compilers can't enter cached properties
    key_length: int  # Sk_local, keys held here; S_local unless the plan has ``keys``
    handle: int  # unique to this object in this process; copies get another
    splits: dict[str, tuple[int, int]]  # results of split by split_key, for expected calls; filled by decide_splits
    kinds: list[CallKind]  # what each kind of call resolved to
    resolved: dict[tuple[Any, ...], Any]  # the split or the index of the kind, by what a call is given
    handle_text: str  # compilers treat a string as a constant, and a number that differs between plans as a variable

    def __init__(
        self,
        schedule: Schedule,
        planner: Planner,
        transport: Transport,
        agreement: Agreement,
        *,
        usage: Usage | None = None,
        indices: DeviceIndices | None = None,
    ) -> None:
        vars(self).update(schedule=schedule, planner=planner, transport=transport, agreement=agreement)
        vars(self)["usage"] = usage or Usage()
        length, keys = (layout.lengths[schedule.rank] for layout in schedule.layouts.values())
        handle = next(_HANDLES)
        vars(self).update(indices=indices or DeviceIndices(), length=length, key_length=keys, handle=handle)
        vars(self).update(handle_text=str(handle), splits={}, kinds=[], resolved={})
        _PLANS[self.handle] = self

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"{name} can't be set: plans are immutable. Make another with make_plan or with_mask")

    def __copy__(self) -> Plan:
        return Plan(self.schedule, self.planner, self.transport, self.agreement, usage=self.usage, indices=self.indices)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.world > 1:
            raise TypeError(
                f"a plan over {self.world} ranks can't be pickled or deep-copied: it is tied to this process's group. "
                "Make it on each rank with make_plan, or send its mask and call plan.with_mask(mask) there"
            )
        # Fresh copies, without what both remember.
        return _of_schedule, (replace(self.schedule), replace(self.planner))

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self.schedule.rank

    @property
    def world(self) -> int:
        """The number of ranks in the group."""
        return self.schedule.layout.world

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None in a world of one."""
        return self.transport.group

    @property
    def seqlen(self) -> int:
        """The number of tokens in the whole sequence; with ``keys``, of queries."""
        return self.schedule.layout.seqlen

    @property
    def layout(self) -> str:
        """The layout's name."""
        return self.schedule.layout.name

    @property
    def route(self) -> str:
        """The route's name, with ``auto`` resolved."""
        return self.schedule.route.name

    @property
    def mask(self) -> Mask:
        """Which keys each query sees."""
        return self.schedule.mask

    @property
    def positions(self) -> Tensor:
        """int64 [S_local] on CPU: the global position of each local token. A copy, which the caller may change."""
        return torch.from_numpy(self._positions.copy())

    @property
    def key_positions(self) -> Tensor:
        """int64 [Sk_local] on CPU: the global position of each local key; :attr:`positions` without ``keys``."""
        return torch.from_numpy(self.schedule.layouts[Side.KEY].positions(self.rank))

    @property
    def keys_apart(self) -> int | None:
        """The number of local keys of a plan with ``keys``; None if they are the queries' tokens."""
        return None if self.schedule.keys is None else self.key_length

    @property
    def document_positions(self) -> Tensor:
        """int64 [S_local] on CPU: positions counted from each document's start, for rotary embeddings."""
        return torch.from_numpy(self._document_positions.copy())

    def document_positions_on(self, device: torch.device) -> Tensor:
        """Return :attr:`document_positions` on a device, copied once: don't change it. The host doesn't wait."""
        return self.indices.on_device(self._document_positions, device)

    @cached_property
    def _positions(self) -> np.ndarray:
        return self.schedule.layout.positions(self.rank)

    @cached_property
    def _document_positions(self) -> np.ndarray:
        return self.mask.document_positions(self._positions)

    @cached_property
    def _places(self) -> np.ndarray:
        return self.schedule.layout.places(self.rank)

    def with_mask(self, mask: Mask, *, seqlen: int | None = None) -> Plan:
        """Return a plan with the same layout, strategy and group under another mask. Exchanges nothing.

        Args:
            mask: which keys each query sees.
            seqlen: tokens of another sequence, to be laid out over the ranks. Default: the tokens stay where they are.

        Raises:
            TypeError, ValueError: the mask doesn't fit, or ``seqlen`` is given and the plan has ``keys``.
        """
        seqlen = None if seqlen is None else check_seqlen(seqlen)
        if seqlen is not None and self.schedule.keys is not None:
            raise ValueError(f"seqlen={seqlen} can't change in a plan with keys; make another plan with make_plan")
        schedule = self.planner.with_mask(self.schedule, mask, seqlen=seqlen)
        return Plan(schedule, self.planner, self.transport, self.agreement.fresh(), usage=self.usage)

    def following(self, seqlen: int, *, first: int, mask: Mask, held: Sequence[Sequence[range]]) -> Plan:
        """Return a plan of tokens that follow those of a cache, without a backward. Exchanges nothing.

        Their queries see the cache's keys and one another's. Group and strategy stay; the layout becomes zigzag if it
        can't be combined with keys elsewhere.

        Args:
            seqlen: new tokens.
            first: the position of the first one.
            mask: which keys each query sees, over the positions of the cache and the new tokens.
            held: each rank's stretches of positions in the cache, by rank, ascending; equal on all ranks.

        Raises:
            TypeError, ValueError: the arguments don't fit each other.
        """
        planner, strategy = replace(self.planner, grad=False), self.schedule.strategy
        name = strategy.layout if strategy.layout in (*STRETCHES, "contiguous") else "zigzag"
        new = Layout(name, check_seqlen(seqlen), self.world, start=first)
        keys = Layout.of_stretches([[*each, *new.segments(rank)] for rank, each in enumerate(held)])
        options: dict[str, Any] = {"mask": mask, "keys": keys, "query_offset": first}
        options |= {"strategy": replace(strategy, layout=name, cache_qkv=False), "rank": self.rank, "world": self.world}
        schedule = planner.choose(seqlen, **options)
        plan = Plan(schedule, planner, self.transport, self.agreement.fresh(), usage=self.usage)
        plan.decide_splits()
        return plan

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's shard of a global tensor: S entries along ``dim`` become S_local. Moves nothing."""
        _check_dim(x, dim, self.schedule.layout)
        return x.index_select(dim, self.indices.on_device(self._places, x.device))

    def shard_keys(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's shard of a global tensor of keys: Sk entries along ``dim`` become Sk_local. Moves nothing.

        With listed stretches ``x`` has one entry for each position up to the last key's. Without ``keys`` it is
        :meth:`shard`.
        """
        layout = self.schedule.layouts[Side.KEY]
        _check_dim(x, dim, layout)
        return x.index_select(dim, torch.from_numpy(layout.places(self.rank)).to(x.device, non_blocking=True))

    def unshard(
        self, x: Tensor, dim: int, *, grad: Literal["slice", "sum"] = "slice", at: Sequence[int] | None = None
    ) -> Tensor:
        """Gather the global tensor on every rank: S_local entries along ``dim`` become S. Every rank must call it.

        Args:
            x: this rank's shard; the other dims and the dtype must be equal on all ranks.
            at: the entries to gather, ascending and the same on all ranks, in place of all S; only they are sent.
            grad: how the backward treats the ranks' gradients. ``slice``: every rank computes the same loss, so it
                takes this rank's slice of its gradient and moves nothing. ``sum``: each rank computes a share of one
                loss, so it adds up all ranks' gradients of this slice.
        """
        layout = self.schedule.layout
        if at is not None:
            x, layout = self._picked(x, dim, at)
        return reshard("unshard", x, dim, grad, layout, self.transport, self.agreement)

    def _picked(self, x: Tensor, dim: int, at: Sequence[int]) -> tuple[Tensor, Layout]:
        """Return those entries of a shard that ``at`` names, and where all ranks' lie among the entries named."""
        with self.agreement.entering("unshard", once=True):
            wanted = np.asarray(at, np.int64)
            if wanted.ndim != 1 or (len(wanted) and (wanted[0] < 0 or wanted[-1] >= self.seqlen)):
                raise ValueError(f"at={at!r} must be positions of the sequence's {self.seqlen} tokens")
            if (np.diff(wanted) <= 0).any():
                raise ValueError(f"at={at!r} must be ascending")
            if not isinstance(x, Tensor) or not -x.ndim <= dim < x.ndim or x.shape[dim] != self.length:
                shape = [*x.shape] if isinstance(x, Tensor) else type(x).__name__
                raise ValueError(f"x has shape {shape}: dim {dim} must be this rank's {self.length} tokens")
        held = [np.flatnonzero(np.isin(wanted, self.schedule.layout.places(rank))) for rank in range(self.world)]
        own = np.searchsorted(self._places, wanted[held[self.rank]], sorter=(order := np.argsort(self._places)))
        local = torch.from_numpy(order[own]).to(x.device, non_blocking=True)
        return x.index_select(dim, local), Layout.of_stretches([[(int(n), int(n) + 1) for n in row] for row in held])

    def sum_shards(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's shard of the sum of all ranks' ``x``: S entries along ``dim`` become S_local.

        The sum is in rank order, in fp32 at least. The gradient is gathered: each rank gets that of the whole ``x``.
        Every rank must call it, with equal shapes and dtypes.

        Raises:
            TypeError, ValueError: ``x`` does not have the sequence's tokens along ``dim``; on every rank.
        """
        return reshard("sum_shards", x, dim, "sum", self.schedule.layout, self.transport, self.agreement)

    def shard_labels(self, labels: Tensor, *, ignore_index: int = -100) -> Tensor:
        """Return this rank's shard of :meth:`shift_labels`: [B, S] unshifted token ids -> [B, S_local] targets."""
        return self.shard(self.shift_labels(labels, ignore_index=ignore_index), 1)

    def shift_labels(self, labels: Tensor, *, ignore_index: int = -100) -> Tensor:
        """Return each position's next token: [B, S] unshifted token ids -> [B, S] targets.

        The last token of the sequence and of each document gets ``ignore_index``.
        """
        if labels.ndim != 2 or labels.shape[1] != self.seqlen:
            raise ValueError(f"labels has shape {list(labels.shape)}; it must be [batch, {self.seqlen}], unshifted")
        targets = torch.full_like(labels, ignore_index)
        targets[:, :-1] = labels[:, 1:]
        first, last = self.schedule.layout.start, self.schedule.layout.stop
        borders = (b - first for b in self.mask.cu_seqlens or () if first < b <= last)
        ends = torch.tensor([b - 1 for b in borders], dtype=torch.int64)
        targets[:, ends.to(labels.device, non_blocking=True)] = ignore_index
        return targets

    def split(self, shape: Shape) -> tuple[int, int]:
        """Return a call's Ulysses degree, and how many rows of its sequence group this rank caches.

        Raises:
            ValueError: these heads can't be split as the strategy asks.
        """
        groups = self.planner.choose_groups(self.schedule, shape)
        return groups.query, self.schedule.slice_length(groups) if groups.keep else 0

    def settle(self, shape: Shape, groups: Groups) -> Candidate:
        """Return a call's chunks and what circulates, for a split of heads; note the kind of call."""
        self.usage.note_kind(shape, groups)
        return self.planner.settle(self.schedule, shape, groups)

    def decide_splits(self) -> None:
        """Decide how to split the heads of expected calls, and of calls like earlier ones.

        A compiler can't run the planner. It would guard on this plan's handle, and so compile again for each plan.
        """
        hint = self.planner.call_shape
        for shape in {*(replace(shape, batch=1) for shape, _ in tuple(self.usage.calls)), *([hint] if hint else [])}:
            key = split_key(*astuple(shape)[1:7])
            with suppress(ValueError):  # the call itself raises it
                self.splits[key] = self.split(shape)

    def make_ready(self) -> None:
        """Build now, in any thread, what the first calls like earlier ones would build."""
        _ = self.schedule.description, self._positions
        for shape, before in tuple(self.usage.calls):
            with suppress(ValueError):  # the call itself raises it
                heads, cached = self.split(replace(shape, batch=1))
                keep = cached > 0 and (before.keep or before.query == 1)
                results = keep and heads == self.world and (before.results or before.query == 1)
                split = Groups.of(heads, q_heads=shape.q_heads, kv_heads=shape.kv_heads, keep=keep, results=results)
                groups, circulate = self.settle(shape, split)
                for direction in Direction:
                    self.schedule.program(circulate, direction, groups)

    def bytes(
        self,
        *,
        batch: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        attention_chunks: int = 1,
        lse: bool = False,
    ) -> Traffic:
        """Return the payload bytes that this rank sends and receives in one call of :func:`burst_attention`.

        The figures are exactly what ``plan.transport`` counts. They exclude the agreement's messages: about 50 bytes to
        each of log2(world) peers, for a call and again for its backward.

        Args:
            v_head_dim: ``head_dim`` if None.
            dtype: of q, k and v.
            attention_chunks: the number of chunks of heads, each a call (``hf.Memory``).
            lse: whether the call has ``return_lse`` or sinks. A backward is then always sent lse and D.

        Raises:
            TypeError, ValueError: for shapes that the call would refuse.
        """
        sizes = {"q_heads": q_heads // attention_chunks, "kv_heads": max(1, kv_heads // attention_chunks)}
        shape = checked_shape(dtype, batch=batch, **sizes, head_dim=head_dim, v_head_dim=v_head_dim)
        groups, circulate = self.planner.decide(self.schedule, shape, caches=attention_chunks == 1, lse=lse)
        return self.schedule.traffic(shape, circulate, groups) * attention_chunks

    def explain(
        self,
        *,
        batch: int = 1,
        q_heads: int | None = None,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        v_head_dim: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> str:
        """Explain how a call of :func:`burst_attention` will be computed, how long that is predicted to take, and why.

        The text gives the chosen strategy, in a form that ``make_plan(strategy=...)`` takes; predicted seconds of a
        forward (two where layers are recomputed) and a backward, with the exchange that computation does not hide;
        bytes by kind of link; visits and launches; alternatives; and the memory held from forward to backward.
        Arguments are those of :meth:`bytes`. Without sizes it explains ``make_plan``'s ``call``. Any rank may call it
        alone.

        Raises:
            TypeError, ValueError: for shapes that the call would refuse, or if no sizes are known.
        """
        call_shape = None if (q_heads, kv_heads, head_dim) != (None,) * 3 else self.planner.call_shape
        if call_shape is not None:
            q_heads, kv_heads, head_dim = call_shape.q_heads, call_shape.kv_heads, call_shape.head_dim
        if q_heads is None or head_dim is None:
            raise TypeError(
                f"q_heads={q_heads}, head_dim={head_dim}: pass both, such as plan.explain(batch=1, q_heads=32, "
                "kv_heads=8, head_dim=128, dtype=torch.bfloat16), or pass call=CallShape(...) to make_plan"
            )
        kv_heads = q_heads if kv_heads is None else kv_heads
        sizes = {"batch": batch, "q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim}
        shape = checked_shape(torch.float32 if dtype is None else dtype, **sizes, v_head_dim=v_head_dim)
        if call_shape is not None and dtype is None:
            shape = replace(shape, io=call_shape.io, partial=call_shape.partial, accumulate=call_shape.accumulate)
        return explain(self.planner, self.schedule, shape)

    def exchange_small(self, values: Sequence[float]) -> list[list[float]]:
        """Return every rank's numbers, by rank, exactly. Every rank must call it, with equally many."""
        with self.agreement.entering("exchange_small"):
            own = [float(value) for value in values]
        return exchange_small(self.agreement, own)

    def refuse(self, error: Exception) -> NoReturn:
        """Raise ``error`` here, and an error of its class on the other ranks, which are about to make the same call."""
        self.agreement.refuse(error)

    def __repr__(self) -> str:
        return (
            f"Plan(rank {self.rank} of {self.world}, seqlen={self.seqlen}, length={self.length}, "
            f"layout={self.layout!r}, route={self.route!r}, mask={self.mask!r}"
            + ("" if self.schedule.keys is None else f", keys={self.key_length} of {sum(self.schedule.keys.lengths)}")
            + ")"
        )


def exchange_small(agreement: Agreement, own: list[float]) -> list[list[float]]:
    """Return every rank's numbers, by rank."""
    return agreement.agree("exchange_small", {"count": len(own)}, own)


def _check_dim(x: Tensor, dim: int, layout: Layout) -> None:
    """Raise TypeError or ValueError if a tensor has not one entry for each position of ``layout`` along ``dim``."""
    if not isinstance(dim, SupportsIndex):
        raise TypeError(f"dim={dim!r} must be an integer, the dim of the sequence")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim={dim} is out of range for x with {x.ndim} dims")
    if x.shape[dim] != layout.seqlen:
        raise ValueError(f"x has shape {list(x.shape)}: dim {dim} must be the sequence, {layout.seqlen} tokens")


def split_key(*sizes: int) -> str:
    """Return a call's key in :attr:`Plan.splits`: the fields of its shape from ``q_heads`` to ``partial``."""
    return " ".join(map(str, sizes))


def check_seqlen(seqlen: Any) -> int:
    """Return ``seqlen`` as an int; the layout checks that it is not negative."""
    if isinstance(seqlen, bool) or not isinstance(seqlen, (int, np.integer)):
        raise TypeError(f"seqlen={seqlen!r} must be an int")
    if seqlen > MOST_TOKENS:
        raise ValueError(f"seqlen={seqlen} is more than the {MOST_TOKENS:,} tokens whose pairs can be counted")
    return int(seqlen)


def _of_schedule(schedule: Schedule, planner: Planner) -> Plan:
    """The plan of a single rank."""
    return Plan(schedule, planner, Transport(None), Agreement(Transport(None)))
