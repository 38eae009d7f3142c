"""What of a model lets tokens see each other outside of the attention: with several ranks it would see a shard alone.

Only attention exchanges anything, so everything else must treat each token by itself: projections, norms, experts,
rotary angles. A convolution, a recurrence, another attention or positions counted from the shard's start give plausible
wrong numbers. What is not known to leave tokens alone is refused, by the names of its classes before anything runs;
``check_model`` also measures it.
"""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from burst_attention.attention.batch import PlanArgument, Plans
from burst_attention.attention.plan import Plan, lone_plan

from .checks import check_rope

NAME = "burst"

_ALONE = "run it with one rank, where it sees the whole sequence"
# Layers of torch.nn that treat each token by itself; subclasses (quantized, low-rank) too.
_TOKENWISE = (
    nn.Linear,
    nn.Embedding,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.Dropout,
    nn.Identity,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Sequential,
    nn.ParameterList,
    nn.ParameterDict,
    nn.ReLU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
)
# What classes of models are called that only hold others or treat each token by itself.
_KNOWN = re.compile(
    r"(Model|ForCausalLM|LMHeadModel|ForConditionalGeneration|Decoder|Encoder|Layer|Block|Stack|Wrapper|OptimizedModule"
    r"|MLP|Mlp|GLU|FeedForward|FFN|Experts?|MoE|Moe|MoA|AltUp|Router|Gate|Gating|Statics"
    r"|Norm|NormGated|Norm1P|Activation|Gelu|Linear|Conv1D|Dense|Intermediate|Output|Transform|Projector|Adapter"
    r"|Embeddings?|HyperConnection|HyperHead|Head)$"
)
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention", "global_attention", "local_attention"})
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")
_SOFTCAPS = ("attn_logit_softcapping", "attn_softcap", "attention_logit_cap")


def check_config(config: PreTrainedConfig, *, training: bool = True) -> None:
    """Refuse a configuration whose model can't be spread over ranks; nothing is loaded and no rank is needed.

    Args:
        config: of a causal language model.
        training: False allows dropout, which evaluation switches off.

    Raises:
        ValueError: naming the setting, its value and what to do.
    """
    text = config.get_text_config(decoder=True)
    for name in _DROPOUTS if training else ():
        if getattr(text, name, None):
            raise ValueError(
                f"{name}={getattr(text, name)} of the configuration: dropout of attention weights is not supported; "
                f"set {name} to 0.0"
            )
    for name in _SOFTCAPS:
        if getattr(text, name, None):
            raise ValueError(
                f"{name}={getattr(text, name)} of the configuration: attention logits are not capped here; "
                "use a model without a soft cap"
            )
    window = getattr(text, "sliding_window", None)
    if window is not None and window < 1:
        raise ValueError(f"sliding_window={window} of the configuration must be at least 1, or null for none")
    check_rope(text)
    check_layers(text)
    if type(config) in AutoModelForCausalLM._model_mapping:
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        except Exception as error:
            raise ValueError(
                f"no model can be made of the configuration: {type(error).__name__}: {error}; correct its config.json"
            ) from error
        check_structure(model)


def check_layers(config: Any) -> None:
    """Refuse a configuration that says itself that some layer is none of attention."""
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"is_encoder_decoder=True of the configuration: cross-attention is not supported; {_ALONE}")
    for attribute in ("layer_types", "layers_block_type", "block_types"):
        kinds = getattr(config, attribute, None)
        for kind in kinds if isinstance(kinds, (list, tuple)) else ():
            if kind not in _LAYER_TYPES:
                raise ValueError(
                    f"{attribute} of the configuration has {kind!r}: such a layer mixes tokens in its own way, and "
                    f"each rank would see its shard alone; {_ALONE}"
                )


def check_structure(model: nn.Module) -> None:
    """Refuse a model with a part that is not known to treat each token by itself, or with another attention."""
    for name, module in model.named_modules():
        reason = _reason(module)
        if reason:
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) {reason}, and each rank would see its shard alone; "
                f"{_ALONE}"
            )


