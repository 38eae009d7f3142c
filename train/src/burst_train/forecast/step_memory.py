"""The memory of a training step by formula, at any size and without the model's library.

It says what ``burst_train.forecast.footprint`` counts, which runs the model itself over tensors without data; a
test holds one against the other. ``io`` is bytes an element: a 4 beside it is what is in fp32 whatever it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil

from burst_attention.planner.choice import Remat

from .models import Matrix, Model

REMATS: tuple[Remat, ...] = ("none", "keep-attention", "layer")  # the least to recompute first
PARTS = ("weights", "gradients", "AdamW", "gathered", "activations", "attention", "loss")
CHUNK_ELEMENTS = 1 << 22  # logits that exist at once, at least: those of the loss


@dataclass(frozen=True, kw_only=True)
class Step:
    """One micro-step of a rank.

    Attributes:
        tokens: that the rank holds of each sequence.
        world: ranks over which weights are sharded.
        buffers: of an attention call (:func:`burst_train.forecast.buffers.buffers`).
        kept: bytes that a layer's attention keeps beside the usual.
        results: bytes that it gives beside out and lse, which are kept with them by ``keep-attention``.
        gathered: bytes that a layer has more at its peak, of what is gathered of other ranks' tokens.
    """

    model: Model
    tokens: int
    batch: int
    world: int
    io: int
    buffers: int
    remat: Remat = "none"
    mlp_chunks: int = 1
    accumulates: bool = False
    kept: int = 0
    results: int = 0
    gathered: int = 0

    def parts(self) -> Mapping[str, int]:
        """Bytes by :data:`PARTS` at the moment that takes most; they add up to the peak."""
        weights = self.weights
        gathered = self.io * (self.model.root_size + 2 * self.model.layer_size)
        moments = [Moment(gradients=weights, weights_too=True)]
        if self.tokens:
            moments += [self._loss(), *self._backward()]
        if self.accumulates:
            moments = [Moment(*each.held, gradients=weights, weights_too=each.weights_too) for each in moments]
        most = max(moments, key=lambda each: each.gradients + sum(each.held) + gathered * (not each.weights_too))
        if most.weights_too:  # the optimizer's: of one weight at a time its root and its quotient
            largest = 2 * max(self._shard(each) for each in (*self.model.layer(), *self.model.root()))
            parts = [weights, weights, 2 * weights + largest, 0, 0, 0, 0]
        else:
            parts = [weights, most.gradients, 2 * weights, gathered, *most.held]
        return dict(zip(PARTS, parts, strict=True))

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(self.parts().values())

    @property
    def weights(self) -> int:
        """A rank's shards, in fp32."""
        each = sum(map(self._shard, self.model.layer()))
        return self.model.layers * each + sum(map(self._shard, self.model.root()))

    def _shard(self, matrix: Matrix) -> int:
        rows, columns = matrix
        return ceil(rows / self.world) * columns * 4

    def _tokens(self, per_token: float) -> int:
        return round(self.batch * self.tokens * per_token)

    def kept_by_layer(self) -> int:
        """Of a layer, from its forward to its backward."""
        m, io = self.model, self.io
        if self.remat == "none":
            return self._tokens((8 + 4 * io) * m.hidden + self._fed_kept() + self._attending() + 8) + self.kept
        attention = io * m.q_width + 4 * m.q_heads if self.remat == "keep-attention" else 0
        return self._tokens(io * m.hidden + attention) + self.results * (self.remat == "keep-attention")

    def _fed_kept(self) -> float:
        return 4 * self.io * self.model.intermediate if self.mlp_chunks == 1 else 0

    def _attending(self) -> float:
        """Of a token: what the attention of a layer keeps: before and after the rotation, q, k, v, out and lse."""
        m, io = self.model, self.io
        norms = (4 + io) * (m.q_width + m.kv_width) + 4 * (m.q_heads + m.kv_heads) if m.normed else 0
        return 3 * io * m.q_width + 2 * io * m.kv_width + 4 * m.q_heads + norms

    def kept_by_root(self) -> int:
        """Of no layer: the last norm's, hidden states, tables of the rotation, ids."""
        m, io = self.model, self.io
        return self._tokens((4 + 2 * io) * m.hidden + 12) + 2 * io * m.head_dim * self.tokens

    def _loss(self) -> Moment:
        m, tokens = self.model, self.batch * self.tokens
        head, chunk = (
            m.vocabulary * m.hidden,
            min(max(CHUNK_ELEMENTS, tokens * m.hidden) // m.vocabulary, ceil(tokens / 4)),
        )
        logits, widened = 4 * max(1, chunk) * m.vocabulary, 4 * head * (self.io < 4)
        most = widened + max(4 * head + 2 * logits, 8 * head + logits)
        loss = most + self.io * tokens * m.hidden + 4 * chunk * m.hidden + 32 * tokens
        return Moment(self.model.layers * self.kept_by_layer() + self.kept_by_root(), 0, loss)

    def _backward(self) -> Iterator[Moment]:
        """In the backward of the last layer, when all others keep theirs, and of the first, with the others' gradients;
        where gradients of a layer, or of the root, are summed."""
        m, last = self.model, self.model.layers * self.kept_by_layer() + self.kept_by_root()
        first, head = self.kept_by_layer() + self._tokens(8), m.root_size * self.io // (1 if m.tied else 2)
        each = sum(map(self._shard, m.layer()))
        beside, at_attention = self._in_a_layer()
        summed = 4 if self.world == 1 else 8
        for held, gradients in ((last, 0), (first, (m.layers - 1) * each)):
            held += head
            down = m.hidden * m.intermediate * self.io * (self.remat != "none")  # its gradient is the first
            yield Moment(held + beside + down, gradients=gradients)
            own = m.layer_size * self.io
            if at_attention + self.buffers > beside:
                yield Moment(held + at_attention + own, self.buffers, gradients=gradients)
            before = held - self.kept_by_layer() + self._tokens(2 * self.io * m.hidden)
            yield Moment(before + m.layer_size * (self.io + summed), gradients=gradients)
        yield Moment(m.root_size * (self.io + summed) + self._tokens(8), gradients=m.layers * each)

    def _in_a_layer(self) -> tuple[int, int]:
        """What a layer's backward holds beside what is kept: at its peak, and at the attention's call."""
        m, io, pieces = self.model, self.io, self.mlp_chunks
        wide, part = io * (1 - 1 / pieces) * m.hidden, 6 * io * m.intermediate / pieces
        if self.remat == "none":
            fed = 2 * io * m.intermediate if pieces == 1 else wide + part
            attention = -(8 + io) * m.hidden - self._fed_kept()
            return self._tokens(max(20 * m.hidden, fed)) + self.gathered, self._tokens(attention)
        again = self._attending() - (io * m.q_width + 4 * m.q_heads if self.remat == "keep-attention" else 0)
        fed = (8 + 3 * io) * m.hidden + wide + part
        most = max(fed, 30 * m.hidden if pieces > 1 else 0)
        return (
            self._tokens(most + again + 16) + self.gathered,
            self._tokens((4 + io) * m.hidden + again + 12) + self.gathered,
        )


@dataclass(frozen=True)
class Moment:
    """What is alive at once beside weights and moments. ``weights_too``: no weight is whole then."""

    activations: int = 0
    attention: int = 0
    loss: int = 0
    gradients: int = 0
    weights_too: bool = False

    @property
    def held(self) -> tuple[int, int, int]:
        return self.activations, self.attention, self.loss
