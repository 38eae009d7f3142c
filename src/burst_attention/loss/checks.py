"""Checks of the arguments of losses over shards. Each check raises TypeError or ValueError."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence, Set
from types import NoneType
from typing import Any

import torch

from ..attention.batch import digest_of
from ..attention.passes import is_dtensor
from ..attention.plan import Plan
from ..comm.link import real
from .head import Head
from .tokens import Measurement


def divisor_of(value: Any, name: str = "num_valid") -> float | None:
    """Return the argument ``name``, by which a sum of losses is divided, as a float; None for None."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    count = real(value)
    if count is None:
        raise TypeError(f"{name}={value!r} must be a number, a tensor of one number, or None")
    if not 0 <= count <= sys.float_info.max:
        raise ValueError(f"{name}={value} must be a count of tokens: finite and not negative")
    return float(count)


def check_plan(plan: Any) -> None:
    """Raise TypeError if ``plan`` is no Plan. Only this rank raises; it can't notify others without a plan."""
    if not isinstance(plan, Plan):
        raise TypeError(
            f"plan={plan!r} must come from make_plan(seqlen, ...); from a mapping by window pass any one plan"
        )


def check_arguments(
    hidden: torch.Tensor,
    head: Head,
    labels: torch.Tensor,
    plan: Plan,
    ignore_index: int,
    chunk_tokens: int | None,
) -> torch.Tensor:
    """Check the hidden states, the head, the labels, and how they are processed; return the labels on the CPU."""
    weight = head.weight
    _check_tensors(hidden=hidden, lm_head_weight=weight, labels=labels)
    _check_dtypes(hidden, weight, labels)
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index={ignore_index!r} must be an integer")
    if chunk_tokens is not None and (type(chunk_tokens) is not int or chunk_tokens < 1):
        raise ValueError(f"chunk_tokens={chunk_tokens!r} must be a positive integer, or None")
    if hidden.dim() != 3:
        raise ValueError(f"hidden has shape {list(hidden.shape)}; pass [batch, local tokens, width]")
    if hidden.shape[1] != plan.length:
        raise ValueError(
            f"hidden has {hidden.shape[1]} tokens, the plan gives this rank {plan.length} of {plan.seqlen}; "
            "pass the shard that plan.shard gave"
        )
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[2]:
        raise ValueError(f"lm_head_weight has shape {list(weight.shape)}; pass [vocabulary, {hidden.shape[2]}]")
    if labels.shape != hidden.shape[:2]:
        raise ValueError(
            f"labels has shape {list(labels.shape)}, not hidden's {list(hidden.shape[:2])}; pass plan.shard_labels"
        )
    here = labels.detach().cpu()  # a GPU's host waits, unless they are here already
    wrong = (here != ignore_index) & ((here < 0) | (here >= head.vocabulary))
    if wrong.any():
        row, place = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"labels holds {here[row, place]} for token {plan.positions[place]} of row {row}, neither in [0, "
            f"{head.vocabulary}) nor ignore_index={ignore_index}; pass ids that the head has, or resize it"
        )
    if plan.world > 1:
        plan.usage.check(labels)
    _check_logits(hidden, head)
    return here


def _check_logits(hidden: torch.Tensor, head: Head) -> None:
    """Check what follows the head's product: bias, factor, cap."""
    bias, factor, softcap = head.bias, head.form.factor, head.form.softcap
    if isinstance(factor, bool) or not isinstance(factor, (int, float)):
        raise TypeError(f"factor={factor!r} must be a number")
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float, NoneType)):
        raise TypeError(f"softcap={softcap!r} must be a number, or None for no cap")
    if not math.isfinite(factor) or factor == 0:
        raise ValueError(f"factor={factor} must be finite and not 0; logits are multiplied by it")
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise ValueError(f"softcap={softcap} must be finite and greater than 0, or None for no cap")
    if bias is None:
        return
    _check_tensors(hidden=hidden, bias=bias)
    if bias.shape != head.weight.shape[:1]:
        raise ValueError(f"bias has shape {list(bias.shape)}; pass [{len(head.weight)}], one number for each logit")
    if bias.dtype != hidden.dtype:
        raise TypeError(f"bias has dtype {bias.dtype}, hidden {hidden.dtype}; cast one of them")


def fields_of_axis(
    hidden: torch.Tensor, head: Head, labels: torch.Tensor, ignore_index: int, measurement: Measurement, **others: Any
) -> dict[str, Any]:
    """Return what the ranks of a tensor-parallel axis must pass equally; nothing if the head is whole.

    Ranks that differ would wait for one another, or merge what does not belong together.
    """
    if head.part is None:
        return {}
    grad = torch.is_grad_enabled()
    return {
        "the digest of labels": digest_of(labels),
        "ignore_index": ignore_index,
        "hidden": [str(hidden.dtype), *hidden.shape],
        "chunk_tokens": measurement.chunk_tokens,
        "outputs": list(measurement.measures),
        "temperature": measurement.temperature,
        "factor": head.form.factor,
        "softcap": head.form.softcap,
        "whether hidden needs a gradient": grad and hidden.requires_grad,
        "whether lm_head_weight needs a gradient": grad and head.weight.requires_grad,
        "whether there is a bias": head.bias is not None,
        "whether bias needs a gradient": grad and head.bias is not None and head.bias.requires_grad,
        **others,
    }


def check_temperature(temperature: Any) -> None:
    """Check the number that logits are divided by."""
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
        raise TypeError(f"temperature={temperature!r} must be a number")
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature={temperature} must be finite and greater than 0; logits are divided by it")


def check_outputs(outputs: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return ``outputs`` without duplicates, in the order of ``known``. The first of ``known`` is always included."""
    if isinstance(outputs, str) or not isinstance(outputs, (Sequence, Set)):
        raise TypeError(f"outputs={outputs!r} must be a sequence of names out of {', '.join(names)}")
    unknown = [name for name in outputs if name not in names]
    if unknown:
        raise ValueError(f"outputs holds {unknown[0]!r}, which is unknown; choose from {', '.join(names)}")
    return tuple(name for name in names if name in outputs or name == names[0])


def _check_tensors(*, hidden: torch.Tensor, **others: torch.Tensor) -> None:
    for name, tensor in {"hidden": hidden, **others}.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; pass a tensor")
        if is_dtensor(tensor):
            raise TypeError(
                f"{name} is a DTensor, which may hold only a part; under FSDP call next_token_loss inside the root "
                "module's forward, where parameters are unsharded, and elsewhere pass full_tensor(). (A head may be "
                "cut by the vocabulary, over the axis 'tp' of a mesh)"
            )
        if tensor.device != hidden.device and not (name == "labels" and tensor.device.type == "cpu"):
            raise ValueError(f"{name} is on {tensor.device}, hidden on {hidden.device}; put them on one device")


def _check_dtypes(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> None:
    if hidden.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"hidden has dtype {hidden.dtype}; pass fp64, fp32, bf16 or fp16")
    if weight.dtype != hidden.dtype:
        raise TypeError(
            f"lm_head_weight has dtype {weight.dtype}, hidden {hidden.dtype}; cast one of them to choose "
            "the precision of the logits"
        )
    if labels.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"labels has dtype {labels.dtype}; pass int64 or int32, as plan.shard_labels gives them")
