"""Indexed attention: an indexer chooses keys for each query over all ranks, and attention sees these alone.

Both are passes of the sweep in which keys circulate and queries stay.

    choose_keys:       of each key shard the best k of its scores;  two results combine to the best k of both
    chosen_attention:  of each key shard (out, lse) of its chosen rows;  merged, and differentiated, as for all keys

Equal scores: the lower position wins, for any number of ranks, layout and order. No gradient flows through a choice.
The operators ``burst_attention::choose`` and ``::attend_chosen`` take a plan's handle, as ``::attend`` does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..kernels import chosen
from ..kernels.contract import accumulation_dtype, converted, finite_lse
from ..kernels.reference import Reference
from ..plan.assignment import KEYS_CIRCULATE
from ..plan.cost import Traffic
from ..plan.indexed import Indexed
from ..plan.program import Program
from ..plan.rows import Direction, Side
from ..plan.tile import Tiles
from .call import (
    KEY,
    QUERY,
    SINKS,
    VALUE,
    check_plain,
    check_plan,
    check_scale,
    check_sinks,
    check_tensors,
    gradients_wanted,
)
from .hardware import shape_of
from .passes import (
    Backward,
    Forward,
    Pass,
    Running,
    Tensors,
    check_transforms,
    lost_rows,
    refuse_second,
    rounded_gradients,
    row_delta,
    sink_gradient,
    with_lost_rows,
    with_sinks,
)
from .plan import Plan, plan_of
from .sweep import sweep

_CHOICE, _ATTENTION = "choose_keys", "chosen_attention"


def choose_keys(q: Tensor, k: Tensor, weights: Tensor, plan: Plan, *, count: int, scale: float) -> Tensor:
    """Choose each query's best keys by an indexer's scores, over all ranks. Every rank must call it.

    The score of query t and key s is the sum over heads h of ``weights[t, h] relu(scale q[t, h] . k[s])``, in fp32.
    Source: DeepSeek-V3.2 (arXiv 2512.02556), equation 1.

    Args:
        q: [B, H, S_local, D], the indexer's queries on this rank; float64, float32, bfloat16 or float16.
        k: [B, 1, Sk_local, D], its keys, in the same dtype.
        weights: [B, H, S_local], floating point.
        plan: its mask says which keys a query sees.
        count: the number of keys to choose for each query.

    Returns:
        int64 [B, S_local, count]: positions in the whole sequence, ascending. A query that sees fewer keys has all of
        them, behind entries of -1. Of equal scores, the lower position is chosen.

    Raises:
        TypeError, ValueError: an argument can't be used, here or on another rank, or ranks disagree; on every rank.
    """
    check_plan(plan)
    with plan.agreement.entering(_CHOICE, once=True), torch.no_grad():
        _check_choice(q, k, weights, plan, count)
        number = check_scale(scale, torch.float32)
        if number is None:
            raise ValueError("scale=None must be a number, that of the indexer")
    return choose(q.detach(), k.detach(), weights.detach().float(), plan.handle, count, number, 0, 0)[:, 0]


def choose_blocks(q: Tensor, k: Tensor, plan: Plan, *, count: int, size: int, local: int = 0) -> Tensor:
    """Choose each query's best blocks of keys, for each head, over all ranks. Every rank must call it.

    A block holds ``size`` positions, counted from the start of the sequence. Its score is the greatest q . k, in fp32,
    of its keys that the query sees. Source: MiniMax M3, as in transformers 5.23.

    Args:
        q: [B, H, S_local, D], k: [B, 1, Sk_local, D], as for :func:`choose_keys`.
        plan: its mask says which keys a query sees.
        count: the number of blocks to choose for each query and head.
        local: how many blocks, up to the query's own, are always chosen.

    Returns:
        int64 [B, H, S_local, count size]: positions of the blocks' keys, -1 where it has fewer blocks. Some
        may be hidden from the query, or lie behind the sequence. Of equal scores, the lower block is chosen.

    Raises:
        TypeError, ValueError: as for :func:`choose_keys`.
    """
    check_plan(plan)
    with plan.agreement.entering(_CHOICE, once=True), torch.no_grad():
        _check_choice(q, k, None, plan, count)
        for name, value, least in (("size", size, 1), ("local", local, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r} must be an int of at least {least}")
    return chosen.keys_of(choose(q.detach(), k.detach(), None, plan.handle, count, 1.0, size, local), size)


def chosen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | int,
    indices: Tensor,
    plan: Plan,
    *,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute exact attention to chosen keys over a sharded sequence. Every rank must call it.

    Args:
        q: [B, Hq, S_local, D], k: [B, Hkv, Sk_local, D], v: [B, Hkv, Sk_local, Dv], as for :func:`burst_attention`.
            An int ``v`` is Dv: the value is the first Dv numbers of its key, so it is not sent. (The latent of
            DeepSeek's attention is such a row, arXiv 2405.04434, section 2.1.)
        indices: int64 or int32 [B, S_local, count], distinct positions in the whole sequence for each query; negative
            for none. Positions that the plan's mask hides add nothing. [B, Hkv, S_local, count]: each key-value head
            has its own.
        plan: heads stay whole and keys circulate, whatever its strategy says of them.
        scale, sinks: as for :func:`burst_attention`.

    Returns:
        (out [B, Hq, S_local, Dv] in q's dtype, lse [B, Hq, S_local] in fp32 or fp64). Both are differentiable, once.
        A query without a key gets out 0 and lse -inf.

    Raises:
        TypeError, ValueError: an argument can't be used, here or on another rank, or ranks disagree; on every rank.
    """
    check_plan(plan)
    with plan.agreement.entering(_ATTENTION, once=True):
        _check_attention(q, k, v, indices, sinks, plan)
        number = check_scale(scale, q.dtype)
        check_transforms(_ATTENTION, q=q, k=k, v=None if isinstance(v, int) else v, sinks=sinks)
        values, inside = (None, v) if isinstance(v, int) else (v, 0)
        wanted = gradients_wanted(q, k, k if values is None else values, sinks)
        number = 1 / math.sqrt(q.shape[3]) if number is None else number
        at = indices.unsqueeze(1) if indices.dim() == 3 else indices
    out, lse, _ = attend_chosen(q, k, values, at, sinks, plan.handle, number, wanted, inside)
    return out, lse


