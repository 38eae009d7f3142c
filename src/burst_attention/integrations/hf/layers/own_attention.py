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
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from burst_attention.attention.batch import Plans

from ..classes import Converted
from ..reading.known import states_causal
from ..running import ALONE, running_plans
from .checks import UNSTATED, MaskRequest

_MASKED = -1e4  # a score of a masked key is at most this: its weight is 0 in every dtype


class OwnAttention(Converted):
    """A known attention whose scores our attention computes."""

    wrong_alone = "computes its attention itself, over this rank's shard alone"

    @torch.compiler.disable  # it runs under a mode of torch functions
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        plans = running_plans(self)
        if plans is ALONE:
            return super().forward(*args, **kwargs)
        return _over_shards(self, plans, super().forward, args, kwargs)


def _over_shards(module: Any, plans: Plans, forward: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Run a stock forward with our attention in place of its product, mask and softmax."""
    values = [*args, *kwargs.values()]
    request = next((each for each in values if isinstance(each, MaskRequest)), None)
    args = [None if isinstance(each, MaskRequest) else each for each in args]
    kwargs = {name: None if isinstance(each, MaskRequest) else each for name, each in kwargs.items()}
    with _LayerCall(module, plans, request):
        out = forward(*args, **kwargs)
    if isinstance(out, (tuple, list)):  # attention weights are never computed as a whole
        return type(out)(None if isinstance(each, _Scores) else each for each in out)
    return out


class _LayerCall(TorchFunctionMode):
    """One call of an attention. While its forward runs, a stand-in replaces the product of queries and keys."""

    def __init__(self, module: Any, plans: Plans, request: MaskRequest | None) -> None:
        super().__init__()
        self.module, self.plans, self.request, self.length = module, plans, request, plans.one.length
        local = getattr(module, "attention_type", None) == "local"  # GPT Neo's
        self.window = int(module.config.window_size) if local else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if scores := next((each for each in args if isinstance(each, Recorded)), None):
            return scores.changed_by(func, args, kwargs)
        name, factors, scale = name_of(func), args, 1.0
        if name == "scaled_dot_product_attention":  # only if the layer's implementation is torch's, not ours
            raise self.refuse("hides")
        if name == "baddbmm" and len(args) == 3 and not args[0].any():
            name, factors, scale = "bmm", args[1:], float(kwargs.get("alpha", 1.0))
        if name in ("matmul", "bmm") and len(factors) == 2:
            a, b = factors
            if a.dim() >= 3 and a.shape[-2] == self.length == b.shape[-1] and a.shape[-1] == b.shape[-2]:
                return _Scores(self, a, b.transpose(-1, -2), scale)
        return func(*args, **kwargs)

    def refuse(self, what: str) -> ValueError:
        """Return the error for scores that our attention can't give."""
        return unknown(self.module, f"{what} its attention scores")

    def is_mask(self, seen: Tensor) -> bool:
        """Return whether a mask of local keys is the layer's own: causal, and its window."""
        own = torch.ones(self.length, self.length, dtype=torch.bool, device=seen.device).tril()
        own = own if self.window is None else own & ~own.tril(-self.window)
        return states_causal(self.module) and seen.shape[-2:] == own.shape and bool((seen.bool() == own).all())

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
            dropout=dropout,
            scaling=scale,
            is_causal=states_causal(self.module),
            sliding_window=UNSTATED if self.window is None else self.window,
        )
        out = out.transpose(1, 2).contiguous()
        return out if v.dim() == 4 else out.flatten(0, 1)


def name_of(func: Any) -> str:
    """Return the name of a torch function, without underscores."""
    return getattr(func, "__name__", "").strip("_")


def unknown(module: Any, what: str) -> ValueError:
    """Return the error for a module whose code does something to a stand-in that is not known."""
    return ValueError(f"{type(module).__name__} {what}, which is not known here; run the model without hf.parallelize")


