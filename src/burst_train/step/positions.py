"""How many positions a model has: ``--max-positions`` and ``--rope-scaling``, in the fields that transformers reads."""

from __future__ import annotations

from copy import deepcopy
from math import ceil
from typing import Any

import torch

from ..config import yarn_factor
from ..presets import PRESETS, has_own_positions
from ..structure import build_empty


def set_positions(
    config: Any,
    model: str,
    seq_len: int,
    *,
    training: bool = True,
    max_positions: int | None = None,
    rope_scaling: str | None = None,
) -> None:
    """Set a configuration's positions for ``seq_len``, in place; ValueError if the flags don't fit the model."""
    own = getattr(config, "max_position_embeddings", None)
    if rope_scaling is not None:
        if max_positions is not None:
            raise ValueError(
                f"--max-positions {max_positions} and --rope-scaling {rope_scaling} both set the number of positions; "
                "leave one of them out"
            )
        scale_rope(config, rope_scaling, model=model)
        if training:
            check_scaled(config.max_position_embeddings, rope_scaling, model=model, seq_len=seq_len)
        return
    if max_positions is not None and own is not None:
        _check_raised(config, model, max_positions, own)
    if model in PRESETS:
        own = max(own or 0, seq_len)
    most = config.max_position_embeddings = max_positions or own or seq_len
    if training and seq_len > most:
        scaling = f"give --rope-scaling yarn:{ceil(seq_len / most)}, " if can_scale(config) else ""
        raise ValueError(
            f"--seq-len {seq_len} exceeds the {most} positions of --model {model!r}. Lower --seq-len, {scaling}or "
            f"give --max-positions {seq_len} if the rope_parameters in its config.json, which do not change, suit this "
            "length"
        )


def can_scale(config: Any) -> bool:
    """Whether a configuration has one RoPE setting, which is not scaled yet."""
    return (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "default"


def scale_rope(config: Any, scaling: str, *, model: str) -> None:
    """Set YaRN's fields (arXiv 2309.00071) in a configuration, in place; ValueError if its RoPE can't be scaled.

    The factor multiplies ``max_position_embeddings``. transformers derives frequencies and the attention's factor.
    """
    about, off = f"--rope-scaling {scaling}: --model {model!r}", "leave --rope-scaling out"
    rope, positions = getattr(config, "rope_parameters", None), getattr(config, "max_position_embeddings", None)
    if not has_own_positions(model):
        raise ValueError(f"{about} takes its positions from --seq-len; {off}")
    if not rope or positions is None:
        raise ValueError(f"{about} has no rope_parameters and max_position_embeddings; {off}")
    if "rope_type" not in rope:
        raise ValueError(f"{about} has several RoPE settings, by kind of layer; edit its config.json, and {off}")
    if not can_scale(config):
        raise ValueError(f"{about} has {rope} already; edit its config.json, or {off}")
    factor = yarn_factor(scaling)
    added = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": positions}
    config.rope_parameters = rope | added
    config.max_position_embeddings = int(positions * factor)
    if not any(getattr(part, "rope_type", None) == "yarn" for part in build_empty(config).modules()):
        raise ValueError(f"{about} reads no rope type from its configuration; {off}")


def check_scaled(positions: int, scaling: str, *, model: str, seq_len: int) -> None:
    """Raise ValueError if ``seq_len`` exceeds a model's positions, which :func:`scale_rope` has raised."""
    if seq_len > positions:
        enough = ceil(seq_len * yarn_factor(scaling) / positions)
        raise ValueError(
            f"--rope-scaling {scaling} gives --model {model!r} {positions:,} positions, and --seq-len {seq_len} "
            f"exceeds them; give yarn:{enough}, or lower --seq-len"
        )


def _check_raised(config: Any, model: str, most: int, own: int) -> None:
    """Raise ValueError if ``--max-positions`` would lower the positions, or add some whose weights are not there."""
    if most < own:
        raise ValueError(f"--max-positions {most} would lower the {own:,} positions of --model {model!r}; leave it out")
    more = deepcopy(config)
    more.max_position_embeddings = most
    if _shapes(more) != _shapes(config):
        raise ValueError(
            f"--max-positions {most}: the {own:,} positions of --model {model!r} are learned weights, and there are "
            "no more; lower --seq-len"
        )


def _shapes(config: Any) -> list[torch.Size]:
    return [parameter.shape for parameter in build_empty(config).parameters()]
