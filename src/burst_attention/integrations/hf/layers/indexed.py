"""Attentions whose indexer chooses keys (DeepSeek V3.2, arXiv 2512.02556), on shards.

MiniMax M3's chooses blocks of keys, for each key-value head.

An indexer's forward runs unchanged, but its scores of all pairs are never computed. The product of queries and keys is
a stand-in that records what happens to it, and its ``topk`` chooses over all ranks. Any operation that the stand-in
does not know raises an error. The attention gets the choice as ``indices``, in place of a mask.

Keys and values of DeepSeek's attention are projections of a latent (MLA, arXiv 2405.04434, section 2.1), which the
layer's ``expand_kv`` computes. Here it returns the latent, and the attention computes with it or expands it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from burst_attention.attention.chosen import choose_blocks, choose_keys, chosen_attention
from burst_attention.attention.plan import Plan
from burst_attention.plan.indexed import Indexed

from ..classes import Converted
from ..reading import known
from ..reading.attached import HOOKS
from ..reading.models import attentions_of
from ..running import ALONE, running_plans
from ..tensor import parts as tensor_parts
from . import checks
from .checks import MaskRequest
from .dealt import Step
from .own_attention import Recorded, name_of, unknown

_SHARED = "shared_kv_states"  # the argument with latents that layers hand on


@dataclass(frozen=True)
class _SharedLatents:
    """The latents that layers share, by kind, as one of them reads and stores them.

    Stock layers replace the latents of earlier ones, of the same kind. A layer that checkpointing runs again would then
    read those of a later layer. Here each layer's stay, and a layer reads the latest of those before it.
    """

    stored: MutableMapping[Any, Any]  # by (kind, number of the layer), the same of all layers
    layer: int

    def __getitem__(self, kind: str) -> Any:
        sources = [layer for name, layer in self.stored if name == kind and layer < self.layer]
        return self.stored[kind, max(sources, default=None)]

    def __setitem__(self, kind: str, latents: Any) -> None:
        self.stored[kind, self.layer] = latents


@dataclass(frozen=True, eq=False)
class Choice:
    """What an attention gets in place of a mask. ``indices``: int64 or int32 [B, S_local, count], as other layers'."""

    indices: Tensor


