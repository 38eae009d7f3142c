"""Run a layer's attention in chunks of heads (:mod:`burst_attention.attention.head_chunks`).

The layer's own code projects each chunk: it runs on a replica of the module, which has fewer heads, with some rows of
the module's weights. Any change of the module makes another replica. Before its first use, outputs and gradients of a
few tokens are compared with the layer's own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from burst_attention.attention.batch import Plans
from burst_attention.attention.call import burst_attention
from burst_attention.attention.head_chunks import HeadCall, Projection, Stretches, attend_by_heads
from burst_attention.attention.sweep import sweeps

from ..classes import become, stock_class
from ..reading.attached import HOOKS, hooks_of
from ..snapshots import Snapshot, inside, replica
from ..tensor import parts as tensor_parts
from .head_checks import check_given, check_parts, compare_few, of_tokens, output_of, refusal_of, weights_of

# The projections whose output rows belong to heads: which heads, in order.
_ROWS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("q_proj", "q_b_proj", "kv_b_proj", "sinks"), ("query",)),
    **dict.fromkeys(("k_proj", "v_proj"), ("key",)),
    "qkv_proj": ("query", "key", "key"),
}
_COUNTS = {"query": ("num_heads", "num_attention_heads"), "key": ("num_key_value_heads",)}
_RECENT = 4  # states of a module, such as those with and without its adapters


class ByHeads(nn.Module):
    """An attention module of transformers whose heads are computed in chunks."""

    structures: Structures
    stock_class: Any

    @torch.compiler.disable
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        attend = kwargs.get("attend", burst_attention)
        ours = burst_attention in (attend, getattr(attend, "func", None)) or hasattr(attend, "sweeps")
        if kwargs.get("plan") is None or not ours:  # generation, or a measurement with another attention
            return self.stock_class.forward(self, hidden_states, **kwargs)
        with Plans.of(kwargs["plan"]).one.agreement.entering("burst_attention", once=True):
            structure = self.structures.of(self)
            structure.compare(self, hidden_states, kwargs)
        return structure.run(self, hidden_states, kwargs)


class Structures:
    """The structures of a module in its recent states."""

    def __init__(self, chunks: int) -> None:
        self._chunks = chunks
        self._recent: list[Structure] = []
        # A forward around the module may hand it parts in place of its own cut weights, so names are kept.
        self._cut: frozenset[str] = frozenset()

    def of(self, module: nn.Module) -> Structure:
        """Return the structure of the module as it is now; raise ValueError if it can't run in chunks."""
        structure = next((recent for recent in self._recent if recent.fits(module)), None)
        if structure is None:
            _unmerge(module)
            self._cut |= {name for name, x in weights_of(module).items() if tensor_parts.along_axis(x)}
            structure = Structure(module, self._chunks, self._cut)
            self._recent = [structure, *self._recent[: _RECENT - 1]]
        return structure

    def check(self, module: nn.Module) -> None:
        """Refuse hooks and parts of the module, as it is now, that can't run in chunks. Its weights may be sharded."""
        check_parts(module, output_of(module), refusal_of(module, self._chunks))

    def __deepcopy__(self, memo: dict[int, Any]) -> Structures:
        return Structures(self._chunks)


def convert(module: nn.Module, chunks: int) -> None:
    """Let an attention module compute its heads in chunks; raise ValueError if it can't."""
    structures = Structures(chunks)
    become(module, ByHeads, structures=structures)
    structures.of(module)


def _unmerge(module: nn.Module) -> None:
    """Unmerge adapters that are disabled, as their own forward would do: in chunks it would do so for one chunk."""
    for part in inside(module):
        if getattr(part, "merged", None) is True and getattr(part, "disable_adapters", None) is True:
            part.unmerge()  # type: ignore[operator]


def _merged_in(module: nn.Module) -> list[list[str]]:
    """Return the names of merged adapters, by part."""
    return [[*merged] for part in inside(module) if (merged := vars(part).get("merged_adapters"))]


