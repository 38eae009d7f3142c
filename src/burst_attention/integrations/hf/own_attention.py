"""Attentions that compute their scores themselves, on shards.

Older modeling files have no attention interface: they multiply queries and keys, mask the scores, apply softmax and
multiply by the values. Such a forward runs unchanged, but its scores are never computed. The product of queries and
keys is a stand-in that records what happens to it. Its product with the values is our attention. Any operation that
the stand-in does not know raises an error, so no change of the scores is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from burst_attention.attention.batch import Plans

from .checks import ALONE, UNSTATED, MaskRequest, plans_of
from .known import states_causal

_MASKED = -1e4  # a score of a masked key is at most this: its weight is 0 in every dtype


class OwnAttention(nn.Module):
    """A known attention whose scores our attention computes."""

    stock_class: Any

    @torch.compiler.disable  # it runs under a mode of torch functions
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stock forward with our attention in place of its product, mask and softmax."""
        plans = plans_of(self)
        if plans is ALONE:
            return super().forward(*args, **kwargs)
        return _over_shards(self, Plans.of(plans), super().forward, args, kwargs)


def _over_shards(module: Any, plans: Plans, forward: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Run the forward of a known attention."""
    given = [*args, *kwargs.values()]
    request = next((each for each in given if isinstance(each, MaskRequest)), None)
    args = [None if isinstance(each, MaskRequest) else each for each in args]
    kwargs = {name: None if isinstance(each, MaskRequest) else each for name, each in kwargs.items()}
    with _Products(_LayerCall(module, plans, request)):
        out = forward(*args, **kwargs)
    if isinstance(out, (tuple, list)):  # attention weights are never computed as a whole
        return type(out)(None if isinstance(each, _Scores) else each for each in out)
    return out


@dataclass(frozen=True)
class _LayerCall:
    """One call of an attention: its module, the plans of the call, and the mask that its model asked for."""

    module: Any
    plans: Plans
    request: MaskRequest | None

    @property
    def length(self) -> int:
        """The number of local tokens."""
        return self.plans.one.length

    @property
    def window(self) -> int | None:
        """The sliding window; only GPT Neo has one."""
        local = getattr(self.module, "attention_type", None) == "local"
        return int(self.module.config.window_size) if local else None

    def refuse(self, what: str) -> ValueError:
        """Return the error for scores that our attention can't give."""
        return ValueError(
            f"{type(self.module).__name__} {what} its attention scores, which is not known here; run it on one rank, "
            "where it sees the whole sequence"
        )

    def visible(self, device: Any) -> Tensor:
        """Return bool [T, T], True where the layer's own mask shows a local key to a local query."""
        seen = torch.ones(self.length, self.length, dtype=torch.bool, device=device).tril()
        return seen if self.window is None else seen & ~seen.tril(-self.window)

    @property
    def causal(self) -> bool:
        """Whether the layer says that it is causal."""
        return states_causal(self.module)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, dropout: float) -> Tensor:
        """Return our attention's output in the layout of ``v``: [B, H, T, D] or [B H, T, D]."""
        heads = v.shape[1] if v.dim() == 4 else self.module.num_heads
        split = [x if x.dim() == 4 else x.unflatten(0, (-1, heads)) for x in (q, k, v)]
        attention: Any = ALL_ATTENTION_FUNCTIONS["burst"]
        out, _ = attention(
            self.module,
            *(x.to(v.dtype) for x in split),
            self.request,
            plan=self.plans,
            position_ids=self.plans.positions,
            dropout=dropout,
            scaling=scale,
            is_causal=self.causal,
            sliding_window=UNSTATED if self.window is None else self.window,
        )
        out = out.transpose(1, 2).contiguous()
        return out if v.dim() == 4 else out.flatten(0, 1)


class _Products(TorchFunctionMode):
    """While a layer's forward runs, gives a stand-in for the product of queries and keys."""

    def __init__(self, layer: _LayerCall) -> None:
        super().__init__()
        self._layer = layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function, or its version for stand-ins."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").strip("_")
        scores = [each for each in args if isinstance(each, _Scores)]
        if scores:
            return scores[0].changed_by(name, func, args, kwargs)
        if name == "scaled_dot_product_attention":
            return self._fused(*args, **kwargs)
        factors, scale = _factors(name, args, kwargs)
        if factors is not None and self._are_queries_and_keys(*factors):
            return _Scores(self._layer, factors[0], factors[1].transpose(-1, -2), scale)
        return func(*args, **kwargs)

    def _are_queries_and_keys(self, a: Any, b: Any) -> bool:
        tokens = self._layer.length
        return a.dim() >= 3 and a.shape[-2] == tokens and b.shape[-1] == tokens and a.shape[-1] == b.shape[-2]

    def _fused(self, q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, **options: Any) -> Tensor:
        scale = options.pop("scale", None)
        if attn_mask is not None or not options.pop("is_causal", False) or options:
            raise self._layer.refuse("masks")
        return self._layer.attend(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, dropout_p)


