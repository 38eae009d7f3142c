"""Plan: a Schedule and its Transport, and what a user does with one sequence and many ranks."""

from __future__ import annotations

import itertools
import socket
import weakref
from collections.abc import Sequence
from dataclasses import astuple, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal, NoReturn, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..comm.agreement import Agreement
from ..comm.link import connect, resolve_group, resolve_timeout
from ..comm.transport import Transport
from ..plan.assignment import TRAVELS
from ..plan.choose import HeadsOrAuto, KeepOrAuto, Planner, Remat, WavesOrAuto
from ..plan.cost import Traffic
from ..plan.explain import explain
from ..plan.mask import Mask
from ..plan.rates import Rates
from ..plan.schedule import Schedule, make_schedule
from . import unshard as resharding
from .hardware import (
    RatesGiven,
    carries_gpus,
    checked_shape,
    digest_of_numbers,
    guessed,
    known_shape,
    resolve_nodes,
    resolve_rates,
)
from .sweep import DeviceIndices
from .usage import Usage

# An operator of torch takes numbers, no plans. The one registry of the library, kept weakly: a plan is its caller's.
_PLANS: weakref.WeakValueDictionary[int, Plan] = weakref.WeakValueDictionary()
_HANDLES = itertools.count(1)
MOST_TOLD = 200  # characters of where rates come from, in the record that all ranks get
MOST_TOKENS = 2**31  # of which the square is an int64


def plan_of(handle: int) -> Plan:
    """The plan with this handle.

    Raises:
        ValueError: it is gone.
    """
    plan = _PLANS.get(handle)
    if plan is None:
        raise ValueError(
            f"plan handle {handle} is of no plan any more; keep the plan for as long as its calls' backwards"
        )
    return plan


