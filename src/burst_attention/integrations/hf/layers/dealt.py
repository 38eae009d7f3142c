"""The seam between a parallelized model and a cache whose keys and values are dealt over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from burst_attention.attention.batch import Chunked, Reach
from burst_attention.recurrence.exchange import Past
from burst_attention.recurrence.pools import PastPools

from ..reading import known
from . import checks

ON_ONE_RANK = "generate on one rank with transformers' own cache"  # the remedy of refusals


class DealtCache(Cache):
    """A cache that each rank holds a part of: the base of :class:`burst_attention.inference.ShardedCache`.

    It brings the forward of a model that gets it.
    """

    def generating(
        self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], argument: str
    ) -> AbstractContextManager[dict[str, Any]]:
        """Agree on a call of ``generate`` that got the cache as ``argument``; give its keywords inside the context."""
        raise NotImplementedError

    def run(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the output of a model's call for the tokens after those of the cache."""
        raise NotImplementedError

    @contextmanager
    def recurring(self, number: int) -> Iterator[Past]:
        """Give what the recurrent layer ``number`` keeps of the tokens in the cache; store what it keeps afterwards."""
        past = Past(self.get_conv_state(number), self.get_recurrent_state(number))
        yield past
        if past.columns is None:
            raise ValueError(f"layer {number} called no convolution, whose last inputs a cache needs")
        self.update_conv_state(past.columns, number, conv_kernel_size=past.columns.shape[2])
        if past.state is not None:
            self.update_recurrent_state(past.state, number)

    @contextmanager
    def pooling(self, number: int) -> Iterator[PastPools]:
        """Give what the indexer of layer ``number``, which pools keys, keeps; store what it keeps afterwards."""
        layer: Any = self.layers[number]
        if not getattr(layer, "pool", 0):
            raise ValueError(f"layer {number} pools keys, but its configuration says otherwise; correct it")
        past = PastPools(columns=layer.columns, keys=layer.pools)
        yield past
        layer.columns, layer.pools = past.columns, past.keys


def passed(kwargs: Mapping[str, Any]) -> str | None:
    """Return the keyword by which a call passes a cache over ranks; None if it passes none."""
    for name in known.CACHES:
        if isinstance(kwargs.get(name), DealtCache):
            return name
    return None


@dataclass(frozen=True)
class Step:
    """Stands for the plan in a call whose queries are on every rank."""

    attend: Callable[..., Tensor]  # of (q, keys, values, number, reach or UNSTATED, scale, softcap, sinks, indices)
    choose: Callable[..., Tensor]  # of (q, an indexer's keys, weights or None), as ``choose_keys`` or ``choose_blocks``
    first: int  # columns of the cache before the step
    span: int  # and with those of the step
    differs: Callable[[], bool]  # whether the layer that runs has keys of this rank alone

    def of_layer(
        self, module: torch.nn.Module, mask: Any, window: Any, q: Tensor, k: Tensor, v: Tensor, _: Any, **options: Any
    ) -> Tensor:
        """Check what the layer asks for, as for a plan; then compute its attention: [B, Hq, n, Dv]."""
        request = checks.mask_request(mask)
        reach: Reach | Any = checks.stated_window(window, request)
        if request is not None and request.chunk is not None:
            reach = Chunked(request.chunk)
        if not getattr(module, "is_causal", True) or (request is not None and not request.causal):
            raise ValueError(f"is_causal=False of {type(module).__name__}: a cache needs causal attention")
        return self.attend(q, k, v, getattr(module, "layer_idx", None), reach, **options)