def chosen_bytes(plan: Plan, call: Indexed, *, batch: int, dtype: torch.dtype, attention_chunks: int = 1) -> Traffic:
    """Return the payload bytes that this rank sends and receives in a choice and in the attention to chosen keys.

    The figures are exactly what ``plan.transport`` counts, as those of :meth:`Plan.bytes` are.

    Args:
        call: the layer's sizes, as :func:`~burst_attention.integrations.hf.indexed_layers` reads them from a model.
        dtype: of q, k and v.
        attention_chunks: the number of chunks of heads (``hf.Memory``). There is one choice for all of them, but each
            sends keys.
    """
    like = shape_of(dtype, batch=batch, q_heads=1, kv_heads=1, head_dim=1)
    return plan.schedule.indexed_traffic(call, like, attention_chunks)


def _check_whole_heads(plan: Plan) -> None:
    """Refuse a strategy that asks for something else than circulating keys of all heads."""
    degree = plan.schedule.strategy.ulysses_degree
    if isinstance(degree, int) and degree > 1:
        raise ValueError(
            f"ulysses_degree={degree} of the strategy splits heads, but all heads of indexed attention share a choice; "
            "use ulysses_degree=1, or leave it open"
        )


def _check_choice(q: Any, k: Any, weights: Any, plan: Plan, count: Any) -> None:
    """Raise TypeError or ValueError unless a choice can be made of these."""
    _check_whole_heads(plan)
    check_plain(q=q, k=k, **({} if weights is None else {"weights": weights}))
    check_tensors(q, k, k, plan.length, plan.keys_apart) if k.shape[1:2] == (1,) else _refuse_shape("k", k, "1 head")
    if weights is not None:
        if not weights.dtype.is_floating_point or weights.device != q.device:
            raise TypeError(
                f"weights is {weights.dtype} on {weights.device}; it must be floating point on {q.device}, as q is"
            )
        if weights.shape != q.shape[:3]:
            _refuse_shape("weights", weights, f"{list(q.shape[:3])}, one number a query and head")
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"count={count!r} must be an int")
    if count < 1:
        raise ValueError(f"count={count} must be at least 1")