class Recorded:
    """A stand-in for scores, or for their mask. It records what torch functions make of it, or raises an error."""

    @property
    def hides(self) -> bool:
        """Whether it stands for the pairs whose scores the plan's mask hides."""
        return False

    def changed_by(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return what a torch function makes of the stand-in."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handle torch functions outside of the module's forward."""
        return next(each for each in args if isinstance(each, cls)).changed_by(func, args, kwargs or {})


@dataclass(frozen=True, eq=False)
class _Scores(Recorded):
    """Stands for scores, or for their softmax."""

    layer: _LayerCall
    q: Tensor  # [..., T, D]
    k: Tensor
    scale: float  # the factor of their product
    shown: tuple[int, ...] | None = None  # the shape that the forward gave it; None: that of the product
    zeroed: bool = False  # masked scores are 0 and need a negative number
    soft: bool = False  # whether these are weights
    dropped: float = 0.0  # the rate of dropout of the weights

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.shown or (*self.q.shape[:-1], self.k.shape[-2]))

    @property
    def dtype(self) -> torch.dtype:
        return self.q.dtype

    @property
    def device(self) -> torch.device:
        return self.q.device

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    def to(self, *_: Any, **__: Any) -> _Scores:
        return self  # our kernels choose the precision of scores and weights

    def view(self, *shape: int) -> _Scores:
        """Split or join rows and heads."""
        if tuple(shape[-2:]) not in ((self.layer.length,) * 2, (self.layer.length, -1)):
            raise self.layer.refuse(f"reshapes to {list(shape)}")
        return replace(self, shown=(*shape[:-1], self.layer.length))

    def __truediv__(self, other: Any) -> _Scores:
        return self._times(1.0 / other) if isinstance(other, (int, float)) else self._unknown("divides")

    def __mul__(self, other: Any) -> _Scores:
        """Multiply by a number, or by a causal mask of zeros and ones."""
        if isinstance(other, (int, float)):
            return self._times(other)
        masks = not self.soft and isinstance(other, Tensor) and self.layer.is_mask(other == 1)
        return replace(self, zeroed=True) if masks and not other[other != 1].any() else self._unknown("multiplies")

    def __add__(self, other: Any) -> _Scores:
        """Add nothing, or a mask of zeros and large negative numbers."""
        if other is None:
            return self
        masks = not self.soft and isinstance(other, Tensor) and self.layer.is_mask(other == 0)
        return self._masked() if masks and bool((other[other != 0] <= _MASKED).all()) else self._unknown("adds to")

    def __matmul__(self, values: Tensor) -> Tensor:
        """Return our attention's output for these values."""
        if not self.soft or self.zeroed:
            return self._unknown("multiplies values by")
        q, k = self.q, self.k
        if values.dim() == 4 and q.dim() == 3:
            q, k = (x.unflatten(0, (values.shape[0], -1)) for x in (q, k))
        return self.layer.attend(q, k, values, self.scale, self.dropped)

    def changed_by(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return what a torch function makes of the scores, its first argument unless noted."""
        name, first = name_of(func), args[0] is self
        if name in ("matmul", "bmm") and first:
            return self @ args[1]
        if name in ("add", "radd"):
            return self + args[1 if first else 0]
        if name in ("mul", "rmul"):
            return self * args[1 if first else 0]
        if name == "softmax" and first and not self.soft:
            options = dict(zip(("dim",), args[1:], strict=False)) | dict(kwargs)
            return replace(self, soft=True) if options["dim"] in (-1, self.dim() - 1) else self._unknown("normalises")
        if name == "dropout" and first and self.soft:
            options = dict(zip(("p", "training"), args[1:], strict=False)) | dict(kwargs)
            return replace(self, dropped=float(options["p"]) if options.get("training", True) else 0.0)
        if name == "where" and args[1] is self and float(args[2]) <= _MASKED and self.layer.is_mask(args[0]):
            return self._masked()
        return self._unknown(f"applies {resolve_name(func) or name} to")

    def _times(self, factor: float) -> _Scores:
        return self._unknown("scales the softmax of") if self.soft else replace(self, scale=self.scale * factor)

    def _masked(self) -> _Scores:
        return replace(self, zeroed=False)  # the plan's mask hides the same keys

    def _unknown(self, what: str) -> Any:
        raise self.layer.refuse(what)
