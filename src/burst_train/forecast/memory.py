"""Predict a training step's memory by formula, for the families ``FORMULA``. Tests compare it with real steps.

``io``: bytes per element of the compute dtype. A literal 4 is the size of an fp32 element.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from burst_attention.loss.head import default_chunk
from burst_attention.planner.planner import Remat

from .models import Matrix, padded
from .request import ForecastRequest

REMATS: tuple[Remat, ...] = ("none", "keep-attention", "layer")  # ordered from least recomputation to most
PARTS = ("weights", "gradients", "AdamW", "gathered", "activations", "attention", "loss")
OVERLAPPING = 3  # chunks of heads of which something is alive at once: one computes, its neighbours are on the wire
RESIDENT = 2  # layer inputs on the device with offload: the one in use, and the one that is read ahead
NORMED = ("qwen3", "qwen3_moe")  # families that norm q and k per head


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """One micro-step of a rank."""

    q: ForecastRequest
    buffers: int  # bytes of an attention call's buffers
    remat: Remat = "none"
    kept: int = 0  # bytes that a layer's attention saves besides q, k, v, out and lse
    results: int = 0  # bytes that ``keep-attention`` saves besides out and lse
    gathered: int = 0  # bytes at a layer's peak for other ranks' tokens
    whole: bool = False  # embedding, head and norms are whole on every rank, other weights cut

    def parts(self) -> Mapping[str, int]:
        """Return bytes by :data:`PARTS` at the moment that needs most; they add up to the peak."""
        weights = self.weights
        moments_of_adamw = weights // 2 if self.q.saving.optimizer == "adamw-8bit" else 2 * weights
        layer, root = (padded(each, self.q.cluster.ranks) for each in (self.q.model.layer, self.q.model.outside))
        gathered = self.q.io * (root + 2 * layer)
        moments = [Moment(gradients=weights, weights_too=True)]
        if self.q.tokens:
            moments += [self._loss(), *self._backward()]
        if self.q.accumulates:
            moments = [moment._replace(gradients=weights) for moment in moments]
        most = max(moments, key=lambda moment: sum(moment[:4]) + gathered * (not moment.weights_too))
        if most.weights_too:  # the optimizer needs two temporaries (root and quotient) of one weight at a time
            largest = 2 * max(self._shard(matrix) for matrix in (*self.q.model.layer, *self.q.model.outside))
            parts = [weights, weights, moments_of_adamw + largest, 0, 0, 0, 0]
        else:
            parts = [weights, most.gradients, moments_of_adamw, gathered, *most[:3]]
        sums = dict(zip(PARTS, parts, strict=True))
        if self.whole:
            more = 4 * round(self.q.model.root_size * (1 - 1 / self.q.cluster.ranks))
            for part, times in (("weights", 1), ("gradients", 1), ("AdamW", 2)):
                sums[part] += times * more
            cut = 2 * self.q.model.layer_size // self.q.cluster.ranks
            sums["gathered"] = self.q.io * (self.q.model.root_size + cut) * (sums["gathered"] > 0)
        return sums | dict.fromkeys(("weights", "gradients", "AdamW"), 0) if self.q.saving.optimizer_offload else sums

    @property
    def weights(self) -> int:
        """Bytes of a rank's shards, in fp32."""
        layer = sum(map(self._shard, self.q.model.layer))
        return self.q.model.layers * layer + sum(map(self._shard, self.q.model.outside))

    def _shard(self, matrix: Matrix) -> int:
        rows, columns = matrix
        return ceil(rows / self.q.cluster.ranks) * columns * 4

    def _tokens(self, per_token: float) -> int:
        return round(self.q.batch * self.q.tokens * per_token)

    def kept_by_layer(self) -> int:
        """Return the bytes that a layer saves from its forward to its backward."""
        m, io = self.q.model, self.q.io
        if self.remat == "none":
            norms = (8 + 4 * io) * m.hidden + 8 if self.q.saving.mlp_chunks == 1 else 4 * io * m.hidden
            return self._tokens(norms + self._fed_kept() + self._attending()) + self.kept
        attention = io * m.q_width + 4 * m.q_heads if self.remat == "keep-attention" else 0
        return self._tokens(io * m.hidden + attention) + self.results * (self.remat == "keep-attention")

    def _kept(self, layers: int) -> int:
        """Return the bytes that this many layers keep on the device."""
        if self.q.saving.offload == "none" or self.remat == "none":
            return layers * self.kept_by_layer()
        inputs = self._tokens(self.q.io * self.q.model.hidden)
        return layers * (self.kept_by_layer() - inputs) + min(layers, RESIDENT) * inputs

    def _fed_kept(self) -> float:
        m, io = self.q.model, self.q.io
        if m.mixtures:  # rows before and after an expert, its columns; places, weights and scores of the choice
            used, experts = m.mixtures[0].per_token, m.mixtures[0].experts
            return used * (io * 2 * m.hidden + 40) + 4 * io * m.intermediate + 4 * experts + 4
        return 4 * io * m.intermediate if self.q.saving.mlp_chunks == 1 else 0

    def _fed_beside(self) -> float:
        """Return the bytes per token of a feed-forward layer's backward, without saved tensors."""
        m = self.q.model
        if m.mixtures:  # gradients of an expert's weighted rows and of its rows, and their product, all in fp32
            return 12 * m.mixtures[0].per_token * m.hidden
        return 2 * self.q.io * m.intermediate

    def _attending(self) -> float:
        """Return the bytes per token that attention saves: q, k, v, out, lse, and tensors of q's and k's norms."""
        m, io = self.q.model, self.q.io
        if self.q.saving.attention_chunks > 1:
            return io * m.q_width + 4 * m.q_heads
        norms = (4 + io) * (m.q_width + m.kv_width) + 4 * (m.q_heads + m.kv_heads) if m.family in NORMED else 0
        return 3 * io * m.q_width + 2 * io * m.kv_width + 4 * m.q_heads + norms

    def kept_by_root(self, *, in_layers: bool = False) -> int:
        """Return the bytes saved outside layers: rotation tables, ids and, before layers' backwards, the last norm."""
        m, io = self.q.model, self.q.io
        wide = 4 * m.hidden * (self.q.saving.mlp_chunks == 1)
        last = wide if in_layers else wide + 2 * io * m.hidden
        return self._tokens(last + 12) + 2 * io * m.head_dim * self.q.tokens

    def _loss(self) -> Moment:
        m, tokens = self.q.model, self.q.batch * self.q.tokens
        head, chunk = m.vocabulary * m.hidden, default_chunk(tokens, m.vocabulary, m.hidden)
        logits, widened = 4 * chunk * m.vocabulary, 4 * head * (self.q.io < 4)
        most = widened + max(4 * head + 2 * logits, 8 * head + logits)
        loss = most + self.q.io * tokens * m.hidden + 4 * chunk * m.hidden + 32 * tokens
        return Moment(self._kept(m.layers) + self.kept_by_root(), 0, loss)

    def _backward(self) -> Iterator[Moment]:
        """Yield the backward's moments that may be its peak: in the last layer, the first, and the reductions."""
        m, last = self.q.model, self._kept(self.q.model.layers) + self.kept_by_root(in_layers=True)
        first, head = self.kept_by_layer() + self._tokens(8), m.root_size * self.q.io // (1 if m.tied else 2)
        layer = sum(map(self._shard, m.layer))
        beside, at_attention = self._in_a_layer()
        summed = 4 if self.q.cluster.ranks == 1 else 8
        for held, gradients in ((last, 0), (first, (m.layers - 1) * layer)):
            held += head
            down = m.hidden * m.intermediate * self.q.io * (self.remat != "none")  # the first gradient to be computed
            yield Moment(held + beside + down * (not m.mixtures), gradients=gradients)
            if m.mixtures:  # the gradients of all experts; those of columns are fewer than the saved ones that are gone
                experts = sum(each.experts * each.expert for each in m.mixtures[:1]) * self.q.io
                columns = self._tokens(self._fed_beside() + 2 * self.q.io * m.intermediate)
                yield Moment(held + beside - columns + experts, gradients=gradients)
            own = m.layer_size * self.q.io
            if m.mixtures or at_attention + self.buffers > beside:
                yield Moment(held + at_attention + own, self.buffers, gradients=gradients)
            before = held - self.kept_by_layer() + self._tokens(2 * self.q.io * m.hidden)
            yield Moment(before + m.layer_size * (self.q.io + summed), gradients=gradients)
        yield Moment(m.root_size * (self.q.io + summed) + self._tokens(8), gradients=m.layers * layer)

    def _in_a_layer(self) -> tuple[int, int]:
        """Return the bytes of a layer's backward (at its peak, at the attention call), without saved tensors."""
        m, io, pieces = self.q.model, self.q.io, self.q.saving.mlp_chunks
        if pieces > 1:
            return self._in_a_layer_in_chunks()
        if self.remat == "none":
            attention = -(8 + io) * m.hidden - self._fed_kept()
            return self._tokens(max(20 * m.hidden, self._fed_beside())) + self.gathered, self._tokens(attention)
        again = self._attending_again()
        return (
            self._tokens((8 + 3 * io) * m.hidden + self._fed_kept() + self._fed_beside() + again + 16) + self.gathered,
            self._tokens((4 + io) * m.hidden + again + 12) + self.gathered,
        )

    def _attending_again(self) -> float:
        """Return the bytes per token that attention saves when its layer runs again."""
        m, kept = self.q.model, self.remat == "keep-attention"
        return self._attending() - kept * (self.q.io * m.q_width + 4 * m.q_heads)

    def _in_a_layer_in_chunks(self) -> tuple[int, int]:
        """As :meth:`_in_a_layer`, with norms and the feed-forward layer in chunks of tokens."""
        m, io, chunks = self.q.model, self.q.io, self.q.saving.mlp_chunks
        # Gradients of the layer's output and of the part's input; what the norms and attention save if they run again.
        passing, again = 2 * io * m.hidden, 0.0
        if self.remat != "none":
            again = 3 * io * m.hidden + self._attending_again()
        chunk = (6 * io * m.intermediate + 2 * io * m.hidden) / chunks
        sums = 3 * (4 + io) * m.hidden * m.intermediate
        attention = -1.0 * io * m.hidden  # the second norm's input and result are free by then
        if (groups := self.q.saving.attention_chunks) > 1:
            # The fp32 sum of the hidden states' gradient, D, out's gradient of one chunk of heads, and q, k and v of
            # this chunk and the next one. out is free by then.
            keys = m.kv_width / min(groups, m.kv_heads)
            attention += 4 * m.hidden + 4 * m.q_heads + 3 * io * m.q_width / groups + 4 * io * keys - io * m.q_width
        return (
            self._tokens(again + passing + chunk) + sums + self.gathered,
            self._tokens(again + attention) + self.gathered,
        )


class Moment(NamedTuple):
    """Bytes alive at one moment, without shards of weights and AdamW's moments. The first three are of activations."""

    activations: int = 0
    attention: int = 0
    loss: int = 0
    gradients: int = 0
    weights_too: bool = False  # the optimizer's update, when no weight is gathered
