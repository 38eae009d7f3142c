"""The input of a prediction: a model, a sequence and a cluster, and the work that follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from burst_attention import Mask
from burst_attention.attention import mask_of, shape_of, widest_of
from burst_attention.plan.balance import most_tokens
from burst_attention.plan.cost import Shape
from burst_attention.plan.indexed import Indexed
from burst_attention.plan.layout import BALANCED
from burst_attention.planner.planner import Remat
from burst_attention.planner.rates import Rates

from ..health.flops import PEAKS, indexed_pairs
from ..memory import DISK, Saving
from .attention import Transfer, Workload, gather
from .models import Model

# Families whose tensor parallelism is predicted: each rank has a part of the heads and of all that follows.
CUT = ("gemma3_text", "llama", "mistral", "qwen2", "qwen3")
TENSOR = "/tp:"  # between a strategy's name and the number of ranks that cut the model

# Share of a device's memory that a step may use. The process, the allocator and libraries need the rest.
USABLE = 0.9

# Shares of the data sheet's rates that a step reaches outside attention: matrix products, and element-wise operations.
# Estimates: predictions are within 22 % of published training speeds on 8 H100 (arXiv 2602.21196).
MATMUL_EFFICIENCY = 0.55
BANDWIDTH_EFFICIENCY = 0.8


@dataclass(frozen=True, kw_only=True)
class Device:
    """The device of one rank; None: unknown."""

    peak: float | None = None  # FLOP/s of its matrix units in bf16, without sparsity
    memory: float | None = None  # bytes
    bandwidth: float | None = None  # bytes/s of its memory
    link: float = 50e9  # bytes/s to host memory, one way: what PCIe 5.0 x16 reaches
    disk: float = 3e9  # bytes/s of a rank's share of a fast NVMe disk


DEVICES: Mapping[str, Device] = {
    "a100-pcie": Device(peak=PEAKS["A100"], memory=80e9, bandwidth=1.935e12, link=25e9),
    "a100-nvlink": Device(peak=PEAKS["A100"], memory=80e9, bandwidth=2.039e12, link=25e9),
    "h100-hgx": Device(peak=PEAKS["H100"], memory=80e9, bandwidth=3.35e12),
    "h200-hgx": Device(peak=PEAKS["H200"], memory=141e9, bandwidth=4.8e12),
    "b200-hgx": Device(peak=PEAKS["B200"], memory=180e9, bandwidth=8e12),
}


def device_of(rates: Rates) -> Device:
    """Return the device of a preset, by the name of its node; unknown rates give an empty device."""
    return DEVICES.get(rates.name.partition("+")[0], Device())


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Ranks in nodes of ``per_node``."""

    ranks: int
    per_node: int
    rates: Rates
    device: Device

    @property
    def nodes(self) -> int:
        """Number of nodes; the last may have fewer ranks."""
        return -(-self.ranks // self.per_node)

    @property
    def last(self) -> int:
        """Ranks of the last node."""
        return self.ranks - (self.nodes - 1) * self.per_node


@dataclass(frozen=True, kw_only=True)
class ForecastRequest:
    """The training step to predict; options are those of ``burst train``."""

    seq_len: int
    cluster: Cluster
    model: Model
    groups: int = 1  # data-parallel; the ranks of a group share each sequence
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16
    borders: tuple[int, ...] | None = None  # token positions of packed documents; None: one document
    joined: int = 1  # sequences that ``--packing balanced`` made one
    accumulates: bool = False  # whether gradients of an earlier micro-step exist
    remat: Remat | None = None  # None: the policy that recomputes least and fits
    saving: Saving = field(default_factory=Saving)
    strategy: str = "auto"
    layout: str = "auto"  # of the strategy, once it is chosen
    rope_scaling: str | None = None
    assumed: str = ""  # a note on hardware that was not named
    compares_meshes: bool = False  # whether tensor parallelism is predicted too
    tensor_parallel: int = 1  # of a request from :meth:`cut`: how many times as many ranks there are

    def cut(self, ranks: int) -> ForecastRequest:
        """Return the step as one of ``ranks`` tensor-parallel neighbours sees it: a part of model and ranks.

        ValueError: the ranks can't cut the model.
        """
        cluster, model, family, saving = self.cluster, self.model, self.model.family, self.saving
        for wrong, text in (
            (family not in CUT, f"--tensor-parallel is predicted for {', '.join(CUT)}, not for {family}"),
            (model.kv_heads % ranks, f"{ranks} ranks can't cut the {model.kv_heads} key-value heads"),
            (cluster.per_node % ranks, f"a node has {cluster.per_node} ranks, not a multiple of {ranks}"),
            (cluster.ranks % ranks, f"{ranks} must divide the {cluster.ranks} ranks"),
            (saving.attention_chunks > 1, "--tensor-parallel can't be combined with --attention-chunks"),
            (saving.optimizer != "adamw" or saving.optimizer_offload, "--tensor-parallel takes plain AdamW alone"),
        ):
            if wrong:
                raise ValueError(text)
        rates = cluster.rates
        if rates.across.shared:  # each node's groups share its port
            across = replace(rates.across, bytes_per_second=rates.across.bytes_per_second / ranks)
            rates = replace(rates, across=across)
        fewer = replace(cluster, ranks=cluster.ranks // ranks, per_node=cluster.per_node // ranks, rates=rates)
        strategy = self.strategy.partition(TENSOR)[0]
        return replace(self, cluster=fewer, model=model.cut(ranks), strategy=strategy, tensor_parallel=ranks)

    def tensor_sums(self, remat: Remat) -> Transfer:
        """Return the sums over the tensor-parallel axis of a step, which nothing hides.

        Attention and the feed-forward layer each sum their outputs in a forward, and their inputs' gradients in a
        backward. The embedding sums its rows, and the head the gradients of hidden states, in fp32.
        """
        sums = self.model.layers * (4 + 2 * (remat != "none"))
        size = self.batch * self.tokens * self.model.hidden * (self.io * (sums + 1) + max(4, self.io))
        ranks, calls = self.tensor_parallel, 2 * (sums + 2)  # a sum is a scatter and a gather
        return gather(2 * size, ranks, ranks, self.cluster.rates, calls=calls)

    @property
    def too_long(self) -> bool:
        """Whether a sequence has more tokens than the model has positions."""
        return self.model.positions is not None and self.seq_len // self.joined > self.model.positions

    @property
    def sharing(self) -> int:
        """The ranks that share each sequence."""
        return self.cluster.ranks // self.groups

    @property
    def io(self) -> int:
        """Bytes per element of the compute dtype."""
        return self.dtype.itemsize

    @property
    def kinds(self) -> Mapping[tuple[Mask, Indexed | None], int]:
        """Number of layers with each mask, and way to get keys."""
        kinds = self.model.kinds_by_count.items()
        return {(mask_of(reach, self.seq_len, self.borders), indexed): count for (reach, indexed), count in kinds}

    @property
    def shape(self) -> Shape:
        """The shape of an attention call."""
        sizes = {name: getattr(self.model, name) for name in ("q_heads", "kv_heads", "head_dim", "v_head_dim")}
        return shape_of(self.dtype, batch=self.batch, **sizes)

    @cached_property
    def tokens(self) -> int:
        """Tokens per sequence on the rank that has most, or may have most: a balanced layout of several documents."""
        uneven = self.layout == BALANCED and self.borders is not None
        return most_tokens(self.seq_len, self.sharing) if uneven else -(-self.seq_len // self.sharing)

    def setting(self, mask: Mask, indexed: Indexed | None = None) -> Workload:
        """Return the attention call of a layer of this kind; one of a chunk of heads, if there are several."""
        chunks, shape = self.saving.attention_chunks, self.shape
        return Workload(
            seq_len=self.seq_len,
            mask=mask,
            world=self.sharing,
            per_node=self.cluster.per_node,
            shape=replace(shape, q_heads=shape.q_heads // chunks, kv_heads=max(1, shape.kv_heads // chunks)),
            rates=self.cluster.rates,
            remat=self.remat or "none",
            calls=chunks,
            indexed=indexed,
            widest=mask_of(widest_of(self.model.windows_by_count), self.seq_len, self.borders),
        )

    @property
    def flops(self) -> float:
        """FLOP of a forward and backward on all ranks, without recomputation: two products per unmasked pair.

        Of chosen keys only their pairs count, and an indexer has no backward.
        """
        shape, attention, forward = self.shape, 0.0, 0.0
        per_pair = 2.0 * shape.batch * shape.q_heads * (shape.head_dim + shape.v_head_dim)
        for (reach, indexed), count in self.model.kinds_by_count.items():
            scored, pairs = indexed_pairs(self.seq_len, reach, self.borders, indexed)
            attention += count * per_pair * pairs
            forward += count * shape.batch * scored
        per_weight = 2.0 * self.batch * self.seq_len
        products = per_weight * (self.model.products + self.model.head_products)
        return 3 * (attention + products) + forward + per_weight * self.model.index_products

    def choices(self, remat: Remat) -> int:
        """Return the bytes of chosen keys that a rank keeps for a backward, on the rank with most tokens.

        A layer that runs again makes its choice again. What a "shared" layer gets from a layer before is kept.
        """
        kept = [0]
        layers = self.model.indexed
        for layer, after in zip(layers, (*layers[1:], None), strict=True):
            if layer is not None and layer.chooses:
                shared = after is not None and not after.chooses
                kept.append(layer.choice_bytes * (shared or remat != "layer"))
        most = max((layer.choice_bytes for layer in layers if layer is not None), default=0)
        return self.batch * self.tokens * max(sum(kept), most)

    @property
    def limit(self) -> float | None:
        """Bytes that a rank may use; None if the device's memory is unknown."""
        memory = self.cluster.device.memory
        return None if memory is None else USABLE * memory

    def rest_seconds(self, remat: Remat) -> float:
        """Return the seconds of all but attention and exchanges on the rank with most tokens.

        Recomputation adds one forward of the layers. So do chunks of a feed-forward layer, for its products, if the
        layer is not recomputed. In chunks of heads, q, k and v are projected two more times. The head's logits are
        always recomputed. A backward's element-wise operations move twice a forward's bytes, AdamW 28 per parameter.
        """
        cluster, m, saving, passes = self.cluster, self.model, self.saving, 3 + (remat != "none")
        again = 0  # products of chunks, per token and layer
        if saving.mlp_chunks > 1 and remat == "none":
            again += 3 * m.hidden * m.intermediate
        if saving.attention_chunks > 1:
            again += 2 * m.hidden * (m.q_width + 2 * m.kv_width)
        per_weight = 2.0 * self.batch * self.seq_len
        flops = per_weight * (passes * m.products + 4 * m.head_products) + per_weight * m.layers * again
        flops += per_weight * m.index_products * (2 if remat == "layer" else 1)  # their choice needs no backward
        seconds = self.tokens / self.seq_len * flops / self.product_rate + passes * self._elementwise_seconds
        if cluster.device.bandwidth is None:
            return seconds
        return seconds + 28 * m.size / cluster.ranks / (BANDWIDTH_EFFICIENCY * cluster.device.bandwidth)

    def forward_seconds(self) -> float:
        """Return the seconds of a forward of the layers, without attention, on the rank with most tokens."""
        products = 2.0 * self.batch * self.tokens * (self.model.products + self.model.index_products)
        return products / self.product_rate + self._elementwise_seconds

    @property
    def product_rate(self) -> float:
        """FLOP per second of matrix products with many rows."""
        if self.io == 2 and self.cluster.device.peak is not None:
            return MATMUL_EFFICIENCY * self.cluster.device.peak
        return self.cluster.rates.speed(self.io).forward

    @property
    def _elementwise_seconds(self) -> float:
        """Seconds of the element-wise operations of a forward; 0 if the memory's bandwidth is unknown."""
        m, io, bandwidth = self.model, self.io, self.cluster.device.bandwidth
        if bandwidth is None:
            return 0.0
        # Counted in transformers' Llama under eager PyTorch: a norm, in fp32, moves 4 io + 28 bytes per element, the
        # rotary embedding of q and k 10 io, a residual sum 3 io, the gate 5 io.
        norms_and_sums = (2 * (4 * io + 28) + 2 * 3 * io) * m.hidden
        each_token: float = norms_and_sums + 10 * io * (m.q_width + m.kv_width) + 5 * io * m.intermediate
        # In its experts (``grouped_mm``): a copy in their order, then the product with fp32 weights, a copy back and a
        # sum, in fp32.
        each_token += (3 * io + 16) * m.rows_width
        return self.batch * self.tokens * m.layers * each_token / (BANDWIDTH_EFFICIENCY * bandwidth)

    def copy_seconds(self, computing: float) -> float:
        """Return the seconds of a step's copies of layer inputs that a forward's ``computing`` seconds don't hide."""
        if self.saving.offload == "none":
            return 0.0
        copied = self.batch * self.tokens * self.model.hidden * self.io * self.model.layers
        rate = self.cluster.device.disk if self.saving.offload.startswith(DISK) else self.cluster.device.link
        return 2 * max(0.0, copied / rate - computing)
