"""Greedy search without logits: ranks that share a head's rows exchange the greatest logit of each.

``generate`` takes the argmax of a step's logits and drops them, unless a setting reads or changes them. Settings that
this file does not know count as such, so that a new release of transformers costs bytes and never a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, LogitsProcessorList

from burst_attention.integrations.hf.reading import forwards, known
from burst_attention.integrations.hf.reading.attached import origin_of

# Settings that greedy search does not read, or that never meet the logits: any value will do.
LENGTHS = known.names("max_length max_new_tokens stop_strings eos_token_id pad_token_id bos_token_id")
OF_SAMPLING = known.names("temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff")
OF_BEAMS = known.names("early_stopping length_penalty")
OF_ASSISTANTS = known.names(
    "num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold assistant_lookbehind "
    "target_lookbehind"
)
OF_OUTPUTS = known.names("return_dict_in_generate transformers_version")
HARMLESS = LENGTHS | OF_SAMPLING | OF_BEAMS | OF_ASSISTANTS | OF_OUTPUTS
# Values without an effect. Those of all other settings are None and False.
NEUTRAL: Mapping[str, Any] = {
    "use_cache": True,
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "diversity_penalty": 0.0,
    "guidance_scale": 1.0,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
}
# Keywords of ``generate`` that are no settings.
INPUTS = known.names("inputs input_ids attention_mask position_ids generation_config streamer tokenizer")
# Methods that get logits, or decide who gets them. A model's own may not differ from GenerationMixin's, and no package
# but these may have put code in the place of any, nor in front of the model's call.
LOOP = known.names(
    "generate _sample _prefill _get_logits_processor _get_stopping_criteria _merge_criteria_processor_list "
    "_update_model_kwargs_for_generation"
)
_PACKAGES = ("transformers", "torch", "burst_attention")


class NextToken(int):
    """``logits_to_keep=1`` of a call whose logits serve their argmax alone.

    ``generate`` passes it on from its keywords, so no other call of the model has it.
    """


def takes_argmax(model: Any, settings: Any, values: Mapping[str, Any]) -> bool:
    """Return whether ``generate`` will take no more of a step's logits than their argmax.

    Args:
        settings: those that it will use; ``values`` its arguments by name, the caches under any of their names.
    """
    read = (name for name, value in vars(settings).items() if name[0] != "_" and not _is_neutral(name, value))
    kept = INPUTS | {*known.CACHES} | vars(settings).keys()
    given = (name for name, value in values.items() if name not in kept and not _is_nothing(value))
    return (
        not any(read)
        and not any(given)
        and "logits_to_keep" not in values
        and "logits_to_keep" in forwards.parameters_of(model.stock_class.forward)
        and _is_stock(model)
        and not _is_watched(model)
    )


def only(tokens: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Return logits [..., size] of one possible token each: 0 there, and -inf everywhere else."""
    logits = torch.full((*tokens.shape, size), -torch.inf, dtype=dtype, device=tokens.device)
    return logits.scatter_(-1, tokens.unsqueeze(-1), 0.0)


def _is_neutral(name: str, value: Any) -> bool:
    return name in HARMLESS or value is None or value is False or bool(value == NEUTRAL.get(name))


def _is_nothing(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, list) and not value)


def _is_stock(model: Any) -> bool:
    """Return whether the code that gets a step's logits is that of transformers."""
    calls = {*LOOP, "__call__", "forward"}
    found = [vars(kind)[name] for kind in type(model).__mro__ for name in calls & vars(kind).keys()]
    return (
        all(getattr(model.stock_class, x, None) is getattr(GenerationMixin, x, None) for x in LOOP)
        and not calls & vars(model).keys()
        and all(map(_is_of_packages, [*found, LogitsProcessorList.__call__]))
    )


def _is_of_packages(function: Any) -> bool:
    """Return whether the code of a function, and of what it wraps, comes from packages that only pass logits on."""
    inside = getattr(function, "__wrapped__", None)
    return known.within(origin_of(function), _PACKAGES) and (inside is None or _is_of_packages(inside))


def _is_watched(model: Any) -> bool:
    """Return whether something sees what the model returns. FSDP2's hooks only gather and free weights."""
    hooks = [*model._forward_hooks.values(), *nn.modules.module._global_forward_hooks.values()]
    return any(not known.within(origin_of(x), ["torch.distributed"]) for x in hooks)
