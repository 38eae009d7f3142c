"""A call of ``generate`` of a parallelized model: its settings, and what its ranks must have alike."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import GenerationMixin
from transformers.generation.stopping_criteria import MaxTimeCriteria

from burst_attention.attention.batch import digest_of, digest_text
from burst_attention.comm.agreement import Meeting

from ..reading import read
from ..settings import REMEDIES, Settings
from ..tensor import axis
from . import stub_forward

_POSITIONAL = [*inspect.signature(GenerationMixin.generate).parameters][1:]
_SAME_PROMPT = "Every rank needs the same prompt and the same settings of generate"
_SAME_SEED = "Seed all ranks alike before generate: torch.manual_seed(seed)"
_RANDOM = "the state of the random generator"
SAME: Mapping[str, Any] = {"remedy": _SAME_PROMPT, "remedies": {**REMEDIES, _RANDOM: _SAME_SEED}}


def agree_on_generate(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Compare a ``generate`` without our cache over the ranks that share weights, which exchange parts of layers."""
    cut, whole = axis.cut_of(model), model._burst.meeting
    if cut is None:
        return
    meeting = whole if cut.by_context else Meeting(whole.inner)
    with meeting.entering("generate"):
        inputs = named(args, kwargs)
        settings, fields = settings_of(model, inputs)
        check_clocks(settings, inputs)
        fields["the digests of tensors"] = {name: digest_of(x) for name, x in inputs.items() if isinstance(x, Tensor)}
        fields, details = with_settings(model, fields)
    meeting.agree("generate", fields, details=details, **SAME)


def with_settings(model: Any, fields: Mapping[str, Any]) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Return a call's fields and those of the model's settings, with their details."""
    if model._burst.meeting.alone:
        return dict(fields), {}
    own = Settings(read(model))
    return {**fields, **own.fields()}, own.details()


def named(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a ``generate`` by name."""
    return dict(zip(_POSITIONAL, args, strict=False)) | dict(kwargs)


def settings_of(model: Any, inputs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the settings that ``generate`` will use, and what ranks compare of them."""
    other = ("inputs", "input_ids", "generation_config", "streamer", "assistant_model", "synced_gpus")
    kept = {name: value for name, value in inputs.items() if name not in other}
    settings = model._prepare_generation_config(inputs.get("generation_config"), **kept)[0]
    random = digest_of(stub_forward.random_states(model)[-1]) if settings.do_sample else None
    return settings, {"the settings of generate": digest_text(settings.to_dict()), _RANDOM: random}


def check_clocks(settings: Any, inputs: Mapping[str, Any]) -> None:
    clocks = [each.max_time for each in inputs.get("stopping_criteria") or () if isinstance(each, MaxTimeCriteria)]
    if settings.max_time is not None or clocks:
        raise ValueError(
            f"max_time={settings.max_time or clocks[0]} is refused: the ranks' clocks differ, so they would stop at "
            "different tokens; use max_new_tokens"
        )
