"""Attention masks: the (query, key) pairs that are seen, as disjoint bands over global positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np


def _integer(name: str, value: Any) -> int:
    try:
        exact = int(value)
        if isinstance(value, bool) or exact != value:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{name}={value!r} must be an integer") from None
    return exact


@dataclass(frozen=True)
class Mask:
    """Which keys each query sees. All rows of a batch share one mask.

    Args:
        causal: a query at position p sees keys at positions <= p.
        window: the number of keys that a query sees, including its own position. Needs ``causal``.
        cu_seqlens: global document borders ``[0, ..., S]``. A query sees only keys of its document. Pass any sequence
            of integers or a 1-D tensor. Repeated borders are empty documents.
        prefix: every query sees positions < ``prefix``. It can't be combined with ``cu_seqlens`` or ``window``.
    """

    causal: bool = True
    window: int | None = None
    cu_seqlens: Sequence[int] | None = None
    prefix: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.causal, bool):
            raise TypeError(f"causal={self.causal!r} must be True or False")
        if self.window is not None:
            object.__setattr__(self, "window", _integer("window", self.window))
            if self.window < 1:
                raise ValueError(f"window={self.window} must be at least 1; a query always sees its own position")
            if not self.causal:
                raise ValueError(f"window={self.window} needs causal=True; a window covers earlier keys only")
        if self.prefix is not None:
            object.__setattr__(self, "prefix", _integer("prefix", self.prefix))
            if self.prefix < 0:
                raise ValueError(f"prefix={self.prefix} must be at least 0")
            other = "window" if self.window is not None else "cu_seqlens" if self.cu_seqlens is not None else None
            if other:
                raise ValueError(f"prefix={self.prefix} can't be combined with {other}; leave one of them out")
        if self.cu_seqlens is not None:
            object.__setattr__(self, "cu_seqlens", self._borders(self.cu_seqlens))

    @staticmethod
    def _borders(given: Any) -> tuple[int, ...]:
        try:
            values = given.tolist() if hasattr(given, "tolist") else list(given)
            values = list(values)
        except TypeError:
            raise TypeError(f"cu_seqlens={given!r} must be a sequence of integers, the borders [0, ..., S]") from None
        borders = tuple(_integer("cu_seqlens entry", value) for value in values)
        if not borders or borders[0] != 0:
            raise ValueError(f"cu_seqlens={_short(borders)} must start with 0, the first document's border")
        for before, after in pairwise(borders):
            if after < before:
                raise ValueError(f"cu_seqlens falls from {before} to {after}; borders must not decrease")
        return borders

    def check(self, seqlen: int) -> None:
        """Raise ValueError if this mask doesn't fit ``seqlen`` positions."""
        if self.cu_seqlens is not None and self.cu_seqlens[-1] != seqlen:
            raise ValueError(
                f"cu_seqlens ends at {self.cu_seqlens[-1]}, the sequence at {seqlen}; the last border must equal seqlen"
            )
        if self.prefix is not None and self.prefix > seqlen:
            raise ValueError(f"prefix={self.prefix} is longer than the sequence; it must be at most seqlen={seqlen}")

    def regions(self, seqlen: int) -> np.ndarray:
        """Return the seen pairs as disjoint bands.

        Returns:
            int64 [R, 6]: rows (q_start, q_stop, k_start, k_stop, lo, hi). A pair is seen where lo <= q - k <= hi.
        """
        self.check(seqlen)
        far = max(seqlen - 1, 0)
        lo = 0 if self.causal else -far
        hi = far if self.window is None else min(far, self.window - 1)
        if self.prefix is not None and self.causal:
            return np.array(
                [(0, seqlen, 0, self.prefix, -far, far), (self.prefix, seqlen, self.prefix, seqlen, 0, far)]
            )
        borders = np.array([0, seqlen] if self.cu_seqlens is None else self.cu_seqlens, dtype=np.int64)
        start, stop = borders[:-1], borders[1:]
        start, stop = start[stop > start], stop[stop > start]
        band = np.full_like(start, lo), np.full_like(start, hi)
        return np.stack([start, stop, start, stop, *band], axis=1)

    def dense(self, seqlen: int) -> np.ndarray:
        """Return the mask as bool [S, S], True where seen.

        Reference code uses it. It follows the definition and does not call :meth:`regions`.
        """
        self.check(seqlen)
        q, k = np.arange(seqlen)[:, None], np.arange(seqlen)[None, :]
        seen = (k <= q) if self.causal else np.ones((seqlen, seqlen), bool)
        if self.window is not None:
            seen = seen & (q - k < self.window)
        if self.prefix is not None:
            seen = seen | (k < self.prefix)
        if self.cu_seqlens is not None:
            document = np.searchsorted(np.asarray(self.cu_seqlens[1:]), np.arange(seqlen), side="right")
            seen = seen & (document[:, None] == document[None, :])
        return seen

    def document_positions(self, positions: np.ndarray) -> np.ndarray:
        """Return each position's offset from the start of its document."""
        if self.cu_seqlens is None:
            return positions
        borders = np.asarray(self.cu_seqlens, np.int64)
        return positions - borders[np.searchsorted(borders, positions, side="right") - 1]

    def __repr__(self) -> str:
        """Show all fields that are set. Ranks also compare this text to check that their masks are equal."""
        said = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.cu_seqlens is not None:
            said["cu_seqlens"] = _short(tuple(self.cu_seqlens))
        return f"Mask({', '.join(f'{name}={value}' for name, value in said.items() if value is not None)})"


def _short(borders: tuple[int, ...]) -> str:
    if len(borders) <= 8:
        return str(list(borders))
    return f"[{', '.join(map(str, borders[:3]))}, ... {len(borders)} borders ..., {borders[-1]}]"