class Plan:
    """One sequence over the ranks of a group: who holds which tokens, who sees whom, and the wires between them.

    Made by :func:`make_plan`; immutable. Use one plan for all layers and steps of one sequence length and mask.

    In a world of one a plan is a value: it can be pickled and copied. Over a group it is tied to this process's place
    in the group and refuses to be pickled or deep-copied; ``copy.copy`` gives another plan over the same group. It is
    no dataclass, for what casts a module's inputs (FSDP2's mixed precision) takes those apart and makes them anew.
    """

    schedule: Schedule
    transport: Transport
    agreement: Agreement
    usage: Usage  # one for the plans derived by with_mask
    indices: DeviceIndices  # of the schedule's programs
    length: int  # S_local, tokens held here; known when the plan is made, for a compiler can't enter cached properties
    handle: int  # of this very object in this process: copies have their own
    handle_text: str  # a compiler takes a text for a constant, a number that differs from plan to plan for a variable

    def __init__(
        self,
        schedule: Schedule,
        transport: Transport,
        agreement: Agreement,
        *,
        usage: Usage | None = None,
        indices: DeviceIndices | None = None,
    ) -> None:
        vars(self).update(schedule=schedule, transport=transport, agreement=agreement, usage=usage or Usage())
        handle, length = next(_HANDLES), schedule.layout.lengths[schedule.rank]
        vars(self).update(indices=indices or DeviceIndices(), length=length, handle=handle)
        vars(self)["handle_text"] = str(handle)
        _PLANS[self.handle] = self

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"{name} can't be set: a plan does not change. Make another by make_plan or with_mask")

    def __copy__(self) -> Plan:
        return Plan(self.schedule, self.transport, self.agreement, usage=self.usage, indices=self.indices)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.world > 1:
            raise TypeError(
                f"a plan over {self.world} ranks can't be pickled or deep-copied, it is tied to this process's group: "
                "make it on each rank with make_plan, or send its mask and use plan.with_mask(mask) there"
            )
        planner = self.schedule.planner
        # Without what it remembers.
        apart = Planner(planner.rates, planner.nodes, planner.known, planner.guessed, planner.remat)
        return _of_schedule, (replace(self.schedule, planner=apart),)

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self.schedule.rank

    @property
    def world(self) -> int:
        """How many ranks the group has."""
        return self.schedule.layout.world

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None in a world of one."""
        return self.transport.group

    @property
    def seqlen(self) -> int:
        """Tokens of the whole sequence."""
        return self.schedule.layout.seqlen

    @property
    def layout(self) -> str:
        """The layout's name."""
        return self.schedule.layout.name

    @property
    def route(self) -> str:
        """The route's name, after ``auto`` was resolved."""
        return self.schedule.route.name

    @property
    def mask(self) -> Mask:
        """What a query sees."""
        return self.schedule.mask

    @property
    def positions(self) -> Tensor:
        """int64 [S_local] on CPU: the global position of each local token. The caller's to keep."""
        return torch.from_numpy(self._positions.copy())

    @property
    def document_positions(self) -> Tensor:
        """int64 [S_local] on CPU: positions counted from each document's start, for rotary embeddings."""
        return torch.from_numpy(self.mask.document_positions(self._positions).copy())

    @cached_property
    def _positions(self) -> np.ndarray:
        return self.schedule.layout.positions(self.rank)

    def with_mask(self, mask: Mask, *, seqlen: int | None = None) -> Plan:
        """The same layout, route and group under another mask; nothing is exchanged.

        Args:
            mask: what a query sees.
            seqlen: tokens of the whole sequence, which are then cut over the ranks anew. Default: as they are.
        """
        schedule = self.schedule.with_mask(mask, seqlen=None if seqlen is None else check_seqlen(seqlen))
        return Plan(schedule, self.transport, self.agreement, usage=self.usage)

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of a global tensor: S entries along ``dim`` become S_local. Moves nothing."""
        if not -x.ndim <= dim < x.ndim:
            raise ValueError(f"dim={dim} is outside of x's {x.ndim} dims")
        if x.shape[dim] != self.seqlen:
            raise ValueError(f"x has shape {list(x.shape)}: dim {dim} must be the sequence, {self.seqlen} tokens")
        return x.index_select(dim, self.positions.to(x.device))

    def unshard(self, x: Tensor, dim: int, *, grad: Literal["slice", "sum"] = "slice") -> Tensor:
        """The global tensor on every rank: S_local entries along ``dim`` become S. Every rank must call it.

        Args:
            x: this rank's shard; the other dims and the dtype must be equal on all ranks.
            grad: ``slice``: every rank computes the same loss from the result, the backward takes this rank's slice
                of the gradient and moves nothing. ``sum``: the ranks' losses are shares of one loss, the backward
                adds up what all ranks' gradients say of this slice.
        """
        return resharding.unshard(x, dim, grad, self.schedule.layout, self.transport, self.agreement)

    def shard_labels(self, labels: Tensor, *, ignore_index: int = -100) -> Tensor:
        """[B, S] token ids, unshifted -> [B, S_local] targets: this rank's part of what :meth:`shift_labels` gives."""
        return self.shard(self.shift_labels(labels, ignore_index=ignore_index), 1)

    def shift_labels(self, labels: Tensor, *, ignore_index: int = -100) -> Tensor:
        """[B, S] token ids, unshifted -> [B, S] targets: at each position the next token.

        The sequence's last position and the last token of each document have no target: ``ignore_index``.
        """
        if labels.ndim != 2 or labels.shape[1] != self.seqlen:
            raise ValueError(f"labels has shape {list(labels.shape)}; it must be [batch, {self.seqlen}], unshifted")
        targets = torch.full_like(labels, ignore_index)
        targets[:, :-1] = labels[:, 1:]
        ends = torch.tensor([b - 1 for b in self.mask.cu_seqlens or () if b > 0], dtype=torch.int64)
        targets[:, ends.to(labels.device)] = ignore_index
        return targets

    def bytes(
        self,
        *,
        batch: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        travels: str = "auto",
    ) -> Traffic:
        """Payload bytes that this rank sends and receives in one call of :func:`burst_attention`.

        Exactly what ``plan.transport`` counts. Agreement's messages (some 50 bytes to each of log2(world) peers for a
        call, and for its backward) are not in it.

        Args:
            v_head_dim: ``head_dim`` if None.
            dtype: of q, k and v.
            travels: as for :func:`burst_attention`.

        Raises:
            TypeError, ValueError: for shapes that the call would refuse.
        """
        sizes = {"batch": batch, "q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim}
        shape = checked_shape(dtype, **sizes, v_head_dim=v_head_dim)
        check_travels(travels)
        groups, travels = self.schedule.decide(shape, travels)
        return self.schedule.traffic(shape, travels, groups)

    def explain(
        self,
        *,
        batch: int = 1,
        q_heads: int | None = None,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        v_head_dim: int | None = None,
        dtype: torch.dtype | None = None,
        travels: str = "auto",
    ) -> str:
        """How a call of :func:`burst_attention` will be computed, how long that is predicted to take, and why so.

        A few lines: what was chosen; predicted seconds of one forward (two where layers are recomputed) and backward,
        and how many of them are exchange that nothing hides; bytes by kind of link; visits and launches; what else
        could have been chosen; and what is retained from the forward to the backward. Arguments are those of
        :meth:`bytes`. Without sizes it explains the calls that :func:`make_plan` was given sizes of. Any rank may
        call it alone.

        Raises:
            TypeError, ValueError: for shapes that the call would refuse, or if no sizes are known.
        """
        check_travels(travels)
        known = None if (q_heads, kv_heads, head_dim) != (None,) * 3 else self.schedule.planner.known
        if known is not None:
            q_heads, kv_heads, head_dim = known.q_heads, known.kv_heads, known.head_dim
        if q_heads is None or head_dim is None:
            raise TypeError(
                f"q_heads={q_heads}, head_dim={head_dim}: pass both, such as plan.explain(batch=1, q_heads=32, "
                "kv_heads=8, head_dim=128, dtype=torch.bfloat16), or to make_plan"
            )
        kv_heads = q_heads if kv_heads is None else kv_heads
        sizes = {"batch": batch, "q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim}
        shape = checked_shape(torch.float32 if dtype is None else dtype, **sizes, v_head_dim=v_head_dim)
        if known is not None and dtype is None:
            shape = replace(shape, io=known.io, partial=known.partial, accumulate=known.accumulate)
        return explain(self.schedule, shape, travels)

    def exchange_small(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's few numbers on every rank, by rank, exactly. Every rank must call it."""
        with self.agreement.entering("exchange_small"):
            own = [float(value) for value in values]
        return self.agreement.agree("exchange_small", {"count": len(own)}, own)

    def refuse(self, error: Exception) -> NoReturn:
        """Raise ``error`` here and an error of its class on the other ranks, which are about to make the same call."""
        self.agreement.refuse(error)

    def __repr__(self) -> str:
        return (
            f"Plan(rank {self.rank} of {self.world}, seqlen={self.seqlen}, length={self.length}, "
            f"layout={self.layout!r}, route={self.route!r}, mask={self.mask!r})"
        )


def check_travels(travels: Any) -> None:
    """Raise ValueError if it is no name of ``TRAVELS``, nor ``auto``."""
    if travels != "auto" and travels not in TRAVELS:
        raise ValueError(f"travels={travels!r} is unknown; choose one of auto, {', '.join(TRAVELS)}")


def check_seqlen(seqlen: Any) -> int:
    """``seqlen`` as an int.

    Raises:
        TypeError, ValueError: it is none, or too large. That it is not negative is the layout's to check.
    """
    if isinstance(seqlen, bool) or not isinstance(seqlen, (int, np.integer)):
        raise TypeError(f"seqlen={seqlen!r} must be an int")
    if seqlen > MOST_TOKENS:
        raise ValueError(f"seqlen={seqlen} is more than the {MOST_TOKENS:,} tokens whose pairs can be counted")
    return int(seqlen)


def _of_schedule(schedule: Schedule) -> Plan:
    """The plan of a world of one."""
    return Plan(schedule, Transport(None), Agreement(Transport(None)))


def lone_plan(
    seqlen: int,
    *,
    mask: Mask | None = None,
    layout: str = "contiguous",
    route: str = "direct",
    usage: Usage | None = None,
) -> Plan:
    """The plan of a world of one, which holds the whole sequence; no process group is asked, nothing exchanged."""
    mask = Mask() if mask is None else mask
    schedule = make_schedule(seqlen, mask=mask, layout=layout, route=route, rank=0, world=1)
    return Plan(schedule, Transport(None), Agreement(Transport(None)), usage=usage)


def make_plan(
    seqlen: int,
    *,
    mask: Mask | None = None,
    layout: str = "auto",
    route: str = "auto",
    heads: HeadsOrAuto = "auto",
    keep: KeepOrAuto = "auto",
    assignment: str = "auto",
    waves: WavesOrAuto = "auto",
    group: Any = None,
    timeout: float | timedelta | None = None,
    nodes: Sequence[int] | DeviceMesh | None = None,
    rates: RatesGiven = None,
    q_heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    dtype: torch.dtype | None = None,
    remat: Remat = "none",
) -> Plan:
    """Plan exact attention over ``seqlen`` tokens. Every rank of the group must call it, with equal arguments.

    What is left to ``auto`` is chosen by predicted time, on all ranks alike: :meth:`Plan.explain` tells what and why.

    Args:
        seqlen: tokens of the whole sequence, at least 0; need not divide by anything.
        mask: what a query sees; causal if None.
        layout: ``zigzag`` (balanced for causal masks), ``zigzag-by-halves`` (each quarter of the sequence over all
            ranks: four waves), ``contiguous`` or ``striped``; with ``-per-document`` after it each document of the mask
            is cut by itself. ``balanced`` goes by the mask: documents that fit a rank are whole there, others are
            spread, so that all have as much to do. ``auto``: zigzag, or by halves, contiguous or (packed documents)
            balanced where that is predicted to be faster for calls with ``q_heads`` and ``head_dim``; zigzag if those
            are not told.
        route: ``direct`` (owner to user), ``ring`` (round the ring, partial results straight home), ``ring-attention``
            (both round the ring), ``nodes`` (to each host once, and there from rank to rank; the other way round
            home), or ``auto``: direct; with ``heads=1``, or if it is told of calls for which that is faster, another
            where several hosts have several ranks each and it loads their links less.
        heads: into how many groups heads are cut, U: of U * R ranks each U neighbours, whose shards are a context
            slice, compute one head group each for all of the slice. 1: none is cut. As many as there are ranks: Ulysses
            with its exchanges behind the attention. It must divide the ranks, and the key-value heads, or be a multiple
            of those that divides the query heads. ``auto``: what is predicted to be fastest, for each shape of a call
            anew.
        keep: whether, with heads cut, what the forward fetched of a rank's context slice is saved for the backward in
            place of its own q, k and v: fewer bytes on the wire, and as many in memory up to as many groups as
            key-value heads. ``auto``: where it is predicted to be faster. Never where some slice has no token.
        assignment: what travels in calls that leave it open, a name that ``travels`` of :func:`burst_attention` takes;
            ``auto``: with ``heads=1`` by a rule there, else what is predicted to be fastest.
        waves: with heads cut, how a context slice's shards come together: all at once (1), or a stretch of the sequence
            at a time, in so many waves, each computed, and its results sent home, while the next is on its way; 0: one
            owner's shard at a time. Two suit zigzag, where each half of the sequence is spread over all ranks.
            ``auto``: what is predicted to be fastest.
        group: None (the default group; a world of one if torch.distributed is not initialised), a ProcessGroup, or a
            1-D DeviceMesh.
        timeout: seconds (or a timedelta) that an exchange may take before ExchangeError; None for the group's own.
        nodes: the number of each rank's node, or a 2-D DeviceMesh (node, rank of the node); None: by their host names.
        rates: how fast kernels and links are, for predictions: :class:`~burst_attention.plan.rates.Rates`, the path of
            a TOML file, or a preset's name such as ``h100-hgx+infiniband-400g``. None: what ``burst calibrate`` wrote
            for this user, or else a preset for the device: nobody measured these links then, and what is chosen is
            what loses least if they are as fast as that, an eighth, or a 64th. Rank 0's count.
        q_heads, kv_heads, head_dim, dtype: of the calls to come, as far as they are known; they may be others.
        remat: what of a layer is recomputed for its backward, as ``burst train --remat`` has it; it changes no result.
            Where it is ``layer``, a call's forward is predicted to run twice in a step. Under ``keep-attention`` what
            ``keep`` saves stays until the backward.

    Raises:
        TypeError, ValueError: an argument can't be used, or ranks disagree: the same class on every rank.
    """
    resolved = resolve_group(group)
    transport, agreement = connect(resolved, None)
    rank, world = transport.rank, transport.world
    with agreement.entering("make_plan"):
        seqlen = check_seqlen(seqlen)
        transport.timeout = agreement.transport.timeout = resolve_timeout(timeout)
        mask = Mask() if mask is None else mask
        options: dict[str, Any] = {"mask": mask, "layout": layout, "route": route, "heads": heads, "keep": keep}
        options |= {"assignment": assignment, "waves": waves, "rank": rank, "world": world}
        known, at = known_shape(q_heads, kv_heads, head_dim, dtype), resolve_nodes(nodes, resolved, world)
        if remat not in get_args(Remat):
            raise ValueError(f"remat={remat!r} is unknown; choose one of {', '.join(get_args(Remat))}")
        asked = make_schedule(seqlen, **options)  # before rates are known, to see what can't be
        fields = {**asked.description, "layout": "auto" if layout == "auto" else asked.layout.description}
        fields |= {
            "route": route,
            "remat": remat,
            "nodes": at and digest_of_numbers(at),
            "heads to come": known and astuple(known),
        }
        own: dict[str, Any] = {"host": socket.gethostname()}
        if rank == 0:
            own["rates"] = resolve_rates(rates, on_gpus=carries_gpus(resolved)).as_dict(most=MOST_TOLD)
            own["guessed"] = guessed(rates)
    told = agreement.agree("make_plan", fields, own)
    names = [each["host"] for each in told]
    hosts = [names.index(name) for name in names] if at is None else at
    planner = Planner(Rates.from_dict(told[0]["rates"]), tuple(hosts), known, told[0]["guessed"], remat)
    return Plan(make_schedule(seqlen, **options, planner=planner), transport, agreement)