def check_attention_is_ours(model: nn.Module) -> None:
    """Refuse a model none of whose attention layers asks transformers which attention to use.

    They get no mask, and would look ahead even with one rank.
    """
    attentions = {name: module for name, module in model.named_modules() if "Attention" in type(module).__name__}
    if attentions and not any(_calls_interface(module) for module in attentions.values()):
        name, module = next(iter(attentions.items()))
        raise ValueError(
            f"{name} ({type(module).__name__}) computes its attention itself, whatever attn_implementation is asked "
            f"for; use another model, or load this one without attn_implementation={NAME!r}"
        )


def layer_windows(config: Any) -> list[int | None]:
    """How many keys a query of each layer sees; None for all of them."""
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def places_absolutely(model: Any) -> bool:
    """Whether more than two tokens' distance matters: learned positions, or scales that grow with the position."""
    config = model.config.get_text_config(decoder=True)
    rotary = any(_is(module, "RotaryEmbedding") for module in model.modules())
    learned = sum(isinstance(module, nn.Embedding) for module in model.modules()) > 1
    rope = getattr(config, "rope_parameters", None)
    scaled = getattr(config, "attn_temperature_tuning", None) or "llama_4_scaling_beta" in str(rope)
    return not rotary or learned or bool(scaled)


class Watch:
    """Remembers which models it found right, weakly, so that each is looked at once and not in every layer.

    Args:
        names: under which our attention is registered; a model must have it by one of them.
    """

    def __init__(self, names: Sequence[str] = (NAME,)) -> None:
        self._names = names
        self._right: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()

    @torch.compiler.disable
    def check(self, module: nn.Module, plan: Plan) -> None:
        """Refuse the model that calls this layer if it can't be spread; with one rank anything goes.

        A layer knows nothing of its model, so the model is looked for among the calls under way. Where there is none,
        as in a checkpointed layer that is computed again, the layer's configuration alone is asked.
        """
        if plan.world == 1:
            return
        check_layers(getattr(module, "config", None))
        model = running_model()
        if model is None:
            return
        if model not in self._right:
            check_structure(model)
            self._right[model] = attention_configs(model)
        check_implementations(model, self._right[model], self._names)


@torch.compiler.disable
def running_model() -> PreTrainedModel | None:
    """The outermost model of transformers whose forward is under way in this thread."""
    found, frame = None, inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",):
            owner = frame.f_locals.get("self")
            found = owner if isinstance(owner, PreTrainedModel) else found
        frame = frame.f_back
    return found


def check_model(model: PreTrainedModel, plan: PlanArgument) -> None:
    """Refuse a model that can't be spread over the plan's ranks, by its parts and by measuring it.

    Call it on all ranks. The attention refuses by the parts too, once it is called; this also finds a model that never
    calls it (switched to ``sdpa``, say). It runs the model on 8 tokens with an attention by which each token sees
    itself alone: other tokens before it, or another place, must leave a token's hidden state as it is.

    Args:
        model: not sharded yet, on its device.
        plan: as for ``model(..., plan=plan)``. With one rank nothing is refused.

    Raises:
        ValueError: naming the part, on every rank.
    """
    one = Plans.of(plan).one
    if one.world == 1:
        return
    with one.agreement.entering("check_model"):
        check_layers(model.config)
        check_structure(model)
        check_implementations(model, attention_configs(model))
        _check_by_measure(model, plan)
    one.exchange_small([])


def _reason(module: nn.Module) -> str | None:
    """Why a module may let tokens see each other, or place them wrongly; its children are asked by themselves."""
    if hasattr(module, "stock_class"):
        return None  # parallelized: its forward is ours, which runs its body over shards
    if _own_attention(module):
        return "computes its attention itself"
    if _is(module, "CrossAttention") or getattr(module, "is_cross_attention", False):
        return "looks at another sequence"
    if isinstance(module, _TOKENWISE) or _calls_interface(module) or _is(module, "RotaryEmbedding"):
        return None
    if type(module).__module__ == "transformers.activations":
        return None
    if type(module).__module__.startswith("torch.nn."):
        return "is not known to treat each token by itself"
    if _places_tokens(module):
        return "counts positions itself, from its input's start"
    if _KNOWN.search(type(module).__name__) or not _has_own_forward(module) or _is(module, "Attention"):
        return None
    return "is not known to treat each token by itself"


def _is(module: nn.Module, role: str) -> bool:
    return type(module).__name__.endswith(role)