class IndexedAttention(Converted):
    """An attention to the keys of an indexer. Its own code cuts a mask for the indexer, so it needs one."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if running_plans(self) is not ALONE and kwargs.get("attention_mask") is None:
            kwargs["attention_mask"] = MaskRequest(causal=True, window=None, foreign=())
        if _SHARED in kwargs:
            own: Any = self
            kwargs[_SHARED] = _SharedLatents(kwargs[_SHARED], own.layer_idx)
        return super().forward(*args, **kwargs)

    def keeps_latent(self) -> bool:
        """Return whether its attention gets the latent [B, 1, S, R] and the rotary part [B, 1, S, D'] as key, value."""
        return hasattr(self.stock_class, "expand_kv") and running_plans(self) is not ALONE

    def expand_kv(self, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        """Return both unchanged while it runs on shards, else its keys and values of all heads."""
        return (latent, rotary) if self.keeps_latent() else self.expanded(latent, rotary)

    def build_attention_mask_from_topk(self, topk_indices: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the choice itself, in place of a mask made of it, while it runs on shards."""
        stock: Any = super()
        alone = running_plans(self) is ALONE
        return stock.build_attention_mask_from_topk(topk_indices, *args, **kwargs) if alone else Choice(topk_indices)

    def expanded(self, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys [B, H, S, D] and values [B, H, S, Dv] as the stock layer computes them."""
        keys, values = super().expand_kv(latent, rotary)  # type: ignore[misc]
        return keys, values

    def to_attend(self, latent: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the latent, and the weight [H, D - D' + Dv, R] with which ``expand_kv`` projects it, to attend to it.

        The heads are those of this rank. None: something else changes the projection, or a latent is no smaller than
        the keys and values of these heads.
        """
        module: Any = self
        whole = module.kv_b_proj.weight
        weight = tensor_parts.part(whole)
        if not _sends_latents(module) or type(weight) not in (nn.Parameter, Tensor):
            return None
        width = module.qk_nope_head_dim + module.v_head_dim
        return tensor_parts.summed_gradient(latent, whole), weight.unflatten(0, (-1, width))


def _sends_latents(module: Any) -> bool:
    """Return whether an attention's latent is smaller than this rank's heads, and a plain ``kv_b_proj`` expands it."""
    own = getattr(module, "kv_b_proj", None)
    if type(own) is not nn.Linear or own.bias is not None:
        return False
    replaced = "forward" in own.__dict__ and not tensor_parts.forward_is_ours(own)
    if replaced or any(getattr(own, hooks) for hooks in HOOKS):
        return False
    width, rotary = module.qk_nope_head_dim + module.v_head_dim, module.qk_rope_head_dim
    heads = own.out_features // width // tensor_parts.parts_of(own.weight)
    smaller: bool = own.in_features + rotary < heads * (width + rotary)
    return smaller


def indexed_layers(model: Any) -> list[Indexed | None]:
    """Return how each attention of a causal language model gets its keys, in the order of ``attention_windows``.

    None: it attends to all keys that it sees. ``burst_attention.attention.chosen_bytes`` takes the others. A "shared"
    layer, which has no indexer, takes the choice of the layer before, and so its number of keys.

    Raises:
        ValueError: an indexer pools keys (GLM-5.3).
    """
    found: list[Indexed | None] = []
    count = 0
    for module in attentions_of(model):
        if not known.is_indexed(module):
            found.append(None)
            continue
        indexer = getattr(module, "indexer", None)
        sizes: dict[str, Any] = {}
        if indexer is not None and known.pools_keys(indexer):
            raise ValueError(
                f"{type(indexer).__name__} pools keys (index_kpool={indexer.index_kpool}), and what it sends and "
                "computes is not predicted"
            )
        if indexer is not None:
            block = getattr(indexer, "block_size", 0)
            count = indexer.topk_blocks * block if block else indexer.index_topk
            heads = indexer.num_heads if block else indexer.n_heads
            sizes = {"index_heads": heads, "index_dim": indexer.head_dim, "block": block}
            sizes["wide"] = known.has_wide_keys(indexer)
        found.append(Indexed(count=count, **sizes, **sizes_of_calls(module)))
    return found


def sizes_of_calls(module: Any) -> dict[str, Any]:
    """Return the sizes of an attention's calls of ``chosen_attention``."""
    names = ("q_heads", "kv_heads", "head_dim", "v_head_dim", "inside")
    if not hasattr(module, "kv_b_proj"):
        q_heads, kv_heads = (x.out_features // module.head_dim for x in (module.q_proj, module.k_proj))
        return dict(zip(names, (q_heads, kv_heads, module.head_dim, module.head_dim, False), strict=True))
    heads, latent = module.num_heads // tensor_parts.parts_of(module.kv_b_proj.weight), module.kv_lora_rank
    if _sends_latents(module):
        return dict(zip(names, (heads, 1, latent + module.qk_rope_head_dim, latent, True), strict=True))
    return dict(zip(names, (heads, heads, module.qk_head_dim, module.v_head_dim, False), strict=True))


def attend_to_latents(
    weight: Tensor,
    q: Tensor,
    latent: Tensor,
    rotary: Tensor,
    plan: Any,
    *,
    attend: Callable[..., Tensor],
    **options: Any,
) -> Tensor:
    """Compute attention to chosen keys with their latents: out [B, H, S_local, Dv].

    A key of head h is [U_h c | r] and its value V_h c, where c is the latent, r the rotary part and [U_h; V_h] the
    weight. So q . k = (U_h^T q_nope) . c + q_rotary . r, and out = V_h (the sum of latents). [c | r] are the keys of a
    single head, and c is their value.

    Args:
        weight: [H, Dn + Dv, R]; q: [B, H, S_local, Dn + D'], latent: [B, 1, S_local, R], rotary: [B, 1, S_local, D'].
        attend: of (q, rows [c | r], latent, plan, ``up`` [H, R, Dv], options). It multiplies its out by ``up``.
    """
    dims = q.shape[3] - rotary.shape[3]
    of_keys, of_values = weight.split([dims, weight.shape[1] - dims], 1)
    q = torch.cat([q[..., :dims] @ of_keys, q[..., dims:]], -1)
    return attend(q, torch.cat([latent, rotary], -1), latent, plan, up=of_values.mT, **options)


def to_chosen_rows(
    q: Tensor, rows: Tensor, latent: Tensor, plan: Plan, *, up: Tensor, indices: Tensor, **options: Any
) -> Tensor:
    """Attend to chosen rows, whose first numbers are their values, on shards."""
    return chosen_attention(q, rows, latent.shape[3], indices, plan, **options)[0] @ up


class Indexer(Converted):
    """An indexer that chooses among the keys of all ranks."""

    wrong_alone = "chooses keys of this rank's shard alone"

    @torch.compiler.disable  # it runs under a mode of torch functions
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        plans = running_plans(self)
        if plans is ALONE:
            return super().forward(*args, **kwargs)
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        plan = plans if isinstance(plans, Step) else checks.choose(plans, None)
        if isinstance(plan, Plan):
            with plan.agreement.entering("choose_keys", once=True):
                checks.check_tokens(hidden.shape[1], plan)
        with _IndexerCall(self, plan, hidden.shape[1]):
            return super().forward(*args, **kwargs)

    def columns(self, plan: Plan | Step) -> int:
        """Return the number of keys that it scores."""
        return plan.schedule.span if isinstance(plan, Plan) else plan.span

    def choose(self, plan: Plan | Step, q: Tensor, keys: Tensor, weights: Tensor | None, **how: Any) -> Tensor:
        """Choose over all ranks, by :func:`choose_keys` with weights, else by :func:`choose_blocks`."""
        if isinstance(plan, Step):
            return plan.choose(q, keys, weights, **how)
        if weights is None:
            return choose_blocks(q, keys, plan, **how)
        return choose_keys(q, keys, weights, plan, **how)


class _IndexerCall(TorchFunctionMode):
    """One call of an indexer. While its forward runs, a stand-in replaces the product of queries and keys."""

    def __init__(self, module: Any, plan: Plan | Step, length: int) -> None:
        super().__init__()
        self.module, self.plan, self.length = module, plan, length
        self.span = module.columns(plan)
        self._done = False  # products inside of the choice are not the indexer's
        self._widened: dict[int, tuple[Tensor, Tensor]] = {}  # what ``float`` made of tensors in half precision

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if scores := next((each for each in args if isinstance(each, Recorded)), None):
            return scores.changed_by(func, args, kwargs)
        name = name_of(func)
        if name == "matmul" and not self._done and len(args) == 2 and args[0].dim() == args[1].dim() == 4:
            (a, b), of_blocks = args, hasattr(self.module, "block_size")
            if of_blocks and b.shape[1] == 1 and a.shape[2] == self.length:
                return _Blocks(self, *self._alike(a, b.mT))
            if not of_blocks and b.shape[1] == 1 and a.shape[1] == self.length:
                return _Scores(self, *self._alike(a, b))
        result = func(*args, **kwargs)
        if name == "float" and args[0].dtype in (torch.bfloat16, torch.float16):
            self._widened[id(result)] = result, args[0]
        return result

    def _alike(self, q: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys as they were before they were widened, if both then have the same dtype."""
        narrow = self._narrow(q), self._narrow(keys)
        return narrow if narrow[0].dtype == narrow[1].dtype else (q, keys)

    def _narrow(self, x: Tensor) -> Tensor:
        """Return the tensor in half precision that ``x`` is a copy of: keys are sent, and fp32 would double them."""
        whole = x if x._base is None else x._base
        wide, half = self._widened.get(id(whole), (None, None))
        same = wide is whole and (wide.squeeze().shape, wide.squeeze().stride()) == (
            x.squeeze().shape,
            x.squeeze().stride(),
        )
        return half.view(x.shape) if same and half is not None else x

    def choose(self, q: Tensor, keys: Tensor, weights: Tensor | None, **how: Any) -> Tensor:
        """Let the module choose."""
        self._done = True
        found: Tensor = self.module.choose(self.plan, q, keys, weights, **how)
        axis = getattr(self.module, "burst_axis", None)
        return found if axis is None else tensor_parts.of_first(found, axis)

    def refuse(self, what: str) -> ValueError:
        """Return the error for scores that :func:`choose_keys` does not compute."""
        return unknown(self.module, f"{what} its scores")


@dataclass(frozen=True, eq=False)
class _Scores(Recorded):
    """Stands for the scores of an indexer: q [B, S, H, D] times keys [B, 1, D, S], and what was made of them."""

    call: _IndexerCall
    q: Tensor
    keys: Tensor
    scale: float = 1.0
    clipped: bool = False  # by relu
    weights: Tensor | None = None  # [B, S, 1, H]
    masked: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of scores of all keys; with weights [B, S, keys], without the heads."""
        batch, length, heads, _ = self.q.shape
        return (batch, length, *(() if self.weights is not None else (heads,)), self.call.span)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def __mul__(self, factor: Any) -> Any:
        fixed = isinstance(factor, (int, float)) and factor > 0 and self.weights is None
        return replace(self, scale=self.scale * factor) if fixed else self._unknown("multiplies")

    def __add__(self, mask: Any) -> Any:
        known = isinstance(mask, MaskRequest) and self.weights is not None
        return replace(self, masked=True) if known else self._unknown("adds to")

    def masked_fill(self, hidden: Any, value: float) -> Any:
        """Hide what a stand-in says."""
        known = isinstance(hidden, Recorded) and hidden.hides and self.weights is not None
        known = known and value == torch.finfo(self.dtype).min
        return replace(self, masked=True) if known else self._unknown("fills")

    def squeeze(self, dim: int) -> Any:
        """Drop the dim of the heads, over which the weights have summed."""
        return self if dim == -2 and self.weights is not None else self._unknown("squeezes")

    def topk(self, count: int, dim: int) -> Any:
        """Return an object with ``indices`` [B, S, count], chosen over all ranks."""
        if dim != -1 or not (self.clipped and self.masked) or self.weights is None:
            return self._unknown("picks the best of")
        q, weights = self.q.transpose(1, 2), self.weights.squeeze(2).transpose(1, 2)
        return SimpleNamespace(indices=self.call.choose(q, self.keys.mT, weights, count=count, scale=self.scale))

    def changed_by(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return what a torch function makes of the scores."""
        name = name_of(func)
        if name == "relu" and args[0] is self and self.weights is None:
            return replace(self, clipped=True)
        if name == "matmul" and args[1] is self and self.clipped and self.weights is None:
            batch, length, heads, _ = self.q.shape
            if args[0].shape == (batch, length, 1, heads):
                return replace(self, weights=args[0])
        return self._unknown(f"applies {resolve_name(func) or name} to")

    def _unknown(self, what: str) -> Any:
        raise self.call.refuse(what)


@dataclass(frozen=True, eq=False)
class _Blocks(Recorded):
    """Stands for MiniMax M3's scores: q [B, H, S, D] times keys [B, 1, S, D], and which operations they have seen.

    Its indexer hides later keys, fills up the last block, takes each block's greatest score, and raises those of the
    blocks before a query. All sizes there are of this rank's shard, so that no values are made.
    """

    call: _IndexerCall
    q: Tensor
    keys: Tensor
    seen: tuple[str, ...] = ()

    def masked_fill(self, _: Tensor, value: float) -> Any:
        return self._after("masked_fill", value == -torch.inf)

    def view(self, *shape: int) -> Any:
        return self._after("view", shape[-1] == self.call.module.block_size)

    def amax(self, dim: int) -> Any:
        return self._after("amax", dim == -1)

    def scatter_(self, dim: int, _: Tensor, value: float) -> None:
        object.__setattr__(self, "seen", self._after("scatter", dim == -1 and value == torch.inf).seen)

    def topk(self, _: int, dim: int) -> Any:
        """Return scores and positions of the chosen blocks' keys, chosen over all ranks."""
        module, local = self.call.module, "scatter" in self.seen
        known = tuple(x for x in self.seen if x != "pad") == ("masked_fill", "view", "amax", *("scatter",) * local)
        if dim != -1 or not known:
            raise self.call.refuse("picks the best of")
        sizes = {"count": module.topk_blocks, "size": module.block_size, "local": module.local_blocks * local}
        found = self.call.choose(self.q, self.keys, None, **sizes)
        return found, found  # its forward marks the places of scores that are -inf

    def changed_by(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return what a torch function makes of the scores."""
        return self._after(name_of(func), name_of(func) == "pad" and kwargs.get("value") == -torch.inf)

    def _after(self, name: str, known: bool) -> _Blocks:
        if not known:
            raise self.call.refuse(f"applies {name} to")
        return replace(self, seen=(*self.seen, name))
