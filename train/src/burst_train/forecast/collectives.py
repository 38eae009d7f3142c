"""A simple model of collectives, for sharded parameters and for engines other than ours.

A gather or scatter over W ranks uses the ring algorithm: each rank sends W - 1 of W parts. A node sends each part once
to the next node, spread over its ranks' ports. An all-to-all sends one part to each rank. The time is that of the
busier kind of link. A gather adds one message latency per doubling of the ranks. No computation hides these times.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, gcd, log2

from burst_attention.plan.cost import Shape
from burst_attention.planner.rates import Link, Rates

from .calls import AttentionStrategy, Call, Pass, Workload, predict_call

RING = AttentionStrategy(layout="zigzag", route="ring-attention", circulate="key-value")


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Bytes that a rank sends within its node and to other nodes, mean over ranks, and the time in seconds."""

    inside: float = 0.0
    across: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: Exchange) -> Exchange:
        return Exchange(
            inside=self.inside + other.inside,
            across=self.across + other.across,
            seconds=self.seconds + other.seconds,
        )

    def times(self, count: float) -> Exchange:
        """Return ``count`` of these exchanges, one after another."""
        return Exchange(inside=count * self.inside, across=count * self.across, seconds=count * self.seconds)


def gather(size: float, world: int, per_node: int, rates: Rates) -> Exchange:
    """Return an all-gather of ``size`` bytes, the total of all ranks; a reduce-scatter costs the same."""
    if world == 1:
        return Exchange()
    sent, here = size * (world - 1) / world, min(per_node, world)
    if world <= per_node:
        return Exchange(inside=sent, seconds=sent / rates.inside.bytes_per_second + _latency(rates.inside, world))
    inside, across = sent * (here - 1) / here, sent / here
    port = across * (here if rates.across.shared else 1)
    seconds = max(inside / rates.inside.bytes_per_second, port / rates.across.bytes_per_second)
    return Exchange(inside=inside, across=across, seconds=seconds + _latency(rates.across, world))


def all_to_all(part: float, world: int, per_node: int, rates: Rates) -> Exchange:
    """Return an all-to-all in which each rank sends ``part`` bytes to each other rank."""
    here = min(per_node, world)
    near, far = here - 1, world - here
    ports = far * (here if rates.across.shared else 1)
    seconds = max(
        near * (rates.inside.latency + part / rates.inside.bytes_per_second),
        far * rates.across.latency + ports * part / rates.across.bytes_per_second,
    )
    return Exchange(inside=near * part, across=far * part, seconds=seconds)


def _latency(link: Link, world: int) -> float:
    return link.latency * ceil(log2(world))


def ulysses(setting: Workload) -> Call:
    """Predict DeepSpeed-Ulysses: two all-to-alls around whole attention, not hidden by computation."""
    return _with(whole(setting), _traded(setting, setting.world))


def usp(setting: Workload, groups: int) -> Call:
    """Predict USP: all-to-alls among ``groups`` neighbours, and RingAttention over the ranks with the same heads."""
    call = predict_call(RING, ring_of(setting, groups))
    standing = call.standing and (groups * call.standing[0], groups * call.standing[1])
    return replace(_with(call, _traded(setting, groups)), standing=standing)


def ring_of(setting: Workload, groups: int) -> Workload:
    """Return the setting of one ring: ranks with the same heads after ``groups`` neighbours exchanged them.

    All rings run at the same time, so each ring gets a share of shared ports and cores.
    """
    shape, node = setting.shape, min(setting.per_node, setting.world)
    rates = setting.rates
    links = {name: getattr(rates, name) for name in ("inside", "across")}
    slowed = {
        name: replace(link, bytes_per_second=link.bytes_per_second / (min(groups, node) if link.shared else 1))
        for name, link in links.items()
    }
    at_once = rates.overhead.at_once / groups
    return replace(
        setting,
        world=setting.world // groups,
        per_node=max(1, setting.per_node // groups),
        shape=replace(shape, q_heads=shape.q_heads // groups, kv_heads=shape.kv_heads // groups),
        rates=replace(rates, **slowed, overhead=replace(rates.overhead, at_once=at_once)),
    )


def _traded(setting: Workload, groups: int) -> Exchange:
    """Return the two all-to-alls among ``groups`` neighbours; forward and backward cost the same."""
    shape, world, node = setting.shape, setting.world, setting.per_node
    element = shape.batch * shape.io * setting.seq_len / world / groups  # bytes per head and channel, to one rank
    arriving = element * (shape.q_heads * shape.head_dim + shape.kv_heads * (shape.head_dim + shape.v_head_dim))
    leaving = element * shape.q_heads * shape.v_head_dim
    if node < world and groups < world:  # take the worst case: a node border splits the neighbours
        node = gcd(node, groups)
    rates = setting.rates
    if rates.across.shared and node < groups:  # the node's other ranks send at the same time
        across = replace(rates.across, bytes_per_second=rates.across.bytes_per_second * node / setting.per_node)
        rates = replace(rates, across=across)
    moved = [all_to_all(part, groups, node, rates) for part in (arriving, leaving)]
    return moved[0] + moved[1]


def tensor(setting: Workload, hidden: int) -> Call:
    """Predict tensor parallelism with sequence parallelism.

    Attention and feed-forward layer each gather all tokens' hidden states before and scatter them after. The backward
    does the same number. The call includes the feed-forward layer's collectives.
    """
    size = setting.shape.batch * setting.seq_len * hidden * setting.shape.io
    return _with(whole(setting), gather(size, setting.world, setting.per_node, setting.rates).times(4))


def whole(setting: Workload) -> Call:
    """Predict attention over all tokens for a rank's share of the heads, without an exchange."""
    shape, world = setting.shape, setting.world
    own: Shape = replace(shape, q_heads=shape.q_heads // world, kv_heads=shape.kv_heads // world)
    alone = replace(setting, world=1, shape=own)
    return predict_call(AttentionStrategy(layout="contiguous", circulate="query"), alone)


def _with(call: Call, moved: Exchange) -> Call:
    """Add an exchange to each pass; computation does not hide it."""

    def both(one: Pass) -> Pass:
        return replace(
            one,
            seconds=one.seconds + moved.seconds,
            inside=one.inside + moved.inside,
            across=one.across + moved.across,
            busiest=(one.busiest[0] + moved.inside, one.busiest[1] + moved.across),
        )

    return replace(call, forward=both(call.forward), backward=both(call.backward))