def _shapes_of(weights: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor_parts.part(weight).shape for name, weight in weights.items()}


class Structure:
    """A module's structure with the heads of one chunk, without weights, and which rows of which weights it takes."""

    def __init__(self, module: nn.Module, chunks: int, cut: frozenset[str]) -> None:
        config: Any = module.config
        self.chunks, self._cut, self._compared = chunks, cut, False
        self._refusal, self._output = refusal_of(module, chunks), output_of(module)
        live = weights_of(module)
        self._shapes, self._snapshot = _shapes_of(live), Snapshot(inside(module))
        query = config.num_attention_heads
        self._whole = {"query": query, "key": getattr(config, "num_key_value_heads", None) or query}
        parts: Iterator[Any] = (x for x in live.values() if tensor_parts.along_axis(x))
        self._axis = next((x.device_mesh for x in parts), None)
        ranks = 1 if self._axis is None else self._axis.size()
        if ranks > 1 and not tensor_parts.forward_is_ours(module):
            raise self._refusal("every rank of the tensor-parallel axis computes all of its heads")
        self._heads = {side: count // ranks for side, count in self._whole.items()}  # of this rank
        for side, count in self._heads.items():
            if count % chunks and (side == "query" or chunks % count):
                raise ValueError(
                    f"memory=Memory(attention_chunks={chunks}) can't split the {count} {side} heads of "
                    f"{type(module).__name__}; choose a divisor of {self._heads['key']}"
                )
        check_parts(module, self._output, self._refusal)
        self._names = tuple(name for name in live if not name.startswith(f"{self._output}."))
        self._segments = [self._segments_of(name) for name in self._names]
        self._twin = self._empty_twin(module)

    def fits(self, module: nn.Module) -> bool:
        """Return whether the module's classes, attributes and shapes are still those of this structure."""
        return self._snapshot.unchanged() and self._shapes == _shapes_of(weights_of(module))

    def compare(self, module: Any, hidden: Tensor, kwargs: Mapping[str, Any]) -> None:
        """Compare a few tokens and their gradients with the module's own forward, once."""
        if not (self._compared or isinstance(hidden, FakeTensor)) and hidden.shape[1]:
            compare_few(module, self.run, hidden, kwargs, self._refusal)
            self._compared = True

    def _segments_of(self, name: str) -> tuple[tuple[str, int, int], ...]:
        """Return (side, first row, rows of a head) of each stretch of heads among a weight's rows."""
        first, *rest = name.split(".")
        if first not in _ROWS or rest[:1] == ["lora_A"]:
            return ()
        if rest[:1] == ["base_layer"]:
            rest = rest[1:]
        if rest and rest not in (["weight"], ["bias"]) and rest[0] != "lora_B":
            raise self._refusal(f"it has the weight {name}")
        sides, rows = _ROWS[first], self._shapes[name][0]
        width, left = divmod(rows, sum(self._heads[side] for side in sides))
        if left:
            raise self._refusal(f"{name} has {rows} rows for {self._heads['query']} query heads")
        starts = [width * sum(self._heads[side] for side in sides[:n]) for n in range(len(sides))]
        return tuple((side, start, width) for side, start in zip(sides, starts, strict=True))

    def rows(self, weight: int, chunk: int) -> Stretches:
        """Return the rows of a weight that a chunk needs; empty if it needs all of them."""
        stretches = []
        for side, first, width in self._segments[weight]:
            count = self._heads[side]
            own, at = max(1, count // self.chunks), chunk * count // self.chunks  # chunks may share a key-value head
            stretches.append((first + at * width, first + (at + own) * width))
        return tuple(stretches)

    def _empty_twin(self, module: nn.Module) -> nn.Module:
        config: Any = module.config

        def nothing(weight: Tensor) -> nn.Parameter:  # no copy, and nothing that outlives the sharding of the weights
            own = tensor_parts.part(weight)
            return nn.Parameter(torch.empty(own.shape, dtype=own.dtype, device="meta"), requires_grad=False)

        twin: Any = replica(module, nothing)
        for part in inside(twin):
            if part is twin or tensor_parts.forward_is_ours(part):
                vars(part).pop("forward", None)  # it would use the module's own weights
        twin.__class__ = stock_class(module)
        vars(twin).update({kind: OrderedDict() for kind in HOOKS})  # they run once, around this module
        del twin.structures
        twin.config = object.__new__(type(config))
        vars(twin.config).update(vars(config))
        for side, names in _COUNTS.items():
            for name in names:
                for owner in (twin, twin.config):
                    if getattr(owner, name, None) == self._whole[side]:
                        setattr(owner, name, max(1, self._heads[side] // self.chunks))
        with suppress(RuntimeError):  # transformers refuses to name one value if layers differ; the module has its own
            if getattr(config, "head_dim", None) is None and hasattr(module, "head_dim"):
                twin.config.head_dim = module.head_dim
        twin._modules[self._output] = _Nothing()
        return twin

    def run(self, module: Any, hidden: Tensor, kwargs: Mapping[str, Any]) -> tuple[Tensor, None]:
        """Return the results of the module's forward."""
        check_given(hidden, kwargs, self._refusal)
        live = weights_of(module)
        attend, length = kwargs.get("attend"), hidden.shape[1]
        kernel = getattr(attend, "keywords", {}).get("kernel", "auto")

        merged = _merged_in(module)

        # It outlives the call, and must not hold the hidden states.
        def project(states: Tensor, _: int, weights: Sequence[Tensor], tokens: slice) -> HeadCall:
            if _merged_in(module) != merged:  # merging writes to weights, unseen by autograd
                raise ValueError(
                    f"adapters of {type(module).__name__} were merged or unmerged since its forward, which "
                    "attention_chunks runs again in the backward; do it after the backward"
                )
            captured = _Captured(kernel, some=tokens != slice(0, length))
            some = of_tokens(kwargs, tokens) if captured.of_some_tokens else {}
            arguments = {**kwargs, **some, "attend": captured, "hidden_states": states}
            functional_call(self._twin, dict(zip(self._names, weights, strict=True)), (), arguments)
            return captured.calls.pop()

        projection = Projection(self.chunks, self.rows, project, getattr(attend, "sweeps", sweeps))
        if self._axis is not None:
            part, used = tensor_parts.part, tensor_parts.used
            live = {name: part(x) if name in self._cut else used(x, self._axis) for name, x in live.items()}
        weights, output = [live[name] for name in self._names], getattr(module, self._output)
        if sharded := next((name for name, x in live.items() if isinstance(x, DTensor)), None):
            raise self._refusal(f"{sharded} is a DTensor; shard whole decoder layers, not their attention")
        replaced = "forward" in vars(output) and not tensor_parts.forward_is_ours(output)
        if type(output) is nn.Linear and not (replaced or any(hooks_of(output))):
            own = [live[f"{self._output}.{name}"] for name, x in output._parameters.items() if x is not None]
            if self._axis is None:
                return attend_by_heads(hidden, weights, projection, output=own), None
            out = attend_by_heads(hidden, weights, projection, output=own[:1])
            return tensor_parts.summed(out, own[1] if own[1:] else None, self._axis), None
        return output(attend_by_heads(hidden, weights, projection).flatten(2)), None


class _Nothing(nn.Module):
    """Stands for the output projection, which runs once, on all heads."""

    def forward(self, x: Tensor) -> Tensor:
        return x[..., :0]


class _Captured:
    """Takes the arguments of an attention call, and returns zeros that take no memory."""

    def __init__(self, kernel: str, *, some: bool) -> None:
        self._kernel, self.of_some_tokens = kernel, some
        self.calls: list[HeadCall] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: Any, **options: Any) -> Tensor:
        self.calls.append(HeadCall(q, k, v, plan, kernel=self._kernel, **options))
        return q.new_zeros(()).expand(*q.shape[:3], v.shape[3])