def _check_attention(q: Any, k: Any, v: Any, indices: Any, sinks: Any, plan: Plan) -> None:
    """Raise TypeError or ValueError unless attention can be computed of these."""
    _check_whole_heads(plan)
    inside = isinstance(v, int) and not isinstance(v, bool)
    optional = ({} if inside else {"v": v}) | ({} if sinks is None else {"sinks": sinks})
    check_plain(q=q, k=k, indices=indices, **optional)
    check_tensors(q, k, k if inside else v, plan.length, plan.keys_apart)
    if inside and not 1 <= v <= k.shape[3]:
        raise ValueError(f"v={v} must be from 1 to {k.shape[3]}, the numbers of a key, of which it takes the first")
    if sinks is not None:
        check_sinks(sinks, q)
    if indices.dtype not in (torch.int64, torch.int32) or indices.device != q.device:
        raise TypeError(f"indices is {indices.dtype} on {indices.device}; it must be int64 on {q.device}, as q is")
    of_heads = indices.dim() == 4 and indices.shape[1] in (1, k.shape[1])
    if not (of_heads or indices.dim() == 3) or (indices.shape[0], indices.shape[-2]) != (q.shape[0], q.shape[2]):
        _refuse_shape("indices", indices, f"[{q.shape[0]}, {q.shape[2]}, count]")


def _refuse_shape(name: str, x: Tensor, wanted: str) -> None:
    raise ValueError(f"{name} has shape {list(x.shape)}; it must be {wanted}")


@dataclass(frozen=True, eq=False)
class Choosing(Pass):
    """The choice: candidates (:mod:`burst_attention.kernels.chosen`) of this rank's queries.

    ``beside``: [B, H, S_local] weights, or, of blocks, int64 [1, 1, S_local] positions of the queries. ``positions``:
    int64 [1, 1, Sk], of the key shard's rows, with which they circulate. ``size``: of a block; 0 to choose keys.
    """

    direction: ClassVar[Direction] = Direction.FORWARD
    returns: ClassVar[tuple[Side, ...]] = direction.returns

    q: Tensor
    beside: Tensor
    k: Tensor
    positions: Tensor
    count: int
    scale: float
    size: int
    local: int

    @property
    def own(self) -> Mapping[Side, Tensors]:
        return {Side.QUERY: (self.q, self.beside), Side.KEY: (self.k, self.positions)}

    def visit(self, query: Tensors, key: Tensors, tiles: Tiles, running: Running) -> Mapping[Side, Tensors]:
        (q, beside), (k, positions), count = query, key, self.count
        if self.size:
            how = positions[0, 0], tiles, count, self.size, self.local
            return {Side.QUERY: (chosen.choose_blocks(q, k, beside[0, 0], *how),)}
        return {Side.QUERY: (chosen.choose(q, k, beside, positions[0, 0], tiles, count, self.scale),)}

    def empty(self, side: Side, rows: int, dtypes: tuple[torch.dtype, ...]) -> Tensors:
        heads = self.q.shape[1] if self.size else 1
        return (self.positions.new_empty(self.q.shape[0], heads, rows, self.count),)

    def blank(self, side: Side, rows: int) -> Tensors:
        return tuple(x.fill_(chosen.NONE) for x in self.empty(side, rows, ()))

    def combine(self, side: Side, total: Tensors, part: Tensors) -> None:
        chosen.join_(*total, *part, distinct=not self.size)

    def wire_dtypes(self, side: Side, *, exact: bool) -> tuple[torch.dtype, ...]:
        return (torch.int64,)

    final_dtypes = wire_dtypes  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class _Choice:
    """``indices``: int64 [B, C, S_local, count]; ``positions``: as in :class:`Choosing`; ``span``: their end."""

    indices: Tensor
    positions: Tensor
    span: int

    @classmethod
    def of(cls, indices: Tensor, plan: Plan) -> _Choice:
        return cls(indices.long(), _positions(plan, indices.device), plan.schedule.span)


@dataclass(frozen=True, eq=False, kw_only=True)
class _OfChosen(Pass):
    """A pass over chosen rows: choices stay with the queries, and positions circulate with the keys.

    ``inside``: how many numbers of a key are its value, which then doesn't travel; 0: values travel beside the keys.
    """

    choice: _Choice
    inside: int

    @property
    def keys(self) -> Tensors:
        keys: Tensors = super().keys  # type: ignore[misc]
        return keys[:1] if self.inside else keys

    @property
    def own(self) -> Mapping[Side, Tensors]:
        own = super().own
        return {Side.QUERY: (*own[Side.QUERY], self.choice.indices), Side.KEY: (*own[Side.KEY], self.choice.positions)}

    payload = Pass.payload

    def rows(self, indices: Tensor, positions: Tensor, tiles: Tiles) -> Tensor:
        """Return which rows of a key shard each query has chosen and sees."""
        return chosen.rows_of(indices, positions[0, 0], tiles, self.choice.span)


