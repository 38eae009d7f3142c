"""Head dims as stock kernels want them: one width for all, a multiple of something, up to a limit."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad


def same_width(*tensors: Tensor, multiple: int = 1) -> tuple[Tensor, ...]:
    """Zero-pad the last dims to one width, a multiple of ``multiple``: zeros change neither scores nor outputs."""
    width = -(-max(x.shape[-1] for x in tensors) // multiple) * multiple
    return tuple(x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1])) for x in tensors)


def check_width(name: str, width: int, widest: int) -> None:
    """Raise ValueError for a head dim that a kernel has no program for."""
    if width > widest:
        raise ValueError(f"kernel={name!r} takes head dims up to {widest}, not {width}; use kernel='reference'")