def _factors(name: str, args: Any, kwargs: Mapping[str, Any]) -> tuple[tuple[Any, Any] | None, float]:
    """Return the two factors of a product of matrices, and the factor of the result; None for another function."""
    if name in ("matmul", "bmm") and len(args) == 2:
        return (args[0], args[1]), 1.0
    if name == "baddbmm" and len(args) == 3 and not args[0].any():
        return (args[1], args[2]), float(kwargs.get("alpha", 1.0))
    return None, 1.0


@dataclass(frozen=True, eq=False)
class _Scores:
    """Stands for scores, or for their softmax.

    Attributes:
        layer: the call.
        q, k: [..., T, D].
        scale: the factor of their product.
        shown: the shape that the forward gave it; None: that of the product.
        zeroed: masked scores are 0 and need a negative number.
        soft: whether these are weights.
        dropped: the rate of dropout of the weights.
    """

    layer: _LayerCall
    q: Tensor
    k: Tensor
    scale: float
    shown: tuple[int, ...] | None = None
    zeroed: bool = False
    soft: bool = False
    dropped: float = 0.0

    @property
    def shape(self) -> torch.Size:
        """The shape of the scores."""
        return torch.Size(self.shown or (*self.q.shape[:-1], self.k.shape[-2]))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the scores; that of the queries."""
        return self.q.dtype

    @property
    def device(self) -> torch.device:
        """The device of the scores."""
        return self.q.device

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or one size."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    def to(self, *_: Any, **__: Any) -> _Scores:
        """Ignore a cast: our kernels choose the precision of scores and weights."""
        return self

    def view(self, *shape: int) -> _Scores:
        """Split or join rows and heads."""
        if tuple(shape[-2:]) not in ((self.layer.length,) * 2, (self.layer.length, -1)):
            raise self.layer.refuse(f"reshapes to {list(shape)}")
        return replace(self, shown=(*shape[:-1], self.layer.length))

    def __truediv__(self, other: Any) -> _Scores:
        """Divide by a number."""
        return self.scaled(1.0 / other) if isinstance(other, (int, float)) else self._unknown("divides")

    def __mul__(self, other: Any) -> _Scores:
        """Multiply by a number, or by a causal mask of zeros and ones."""
        if isinstance(other, (int, float)):
            return self.scaled(other)
        masks = not self.soft and isinstance(other, Tensor) and self._is_own_mask(other == 1)
        if masks and not other[other != 1].any():
            return replace(self, zeroed=True)
        return self._unknown("multiplies")

    def __add__(self, other: Any) -> _Scores:
        """Add nothing, or a mask of zeros and large negative numbers."""
        if other is None:
            return self
        masks = not self.soft and isinstance(other, Tensor) and self._is_own_mask(other == 0)
        return self._masked() if masks and bool((other[other != 0] <= _MASKED).all()) else self._unknown("adds to")

    def __matmul__(self, values: Tensor) -> Tensor:
        """Return our attention's output for these values."""
        if not self.soft or self.zeroed:
            return self._unknown("multiplies values by")
        q, k = self.q, self.k
        if values.dim() == 4 and q.dim() == 3:
            q, k = (x.unflatten(0, (values.shape[0], -1)) for x in (q, k))
        return self.layer.attend(q, k, values, self.scale, self.dropped)

    def scaled(self, factor: float) -> _Scores:
        """Return scores times a factor."""
        return self._unknown("scales the softmax of") if self.soft else replace(self, scale=self.scale * factor)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse torch functions outside of the layer's forward."""
        scores = next(each for each in args if isinstance(each, cls))
        return scores.changed_by(getattr(func, "__name__", "").strip("_"), func, args, kwargs or {})

    def changed_by(self, name: str, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return what a torch function makes of the scores, its first argument unless noted."""
        first = args[0] is self
        if name in ("matmul", "bmm") and first:
            return self @ args[1]
        if name in ("add", "radd"):
            return self + args[1 if first else 0]
        if name in ("mul", "rmul"):
            return self * args[1 if first else 0]
        if name == "softmax" and first and not self.soft:
            given = dict(zip(("dim",), args[1:], strict=False)) | dict(kwargs)
            return replace(self, soft=True) if given["dim"] in (-1, self.dim() - 1) else self._unknown("normalises")
        if name == "dropout" and first and self.soft:
            given = dict(zip(("p", "training"), args[1:], strict=False)) | dict(kwargs)
            return replace(self, dropped=float(given["p"]) if given.get("training", True) else 0.0)
        if name == "where" and args[1] is self and float(args[2]) <= _MASKED and self._is_own_mask(args[0]):
            return self._masked()
        return self._unknown(f"applies {resolve_name(func) or name} to")

    def _masked(self) -> _Scores:
        return replace(self, zeroed=False)  # the plan's mask hides the same keys

    def _is_own_mask(self, seen: Tensor) -> bool:
        """Return whether a mask of local keys is the layer's own: causal, and its window."""
        shape = (self.layer.length,) * 2
        own = self.layer.visible(seen.device)
        return self.layer.causal and seen.shape[-2:] == shape and bool((seen.bool() == own).all())

    def _unknown(self, what: str) -> Any:
        raise self.layer.refuse(what)