@dataclass(frozen=True, eq=False, kw_only=True)
class ChosenForward(_OfChosen, Forward):
    """(out, lse) of chosen rows."""

    def visit(self, query: Tensors, key: Tensors, tiles: Tiles, running: Running) -> Mapping[Side, Tensors]:
        (q, indices), (k, *v, positions) = query, key
        at = self.rows(indices, positions, tiles)
        return {Side.QUERY: chosen.forward(q, k, v[0] if v else self.inside, at, self.scale)}


@dataclass(frozen=True, eq=False, kw_only=True)
class ChosenBackward(_OfChosen, Backward):
    """Gradients of chosen rows. Sums for foreign keys go home."""

    def visit(self, query: Tensors, key: Tensors, tiles: Tiles, running: Running) -> Mapping[Side, Tensors]:
        (dout, q, stats, indices), (k, *v, positions) = query, key
        at, values = self.rows(indices, positions, tiles), v[0] if v else self.inside
        dq, *of_keys = chosen.backward(dout, q, k, values, stats[..., 0], stats[..., 1], at, self.scale)
        return {Side.QUERY: (dq,), Side.KEY: tuple(of_keys)}


def _program(plan: Plan, direction: Direction) -> Program:
    """Return the program in which keys circulate: choices don't travel."""
    return plan.schedule.program(KEYS_CIRCULATE, direction)


def _positions(plan: Plan, device: torch.device) -> Tensor:
    return plan.key_positions.to(device).view(1, 1, -1)


def _fields(plan: Plan, count: int, scale: float, tensors: Sequence[Tensor | None], **more: Any) -> dict[str, Any]:
    """Return what all ranks must pass equally; of tensors all sizes but those of tokens."""
    shapes = [None if x is None else [str(x.dtype), [n for d, n in enumerate(x.shape) if d != 2]] for x in tensors]
    return {**plan.schedule.description, "dtypes and sizes": shapes, "count": count, "scale": scale, **more}


@torch.library.custom_op("burst_attention::choose", mutates_args=())
def choose(
    q: Tensor, k: Tensor, weights: Tensor | None, handle: int, count: int, scale: float, size: int, local: int
) -> Tensor:
    """Compute :func:`choose_keys`, [B, 1, S_local, count]; with a ``size`` the blocks of :func:`choose_blocks`."""
    plan = plan_of(handle)
    with plan.agreement.entering(_CHOICE, once=True):
        plan.transport.check_device(q.device)
        more = {"device": q.device.type, "size of a block": size, "local blocks": local}
        fields = _fields(plan, count, scale, (q, k, weights), **more)
        beside = plan.positions.to(q.device).view(1, 1, -1) if weights is None else weights
        work = Choosing(q, beside, k.contiguous(), _positions(plan, q.device), count, scale, size, local)
        program = _program(plan, Direction.FORWARD)
    plan.agreement.agree(_CHOICE, fields, once=True)
    with torch.autocast(q.device.type, enabled=False):
        sums = sweep(program, plan.transport, work, plan.indices, call=_number(plan))
    return chosen.positions_of(sums[Side.QUERY][0])


@torch.library.custom_op("burst_attention::choose_between", mutates_args=())
def choose_between(
    q: Tensor, k: Tensor, weights: Tensor, first: Tensor, stop: Tensor, count: int, scale: float
) -> Tensor:
    """Choose each query's best of the keys ``first`` to ``stop`` - 1, as :func:`choose_keys` scores them.

    All keys are here: k is [B, 1, keys, D], and the result int64 [B, S_local, count] has numbers of keys. weights are
    in fp32; first and stop are int64 [S_local], on the CPU.
    """
    with torch.autocast(q.device.type, enabled=False):
        found = chosen.choose_between(q, k, weights, first, stop, count, scale)
    return chosen.positions_of(found)[:, 0]


