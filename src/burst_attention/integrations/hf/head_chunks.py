"""Run a layer's attention in chunks of heads (:mod:`burst_attention.attention.head_chunks`).

The layer's own code projects each chunk: it runs on a copy of the module's structure, which has fewer heads, with some
rows of the module's weights. Before its first use the result is compared with the layer's own on a few tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from burst_attention.attention.batch import Plans
from burst_attention.attention.call import burst_attention
from burst_attention.attention.head_chunks import HeadCall, Projection, Stretches, attend_by_heads
from burst_attention.attention.new_plan import single_rank_plan
from burst_attention.attention.sweep import sweeps
from burst_attention.plan.mask import Mask

from . import tensor_parts
from .classes import stock_class
from .known import is_tempered

# The projections whose output rows belong to heads: which heads, in order.
_ROWS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("q_proj", "q_b_proj", "kv_b_proj", "sinks"), ("query",)),
    **dict.fromkeys(("k_proj", "v_proj"), ("key",)),
    "qkv_proj": ("query", "key", "key"),
}
_OUTPUT = ("o_proj", "dense", "out_proj")
_COUNTS = {"query": ("num_heads", "num_attention_heads"), "key": ("num_key_value_heads",)}
_COMPARED = 5  # tokens


class ByHeads(nn.Module):
    """An attention module of transformers whose heads are computed in chunks."""

    structure: Structure
    stock_class: Any

    @torch.compiler.disable
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        attend = kwargs.get("attend", burst_attention)
        ours = burst_attention in (attend, getattr(attend, "func", None)) or hasattr(attend, "sweeps")
        if kwargs.get("plan") is None or not ours:  # generation, or a measurement with another attention
            return self.stock_class.forward(self, hidden_states, **kwargs)
        with Plans.of(kwargs["plan"]).one.agreement.entering("burst_attention", once=True):
            if self.structure.parts != _parts(self):  # adapters were attached, or removed
                self.structure = Structure(self, self.structure.chunks)
            self.structure.compare(self, hidden_states, kwargs)
        return self.structure.run(self, hidden_states, kwargs)


class Structure:
    """A module's structure with the heads of one chunk, without weights, and which rows of which weights it takes."""

    def __init__(self, module: nn.Module, chunks: int) -> None:
        config: Any = module.config
        self.chunks, self.parts, self._compared = chunks, _parts(module), False
        query, self._name = config.num_attention_heads, type(module).__name__
        self._whole = {"query": query, "key": getattr(config, "num_key_value_heads", None) or query}
        cut: Any = (x for x in module.parameters() if tensor_parts.along_axis(x))
        self._axis = next((x.device_mesh for x in cut), None)
        ranks = 1 if self._axis is None else self._axis.size()
        if ranks > 1 and not tensor_parts.forward_is_ours(module):
            raise self._refusal("every rank of the tensor-parallel axis computes all of its heads")
        self._heads = {side: count // ranks for side, count in self._whole.items()}  # of this rank
        for side, count in self._heads.items():
            if count % chunks and (side == "query" or chunks % count):
                raise ValueError(
                    f"memory=Memory(attention_chunks={chunks}) can't split the {count} {side} heads of {self._name}; "
                    f"choose a divisor of {self._heads['key']}"
                )
        if is_tempered(module):
            raise self._refusal("it scales queries by their places")
        self._output = next((name for name in _OUTPUT if name in module._modules), "")
        if not self._output or next(module.buffers(), None) is not None:
            raise self._refusal(f"its parts are {', '.join(module._modules)}")
        weights = {n: p for n, p in module.named_parameters() if not n.startswith(f"{self._output}.")}
        self._names = tuple(weights)
        # Asked now: a forward around this one may hand the module parts in place of its own cut weights.
        self._cut = {name for name, weight in module.named_parameters() if tensor_parts.along_axis(weight)}
        self._segments = [self._segments_of(name, len(tensor_parts.part(weight))) for name, weight in weights.items()]
        self._twin = self._empty_twin(module)

    def _refusal(self, reason: str) -> ValueError:
        return ValueError(
            f"memory=Memory(attention_chunks={self.chunks}) does not know how to split {self._name}: {reason}. Leave "
            "attention_chunks out for this model"
        )

    def _segments_of(self, name: str, rows: int) -> tuple[tuple[str, int, int], ...]:
        """Return (side, first row, rows of a head) of each stretch of heads among a weight's rows."""
        first, *rest = name.split(".")
        if first not in _ROWS or rest[:1] == ["lora_A"]:
            return ()
        if rest[:1] == ["base_layer"]:
            rest = rest[1:]
        if rest and rest not in (["weight"], ["bias"]) and rest[0] != "lora_B":
            raise self._refusal(f"it has the weight {name}")
        sides = _ROWS[first]
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
        memo: dict[int, Any] = {id(config): config, id(vars(module).get("structure")): None}
        for weight in module.parameters():  # no copy, and nothing that outlives the sharding of the weights
            own = tensor_parts.part(weight)
            memo[id(weight)] = nn.Parameter(torch.empty_like(own, device="meta"), requires_grad=False)
        twin: Any = copy.deepcopy(module, memo)
        for part in twin.modules() if self._axis is not None else ():
            vars(part).pop("forward", None)  # it would use the module's own weights
        twin.__class__ = stock_class(module)
        twin.config = copy.copy(config)
        for side, names in _COUNTS.items():
            for name in names:
                for owner in (twin, twin.config):
                    if getattr(owner, name, None) == self._whole[side]:
                        setattr(owner, name, max(1, self._heads[side] // self.chunks))
        if getattr(config, "head_dim", None) is None and hasattr(module, "head_dim"):
            twin.config.head_dim = module.head_dim
        twin._modules[self._output] = _Nothing()
        return twin

    def run(self, module: Any, hidden: Tensor, kwargs: Mapping[str, Any]) -> tuple[Tensor, None]:
        """Return the results of the module's forward."""
        live = dict(module.named_parameters())
        twin: Any = self._twin
        twin.config._attn_implementation = module.config._attn_implementation  # it may have been switched
        attend, length = kwargs.get("attend"), hidden.shape[1]
        kernel = getattr(attend, "keywords", {}).get("kernel", "auto")

        # It outlives the call, and must not hold the hidden states.
        def project(states: Tensor, _: int, weights: Sequence[Tensor], tokens: slice) -> HeadCall:
            captured = _Captured(kernel, some=tokens != slice(0, length))
            some = self._of_tokens(tokens, length, kwargs) if captured.of_some_tokens else {}
            given = {**kwargs, **some, "attend": captured, "hidden_states": states}
            functional_call(self._twin, dict(zip(self._names, weights, strict=True)), (), given)
            return captured.calls.pop()

        projection = Projection(self.chunks, self.rows, project, getattr(attend, "sweeps", sweeps))
        if self._axis is not None:
            part, used = tensor_parts.part, tensor_parts.used
            live = {name: part(x) if name in self._cut else used(x, self._axis) for name, x in live.items()}
        weights, output = [live[name] for name in self._names], getattr(module, self._output)
        if sharded := next((name for name, x in live.items() if isinstance(x, DTensor)), None):
            raise self._refusal(f"{sharded} is a DTensor; shard whole decoder layers, not their attention")
        if type(output) is nn.Linear and not (output._forward_hooks or output._forward_pre_hooks):
            own = [live[f"{self._output}.{name}"] for name, _ in output.named_parameters()]
            if self._axis is None:
                return attend_by_heads(hidden, weights, projection, output=own), None
            out = attend_by_heads(hidden, weights, projection, output=own[:1])
            return tensor_parts.summed(out, own[1] if own[1:] else None, self._axis), None
        return output(attend_by_heads(hidden, weights, projection).flatten(2)), None

    @torch.no_grad()
    def compare(self, module: Any, hidden: Tensor, kwargs: Mapping[str, Any]) -> None:
        """Compare a few tokens with the module's own forward, once."""
        if self._compared or isinstance(hidden, FakeTensor) or not hidden.shape[1]:
            return
        few = min(_COMPARED, hidden.shape[1])
        given = {**kwargs, **self._few(few, hidden.shape[1], kwargs)}
        own = module.stock_class.forward(module, hidden_states=hidden[:1, :few], **given)
        ours = self.run(module, hidden[:1, :few], given)
        bound = 50 * torch.finfo(own[0].dtype).eps ** (1 if own[0].dtype.itemsize > 2 else 0.75)
        apart, most = (own[0] - ours[0]).abs().max().item(), own[0].abs().max().item()
        if len(own) != 2 or own[1] is not None or not apart <= bound * max(most, 1e-30):
            raise self._refusal(f"on {few} tokens its outputs differ by {apart:.1e} of {most:.1e}")
        self._compared = True

    def _few(self, few: int, length: int, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call on the first tokens of the first row."""
        masks = ((key, plan.mask) for key, plan in Plans.of(kwargs["plan"]).items())
        plans = {key: single_rank_plan(few, mask=Mask(causal=x.causal, window=x.window)) for key, x in masks}
        given = self._of_tokens(slice(0, few), length, kwargs, rows=slice(1))
        if "position_ids" in given:
            given["position_ids"] = torch.arange(few, device=given["position_ids"].device)[None]
        given["plan"] = plans if isinstance(kwargs["plan"], Mapping) else next(iter(plans.values()))
        return given

    def _of_tokens(
        self, tokens: slice, length: int, kwargs: Mapping[str, Any], *, rows: slice = slice(None)
    ) -> dict[str, Any]:
        """Return the arguments that belong to tokens, for some of the tokens."""
        given: dict[str, Any] = {}
        for name, value in kwargs.items():
            if name == "position_embeddings":  # cosines and sines, or the complex numbers that hold both
                alone = isinstance(value, Tensor)
                given[name] = value[rows, tokens] if alone else tuple(x[rows, tokens] for x in value)
            elif name == "position_ids":
                given[name] = value[:, tokens]
            elif isinstance(value, Tensor) and length in value.shape:
                raise self._refusal(f"its forward takes the tensor {name}")
        return given


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


def _parts(module: nn.Module) -> tuple[Any, ...]:
    """Return what tells whether parts of the module were replaced."""
    return tuple((name, type(part)) for name, part in module.named_modules() if part is not module)