def _own_attention(module: nn.Module) -> bool:
    """Whether it is an attention, and neither it nor a part of it asks transformers which attention to use."""
    return "Attention" in type(module).__name__ and not any(_calls_interface(part) for part in module.modules())


def _calls_interface(module: nn.Module) -> bool:
    return any("ALL_ATTENTION_FUNCTIONS" in names for names in _names_in_code(type(module)))


def _names_in_code(kind: type) -> Iterator[tuple[str, ...]]:
    """The global names and attributes that the methods of a class use."""
    for base in kind.__mro__:
        if base in (PreTrainedModel, nn.Module):
            return
        for value in vars(base).values():
            code = getattr(inspect.unwrap(value), "__code__", None) if callable(value) else None
            if isinstance(code, CodeType):
                yield code.co_names


def _places_tokens(module: nn.Module) -> bool:
    """Whether it embeds positions that it is not given."""
    learned = (name for name, child in module.named_children() if not _is(child, "RotaryEmbedding"))
    return any("position" in name for name in learned) and "position_ids" not in _parameters(module)


def _parameters(module: nn.Module) -> Mapping[str, Any]:
    return inspect.signature(module.forward).parameters


def _has_own_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def attention_configs(model: nn.Module) -> list[Any]:
    """The configurations by which the model's layers choose their attention; mostly it is one."""
    every = [getattr(module, "config", None) for module in model.modules() if _calls_interface(module)]
    return list({id(config): config for config in every if config is not None}.values())


def check_implementations(model: nn.Module, configs: list[Any], names: Sequence[str] = (NAME,)) -> None:
    """Refuse a model some of whose layers ask for another attention."""
    for config in configs:
        if config._attn_implementation not in names:
            raise ValueError(
                f"attn_implementation={config._attn_implementation!r} of layers of {type(model).__name__}: their "
                f"attention would see each rank's shard alone; call model.set_attn_implementation({names[0]!r})"
            )


def _check_by_measure(model: PreTrainedModel, plan: PlanArgument) -> None:
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError("the model's parameters are sharded already; call check_model before fully_shard")
    half, bound = 4, max(1e-4, torch.finfo(model.dtype).eps ** 0.5)
    reached: list[bool] = []
    run = _tokens_apart(model, plan, half, reached)
    once, then = ((torch.arange(half) + start) % model.config.get_text_config().vocab_size for start in (3, 9))
    counted, restarting = torch.arange(2 * half), torch.arange(half).repeat(2)
    plain = run(torch.cat([once, then]), counted)
    others_before = run(torch.cat([once.flip(0), then]), counted)[:, half:]
    elsewhere = run(torch.cat([then, once]), restarting)[:, half:]
    if not reached:
        raise ValueError(
            f"{type(model).__name__} never called the attention {NAME!r}, so each rank would see its shard alone; load "
            f"it with attn_implementation={NAME!r}, and {_ALONE} if it does not ask transformers for its attention"
        )
    apart = max((others_before - plain[:, half:]).abs().max().item(), (elsewhere - plain[:, :half]).abs().max().item())
    if not apart <= bound * plain.abs().max().item():
        raise ValueError(
            f"hidden states of {type(model).__name__} depend on other tokens, or on their place, outside of the "
            f"attention {NAME!r} (by {apart:.0e}), and each rank would see its shard alone; {_ALONE}"
        )


def _tokens_apart(
    model: PreTrainedModel, plan: PlanArgument, half: int, reached: list[bool]
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A function of (token ids, positions), each [2 half], that gives the hidden states [1, 2 half, E] of two documents
    in which each token sees itself alone."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: Plan, *, scale: float | None) -> torch.Tensor:
        reached.append(True)
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)

    def alone(each: Plan) -> Plan:
        return lone_plan(2 * half, mask=replace(each.mask, cu_seqlens=(0, half, 2 * half), prefix=None))

    plans = {key: alone(each) for key, each in plan.items()} if isinstance(plan, Mapping) else alone(plan)

    def run(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        ids, positions = ids[None].to(model.device), positions[None].to(model.device)
        training = [module for module in model.modules() if module.training]
        try:
            with torch.no_grad():
                return model.eval().base_model(
                    input_ids=ids, position_ids=positions, plan=plans, attend=attend, use_cache=False
                )[0]
        finally:
            for module in training:
                module.training = True

    return run