@torch.library.custom_op("burst_attention::attend_chosen", mutates_args=())
def attend_chosen(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    indices: Tensor,
    sinks: Tensor | None,
    handle: int,
    scale: float,
    wanted: int,
    inside: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the forward of :func:`chosen_attention`: out, lse and the number of the call, float64 [1].

    ``inside``: how many numbers of a key are its value, if ``v`` is None; else 0.
    """
    plan = plan_of(handle)
    with plan.agreement.entering(_ATTENTION, once=True):
        plan.transport.check_device(q.device)
        wants = [bool(wanted & bit) for bit in (QUERY, KEY, VALUE, SINKS)]
        more = {"device": q.device.type, "gradients wanted by q, k, v, sinks": wants, "values in keys": inside}
        fields = _fields(plan, indices.shape[-1], scale, (q, k, v, indices, sinks), **more)
        how: Any = {"choice": _Choice.of(indices, plan), "inside": inside}
        work = ChosenForward(q, k, k[..., :inside] if v is None else v, scale, Reference(), **how)
        program = _program(plan, Direction.FORWARD)
    plan.agreement.agree(_ATTENTION, fields, once=True)
    plan.usage.note_call()
    number = _number(plan)
    with torch.autocast(q.device.type, enabled=False):
        out, lse = sweep(program, plan.transport, work, plan.indices, call=number)[Side.QUERY]
    out, lse = with_sinks(*with_lost_rows(out, lse, lost_rows(q)), sinks)
    return converted(out, q.dtype).contiguous(), lse.contiguous(), torch.tensor([number], dtype=torch.float64)


@torch.library.custom_op("burst_attention::attend_chosen_backward", mutates_args=())
def attend_chosen_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    indices: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    number: Tensor,
    handle: int,
    scale: float,
    inside: int,
) -> list[Tensor]:
    """Compute the gradients: its part of the sinks', empty without sinks; dq, dk and, with ``v``, dv of its shards."""
    plan = plan_of(handle)
    plan.transport.check_device(q.device)
    stats = lse, row_delta(dout, out, dlse, lse.dtype)
    packed = torch.stack((finite_lse(lse), stats[1]), -1)
    how: Any = {"choice": _Choice.of(indices, plan), "inside": inside}
    work = ChosenBackward(dout, q, k, k[..., :inside] if v is None else v, packed, scale, Reference(), **how)
    call = plan.transport.health.note_backward(int(number.item()))
    with torch.autocast(q.device.type, enabled=False):
        sums = sweep(_program(plan, Direction.BACKWARD), plan.transport, work, plan.indices, call=call)
    of_sinks = lse.new_empty(0) if sinks is None else sink_gradient(*stats, sinks)
    return [of_sinks, *rounded_gradients(sums, 1.0, q.dtype)]


def _number(plan: Plan) -> int:
    """Return the number that marks a call's messages."""
    return plan.transport.health.next_call() if plan.world > 1 else 0


@choose.register_fake
def _(q: Tensor, k: Tensor, weights: Any, handle: int, count: int, scale: float, size: int, local: int) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1] if size else 1, q.shape[2], count), dtype=torch.int64)


@choose_between.register_fake
def _(q: Tensor, k: Tensor, weights: Tensor, first: Tensor, stop: Tensor, count: int, scale: float) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[2], count), dtype=torch.int64)


@attend_chosen.register_fake
def _(q: Tensor, k: Tensor, v: Tensor | None, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    lse = q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
    width = others[-1] if v is None else v.shape[3]
    return q.new_empty((*q.shape[:3], width)), lse, torch.empty(1, dtype=torch.float64)


@attend_chosen_backward.register_fake
def _(
    dout: Tensor, dlse: Any, q: Tensor, k: Tensor, v: Any, indices: Any, sinks: Any, out: Any, lse: Tensor, *_: Any
) -> list[Tensor]:
    grads = [x.new_empty(x.shape) for x in (q, k, v) if x is not None]
    return [lse.new_empty(0) if sinks is None else torch.empty_like(sinks), *grads]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, indices, sinks, ctx.handle, ctx.scale, _, ctx.inside = inputs
    out, lse, number = output
    ctx.plan = plan_of(ctx.handle) if isinstance(ctx.handle, int) else None
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(number)
    ctx.save_for_backward(q, k, v, indices, sinks, out, lse, number)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Any) -> tuple[Any, ...]:
    if ctx.plan is not None:  # there is none while a compiler traces
        check_transforms(f"the backward of {_ATTENTION}", dout=dout, dlse=dlse)
    q, k, v, indices, sinks, out, lse, number = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    of_sinks, dq, dk, *dv = attend_chosen_backward(
        dout, dlse, q, k, v, indices, sinks, out, lse, number, ctx.handle, ctx.scale, ctx.inside
    )
    of_sinks = None if sinks is None else of_sinks
    return dq, dk, dv[0] if dv else None, None, of_sinks, *(None for _ in ctx.needs_input_grad[5:])


def _refuse(ctx: Any, *grads: Tensor) -> None:
    refuse_second(_ATTENTION)


attend_chosen.register_autograd(_differentiate, setup_context=_save)
attend_chosen_backward.register_autograd(_refuse)
