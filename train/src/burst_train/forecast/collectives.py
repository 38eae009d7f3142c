"""Collectives by a simple model: what engines beside ours move through them, and what sharded parameters do.

A gather or a scatter of what W ranks hold together goes as rings do it: each rank sends W - 1 of W parts, of which a
node sends each once to the next node, spread over its ranks' ports. An all-to-all sends one part to each rank. Times
are those of the busier kind of link, with a message's latency once for each doubling of the ranks; nothing is hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, gcd, log2

from burst_attention.plan.cost import Shape
from burst_attention.planner.rates import Link, Rates

from .calls import Call, Pass, Setting, Way, foretell

RING = Way(layout="zigzag", route="ring-attention", travels="key-value")


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What a rank sends inside of its node and across, in the mean, and how long it takes."""

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
        """So many, one after another."""
        return Exchange(inside=count * self.inside, across=count * self.across, seconds=count * self.seconds)


def gather(size: float, world: int, per_node: int, rates: Rates) -> Exchange:
    """Of ``size`` bytes that all ranks hold together, to all of them; a reduce-scatter is the same backwards."""
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
    """Of ``part`` bytes from each rank to each other."""
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


def ulysses(setting: Setting) -> Call:
    """All tokens of some heads, exchanged for some tokens of all heads, and back; then and there, behind nothing."""
    return _with(whole(setting), _traded(setting, setting.world))


def usp(setting: Setting, groups: int) -> Call:
    """The same exchange among ``groups`` neighbours, and RingAttention over the ranks that then have the same heads."""
    call = foretell(RING, ring_of(setting, groups))
    standing = call.standing and (groups * call.standing[0], groups * call.standing[1])
    return replace(_with(call, _traded(setting, groups)), standing=standing)


def ring_of(setting: Setting, groups: int) -> Setting:
    """One of the rings of ranks that have the same heads once ``groups`` neighbours exchanged them.

    All rings are at work at once: of ports and cores that are shared each has its part.
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


def _traded(setting: Setting, groups: int) -> Exchange:
    """Tokens for heads among ``groups`` neighbours, and back, in either pass."""
    shape, world, node = setting.shape, setting.world, setting.per_node
    element = shape.batch * shape.io * setting.seq_len / world / groups  # of one head and channel, to one rank
    arriving = element * (shape.q_heads * shape.head_dim + shape.kv_heads * (shape.head_dim + shape.v_head_dim))
    leaving = element * shape.q_heads * shape.v_head_dim
    if node < world and groups < world:  # neighbours whom a border of nodes parts, as the worst of them
        node = gcd(node, groups)
    rates = setting.rates
    if rates.across.shared and node < groups:  # others of the node send at the same time
        across = replace(rates.across, bytes_per_second=rates.across.bytes_per_second * node / setting.per_node)
        rates = replace(rates, across=across)
    moved = [all_to_all(part, groups, node, rates) for part in (arriving, leaving)]
    return moved[0] + moved[1]


def tensor(setting: Setting, hidden: int) -> Call:
    """Tensor parallelism with sequence parallelism: before attention and feed-forward layer a gather of all tokens'
    hidden states, after each a scatter, and as many in the backward. The feed-forward layer's are counted here, too."""
    size = setting.shape.batch * setting.seq_len * hidden * setting.shape.io
    return _with(whole(setting), gather(size, setting.world, setting.per_node, setting.rates).times(4))


def whole(setting: Setting) -> Call:
    """Attention over all tokens for a rank's share of the heads: no exchange."""
    shape, world = setting.shape, setting.world
    own: Shape = replace(shape, q_heads=shape.q_heads // world, kv_heads=shape.kv_heads // world)
    alone = replace(setting, world=1, shape=own)
    return foretell(Way(layout="contiguous", travels="query"), alone)


def _with(call: Call, moved: Exchange) -> Call:
    """Each pass with an exchange that nothing hides."""

    def both(one: Pass) -> Pass:
        return replace(
            one,
            seconds=one.seconds + moved.seconds,
            inside=one.inside + moved.inside,
            across=one.across + moved.across,
            busiest=(one.busiest[0] + moved.inside, one.busiest[1] + moved.across),
        )

    return replace(call, forward=both(call.forward), backward=both(call.backward))
