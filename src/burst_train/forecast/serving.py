"""Predict generation after a long prompt: a rank's bytes, seconds to the first token and for each further one.

No model runs. Keys and values are dealt over the ranks as by ``ShardedCache``. Weights are whole on every rank, or each
rank has 1/W of each matrix's rows (``shard_weights``). In a step, every rank has the new token of each row:

    each layer   q, k, v of the token       with shared weights: this rank's columns, then an exchange of columns
                 attention over own keys    then an exchange of (out, lse)
                 projection, MLP            with shared weights: three more exchanges of columns
    head         the next token, greedily   with shared weights: an exchange of maxima; the embedding's rows before

A prompt is one forward on shards. With shared weights each layer is gathered while the layer before it computes; CPUs
of one host read each other's rows in place.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from burst_attention.attention import Reach, dealt_bytes
from burst_attention.inference import ARGMAX_BYTES, NO_HOLE, PAGE, first_needed
from burst_attention.plan.layout import Layout
from burst_attention.plan.rows import Direction
from burst_attention.planner.rates import Link

from .footprint import buffers
from .forecast import PredictedStep, predicted_step
from .models import Matrix
from .request import BANDWIDTH_EFFICIENCY, Cluster, ForecastRequest

MOST_RANKS = 1 << 16  # that are looked at to find the fewest
WHOLE, SHARDED = "whole", "sharded"
SERVED = ("llama", "mistral", "qwen2", "qwen3")  # families that are predicted

# Seconds of a step in which the host prepares operators, for each layer and around them. Measured with a narrow Llama
# over two ranks of one thread (Intel Xeon): an operator takes as long on the host of a GPU.
HOST_LAYER, HOST_STEP = 6e-4, 2e-3


@dataclass(frozen=True, kw_only=True)
class Served:
    """The prediction for one way to hold the weights; figures are those of the rank with the most."""

    weights: str  # WHOLE or SHARDED
    memory: Mapping[str, int]  # bytes by part; they add up to the peak
    prompt: float  # seconds of the forward of the prompt
    step: Mapping[str, float]  # seconds of a step by part, of which the device's and the host's may overlap
    token: float  # seconds of a step, in which each row gets a token
    sent: int  # bytes that a rank sends in a step
    exchanges: int  # in which it sends them
    fits: bool | None  # None if the device's memory is unknown
    ranks: int | None = None  # the fewest that hold the sequence; None if unknown, or no number does

    @property
    def first(self) -> float:
        """Seconds from the prompt to the first token: all tokens but the last on shards, then a step."""
        return self.prompt + self.token

    @property
    def bytes(self) -> int:
        """Bytes at the peak."""
        return sum(self.memory.values())


def served(request: ForecastRequest, host: float | None = None) -> list[Served]:
    """Predict generation after ``request.seq_len`` tokens with whole and with sharded weights.

    ``host``: seconds of a step in which one rank's host prepares operators, if they were measured.

    Raises:
        ValueError: the model's family, or the speed of the device's memory, is unknown.
    """
    name, family = request.model.name, request.model.family
    if request.model.mixtures:
        raise ValueError(f"--model {name!r} has a mixture of experts, which --generate does not predict; leave it out")
    if family not in SERVED:
        raise ValueError(f"--model {name!r} is of the family {family}; --generate predicts {', '.join(SERVED)}")
    prompt = predicted_step(request.strategy, request)
    host = HOST_STEP + request.model.layers * HOST_LAYER if host is None else host
    return [Serving(q=prompt.q, prompt=prompt, shared=shared, host=host).predicted() for shared in (False, True)]


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Generation of one way to hold the weights."""

    q: ForecastRequest  # with the layout of the prompt's attention
    prompt: PredictedStep
    shared: bool
    host: float  # seconds of a step in which one rank's host prepares operators

    def predicted(self) -> Served:
        """Return all figures."""
        memory, limit = self.memory(self.q.cluster.ranks), self.q.limit
        step = {"weights": self.weights_seconds, "cache": self.cache_seconds, "exchange": self.exchange_seconds}
        host = self.host / self._part_of_time
        # A GPU computes while the host prepares what follows; on a CPU both are the same cores.
        token = max(host, sum(step.values())) if self._on_gpu else host + sum(step.values())
        return Served(
            weights=SHARDED if self.shared else WHOLE,
            memory=memory,
            prompt=self.prompt_seconds,
            step=step | {"host": host},
            token=token,
            sent=(self.q.cluster.ranks - 1) * sum(self._messages),
            exchanges=len(self._messages),
            fits=None if limit is None else sum(memory.values()) <= limit,
            ranks=self.fewest_ranks(),
        )

    @property
    def _on_gpu(self) -> bool:
        measured, name = self.q.cluster.rates.measured_on, self.q.cluster.rates.name
        return not name.startswith("cpu") if measured is None else measured.device != "cpu"

    @property
    def _gathers(self) -> bool:
        """Whether a prompt gathers weights."""
        return self.shared and (self._on_gpu or self.q.cluster.nodes > 1)

    @property
    def _read_rate(self) -> float:
        """Bytes of weights, keys and values that a rank reads per second, if all ranks do so."""
        cluster = self.q.cluster
        rate, bandwidth = cluster.rates.overhead.read, cluster.device.bandwidth
        if not rate and bandwidth is not None:
            rate = BANDWIDTH_EFFICIENCY * bandwidth
        if not rate:
            raise ValueError(
                f"--hardware {cluster.rates.name}: these rates don't say how fast memory is read; measure them again "
                "with burst calibrate, or name a preset"
            )
        return rate * self._part_of_time

    @property
    def _part_of_time(self) -> float:
        """The part of the time in which a rank computes, if all do and share cores."""
        at_once, ranks = self.q.cluster.rates.overhead.at_once, self.q.cluster.ranks
        return min(1.0, at_once / ranks) if at_once else 1.0

    def weights(self, ranks: int) -> int:
        """Return the bytes of weights on the fullest of ``ranks`` ranks. Vectors are whole everywhere."""
        return sum(self._held(matrix, ranks) for matrix in (*self.q.model.inside, *self.q.model.outside))

    def _held(self, matrix: Matrix, ranks: int) -> int:
        rows, columns = matrix
        return (ceil(rows / ranks) if self.shared and columns > 1 else rows) * columns * self.q.io

    def held(self, ranks: int) -> Mapping[Reach, list[int]]:
        """Return the tokens that each rank holds in a layer of each reach, once the first token is computed."""
        last = self.q.seq_len - 1
        table = Layout(self.q.layout, last, ranks).table(range(ranks)).tolist()
        found: dict[Reach, list[int]] = {}
        for reach in self.q.model.windows_by_count:
            first = first_needed(last, reach, [NO_HOLE])
            counts = [0] * ranks
            for rank, _, start, count, stride in table:
                counts[rank] += len(range(max(start, first), start + count * stride, stride))
            counts[last // PAGE % ranks] += 1
            found[reach] = counts
        return found

    def cache(self, ranks: int) -> int:
        """Return the bytes of keys and values on the rank with the most. The last token's has room for a page more."""
        held, last = self.held(ranks), (self.q.seq_len - 1) // PAGE % ranks
        layers = self.q.model.windows_by_count
        tokens = [sum(count * held[reach][rank] for reach, count in layers.items()) for rank in range(ranks)]
        tokens[last] += PAGE * self.q.model.layers
        return self._token_bytes * max(tokens)

    def memory(self, ranks: int) -> Mapping[str, int]:
        """Return bytes by part on the fullest of ``ranks`` ranks; the prompt's work in proportion to its tokens."""
        q, m = self.q, self.q.model
        tokens = q.batch * ceil(q.seq_len / ranks)
        # A norm works in fp32, twice the width. Through an MLP four tensors of hidden states are alive: the embeddings,
        # the layer's input, the sum with the attention's output, and its norm.
        wide = max(8 * m.hidden, 3 * q.io * m.intermediate, q.io * (m.q_width + 2 * m.kv_width) + self._attention)
        work = round(tokens * (q.io * (4 * m.hidden + 2 * m.head_dim) + wide))
        gathered = 0
        if self._gathers and ranks > 1:  # a layer and the next one; before them, the embedding
            gathered = max(2 * m.layer_size * q.io, m.vocabulary * m.hidden * q.io - work)
        cache = self.cache(ranks)
        grown = cache // m.layers  # keys and values of a layer are copied when they need more room
        return {"weights": self.weights(ranks), "cache": cache, "work": max(work + gathered, grown)}

    @cached_property
    def _attention(self) -> float:
        """Bytes per token that the attention of a prompt holds besides q, k and v."""
        q = self.q
        pairs = zip(self.prompt.ways, q.kinds, strict=True)
        held = max(buffers(way, q.setting(*kind), q.dtype, direction=Direction.FORWARD) for way, kind in pairs)
        return held / (q.batch * q.tokens)

    def fewest_ranks(self) -> int | None:
        """Return the fewest ranks that hold the sequence; None if the memory is unknown, or no number does."""
        limit, most = self.q.limit, min(MOST_RANKS, self.q.seq_len - 1)
        if limit is None or sum(self.memory(1).values()) <= limit:
            return None if limit is None else 1
        if sum(self.memory(most).values()) > limit:
            return None
        return 1 + bisect_left(range(1, most), True, key=lambda ranks: sum(self.memory(ranks).values()) <= limit)

    @property
    def prompt_seconds(self) -> float:
        """Seconds of a forward of all tokens on shards, with what it does not hide of gathered weights."""
        attention = sum(count * call.forward.seconds for count, call in self.prompt.calls)
        seconds, m, cluster = attention + self.q.forward_seconds(), self.q.model, self.q.cluster
        if not self._gathers:
            return seconds
        layers = exchange(m.layers_size * self.q.io // cluster.ranks, cluster)
        return max(seconds, layers) + exchange(m.vocabulary * m.hidden * self.q.io // cluster.ranks, cluster)

    @property
    def weights_seconds(self) -> float:
        """Seconds in which a rank reads the weights of a step, or multiplies by them, whichever is longer."""
        q, ranks = self.q, self.q.cluster.ranks
        read = sum(self._held(matrix, ranks) for matrix in q.model.inside)
        read += self._held((q.model.vocabulary, q.model.hidden), ranks)  # the head; of an embedding only a row is read
        return max(read / self._read_rate, 2 * q.batch * read / q.io / q.product_rate)

    @property
    def cache_seconds(self) -> float:
        """Seconds in which the fullest rank reads its keys and values, or multiplies by them."""
        q, m = self.q, self.q.model
        held = self.held(q.cluster.ranks)
        tokens = max(
            sum(layers * held[reach][rank] for reach, layers in m.windows_by_count.items())
            for rank in range(q.cluster.ranks)
        )
        flops = 2 * q.batch * m.q_heads * (m.head_dim + (m.v_head_dim or m.head_dim)) * tokens
        return max(self._token_bytes * tokens / self._read_rate, flops / q.cluster.rates.speed(q.io).forward)

    @property
    def _token_bytes(self) -> int:
        """Bytes of the keys and values of a token of each row in one layer."""
        m = self.q.model
        return self.q.batch * self.q.io * m.kv_heads * (m.head_dim + (m.v_head_dim or m.head_dim))

    @cached_property
    def _messages(self) -> list[int]:
        """Bytes that the fullest rank sends to each other rank, by exchange of a step."""
        q, m, ranks = self.q, self.q.model, self.q.cluster.ranks
        if ranks == 1:
            return []
        sizes = {"batch": q.batch, "queries": 1, "q_heads": m.q_heads, "v_head_dim": m.v_head_dim or m.head_dim}
        messages = [dealt_bytes(world=2, **sizes, dtype=q.dtype)] * m.layers
        if self.shared:
            widths = ((m.q_width, m.kv_width, m.kv_width), (m.hidden,), (m.intermediate,) * 2, (m.hidden,))
            columns = [sum(ceil(width / ranks) for width in together) for together in widths] * m.layers
            columns.append(m.hidden)  # who has a token's embedding sends the whole row
            messages += [q.batch * q.io * count for count in columns]
            messages.append(q.batch * ARGMAX_BYTES)  # greedy search needs no logits of other ranks
        return messages

    @property
    def exchange_seconds(self) -> float:
        """Seconds of all exchanges of a step, and of the agreement on it; nothing hides them."""
        cluster = self.q.cluster
        link = cluster.rates.across if cluster.nodes > 1 else cluster.rates.inside
        rounds = (cluster.ranks - 1).bit_length()
        return rounds * latency(link) + sum(exchange(size, cluster) for size in self._messages)


def latency(link: Link) -> float:
    """Return the seconds of a small message between products; as between idle ranks, if that was not measured."""
    return link.busy or link.latency


def exchange(size: int, cluster: Cluster) -> float:
    """Return the seconds in which each rank sends ``size`` bytes to each other rank; the busiest port takes them."""
    here, rates = min(cluster.per_node, cluster.ranks), cluster.rates
    others = ((rates.inside, here - 1), (rates.across, cluster.ranks - here))
    return max(
        count * (latency(link) + size / link.bytes_per_second) * (here if link.shared else 1) for link, count in others
    )
