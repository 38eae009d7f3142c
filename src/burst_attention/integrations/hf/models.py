"""Check that a model can run on shards: only its attention may mix tokens.

Only the attention exchanges data between ranks, so every other part (projections, norms, experts, rotary angles) must
treat each token independently. A convolution, a recurrence, another attention, or positions counted from the shard's
start would give plausible but wrong numbers. The module ``parts`` refuses parts of unknown classes before anything
runs. ``check_model`` also measures the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from burst_attention.attention.batch import Chunked, PlanArgument, Plans, Reach
from burst_attention.attention.new_plan import single_rank_plan
from burst_attention.attention.plan import Plan
from burst_attention.plan.mask import Mask

from . import converted, known, parts, stub_forward, vision
from .checks import check_rope, running
from .classes import stock_class
from .parts import ALONE, NAME

_OF_ENCODER = ("encoder_attn", "crossattention", "cross_attn")  # names of attentions to another sequence
DOCUMENT = 7  # tokens of a document in the measurement of check_model; a number that sizes of layers rarely have
_CAUSAL_MASKS = known.names("create_causal_mask create_sliding_window_causal_mask")
_BOTH_WAYS = known.names(
    "create_bidirectional_mask create_bidirectional_sliding_window_mask use_bidirectional_attention"
)
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")


def check_config(config: PreTrainedConfig, *, training: bool = True, layout: str = "auto") -> None:
    """Check a configuration without loading the model. Runs in one process.

    Args:
        config: the configuration of a causal language model.
        training: False allows dropout, because evaluation disables it.
        layout: the layout of the tokens, as in ``Strategy``.

    Raises:
        TypeError: ``config`` is no configuration.
        ValueError: the model can't run on shards. The message names the setting, its value and a remedy.
    """
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"config is a {type(config).__name__}; pass a configuration: AutoConfig.from_pretrained(name)")
    text = config.get_text_config(decoder=True)
    for name in _DROPOUTS if training else ():
        if getattr(text, name, None):
            raise ValueError(f"{name}={getattr(text, name)} of the configuration is not supported; set {name}=0.0")
    check_rope(text)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        check_layers(text)
    else:
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        except Exception as error:
            raise ValueError(
                f"transformers can't build it ({type(error).__name__}: {error}); correct config.json"
            ) from error
        check_parts(model.train(training), model, layout)
        check_causal(model)


def check_parts(model: Any, body: Any, layout: str) -> None:
    """Refuse a model that can't run on shards; ``body``: the part that runs there. Dropout may still be turned off."""
    mixer = next(known.mixers_of(model), None)
    if mixer is not None and layout.startswith("striped"):
        raise ValueError(
            f"layout={layout!r} of the strategy separates neighbouring tokens, but {mixer[0]} "
            f"({type(mixer[1]).__name__}) passes a state from token to token; use Strategy(layout='zigzag')"
        )
    text = model.config.get_text_config(decoder=True)  # its class may have turned a decoder into a causal model
    check_layers(text)
    check_rope(text)
    parts.check_structure(body)
    parts.check_exchanges(body)
    parts.check_random(model, body, dropout=False)


def check_layers(config: Any) -> None:
    """Refuse a configuration that lists layers other than self-attention, or whose layers use a window below 1."""
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"is_encoder_decoder=True of the configuration: cross-attention is not supported; {ALONE}")
    for attribute, kinds in known.layer_lists(config):
        for kind in kinds:
            if kind not in known.LAYERS:
                why = known.REFUSED_LAYERS.get(kind, known.OTHER_LAYER)
                raise ValueError(
                    f"{attribute} of the configuration has {kind!r}: {why}, so each rank would see only its shard; "
                    f"{ALONE}"
                )
    for reach in layer_windows(config) if hasattr(config, "num_hidden_layers") else ():
        if isinstance(reach, int) and reach < 1:
            name = "window_size" if hasattr(config, "window_size") else "sliding_window"
            raise ValueError(f"{name}={reach} of the configuration is below 1; set at least 1, or null for none")


def layer_windows(config: Any, *, causal: bool = True) -> list[Reach]:
    """Return each layer's sliding window, in tokens, or its :class:`Chunked`; None for full attention.

    Args:
        causal: whether the layers are. In a configuration of others the window is the largest distance.
    """
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    kinds = kinds or ["sliding_attention"] * config.num_hidden_layers
    windows = by_layer(config, "sliding_window", len(kinds))
    unused = getattr(config, "model_type", None) in known.WITHOUT_WINDOW
    if unused or getattr(config, "use_sliding_window", True) is False:
        windows = [None] * len(kinds)
    chunk = getattr(config, "attention_chunk_size", None)
    reaches: dict[str, Reach] = {known.CHUNKED: Chunked(chunk) if chunk else None}
    reaches["local"] = getattr(config, "window_size", None)  # GPT Neo
    # A bidirectional mask of transformers names the largest distance, Gemma 3's own the first one beyond.
    beyond = not causal and not (
        getattr(config, "use_bidirectional_attention", None) is True and getattr(config, "is_causal", True)
    )
    sliding = [None if window is None else window + beyond for window in windows]
    pairs = zip(kinds, sliding, strict=True)
    return [window if kind == "sliding_attention" else reaches.get(kind) for kind, window in pairs]


def attention_windows(model: Any) -> list[Reach]:
    """Return what each attention of a causal language model sees, by layer: a window, a :class:`Chunked`, or None.

    A layer without an attention has no entry, and one with several has as many.
    """
    body = vision.text_of(model)
    lists = [part for part in body.modules() if isinstance(part, nn.ModuleList)]
    layers = [x for part in lists if all(isinstance(x, GradientCheckpointingLayer) for x in part) for x in part]
    reaches = layer_windows(model.config.get_text_config(decoder=True))
    if len(reaches) != len(layers):
        reaches = [None] * len(layers)
    counts = [sum(parts.attends(part) for part in layer.modules()) for layer in layers]
    return [reach for reach, count in zip(reaches, counts, strict=True) for _ in range(count)]


def recurrent_layers(model: nn.Module) -> dict[str, str]:
    """Return the layers of a model that pass a state from token to token, by name: which mechanism they have."""
    return {name: str(known.mechanism(mixer)) for name, mixer in known.mixers_of(model)}


def by_layer(config: Any, name: str, count: int = 1) -> list[Any]:
    """Return a setting ``count`` times, None where there is none; of each layer if the layers differ in it."""
    if name in (getattr(config, "per_layer_attributes", None) or ()):
        return [getattr(each, name, None) for each in config.per_layer_config]
    return [getattr(config, name, None)] * count


def windows_of(model: Any, *, causal: bool) -> list[Reach]:
    """Return :func:`layer_windows` of a model."""
    return layer_windows(model.config.get_text_config(decoder=True), causal=causal)


def is_causal(body: nn.Module) -> bool:
    """Return whether the attention of a model's layers is causal, as they state; each call is compared with that."""
    attentions = {name: each for name, each in body.named_modules() if parts.attends(each)}
    own = {name: each for name, each in attentions.items() if name.split(".")[-1] not in _OF_ENCODER}
    stated = {name: known.states_causal(each) for name, each in own.items()}
    config, kind = getattr(body, "config", None), type(body).__name__
    used = _mask_names(body)
    if not getattr(config, "is_causal", True) and (used & _CAUSAL_MASKS or any(stated.values())):
        if reason := _reason_against_encoding(body, own):
            raise ValueError(f"is_causal=False of the configuration: {reason}; leave it out, or {ALONE}")
        return False
    for name in [name for name, causal in stated.items() if not causal]:
        if getattr(config, "is_decoder", False):
            raise ValueError(
                f"{name} of {kind} says is_causal=False, but the configuration is_decoder=True, so its mask is not "
                f"certain; {ALONE}"
            )
        if used & _CAUSAL_MASKS and not used & _BOTH_WAYS:
            raise ValueError(
                f"{name} of {kind} says is_causal=False, but {kind} makes causal masks, which only some of "
                f"transformers' attentions read; unset use_bidirectional_attention, or {ALONE}"
            )
    if len({*stated.values()}) < 2:
        return all(stated.values())
    names = [next(name for name, causal in stated.items() if causal is each) for each in (True, False)]
    raise ValueError(f"{names[0]} of {kind} is causal, but {names[1]} is not; {ALONE}")


def check_causal(model: Any) -> bool:
    """Return whether plans are causal. A vision-language model's own masks add the groups that see each other."""
    body = vision.text_of(model)
    if vision.language_model_of(model) is None:
        return is_causal(body)
    used = "use_bidirectional_attention" in _mask_names(body) and body.config.use_bidirectional_attention
    if used or not getattr(body.config, "is_causal", True):
        raise ValueError(
            f"{type(body).__name__} is bidirectional by its configuration (use_bidirectional_attention, is_causal), "
            f"which is not supported inside {type(model).__name__}; {ALONE}"
        )
    return True


def _reason_against_encoding(body: nn.Module, attentions: Mapping[str, nn.Module]) -> str | None:
    """Return why a body may not be as its configuration's ``is_causal=False`` says, or None."""
    kind = type(body).__name__
    if mixer := next(known.mixers_of(body), None):
        return f"{mixer[0]} of {kind} passes a state from token to token"
    if any(known.CHUNKED in kinds for _, kinds in known.layer_lists(body.config)):
        return f"chunked layers of {kind} stay causal"
    for name, attention in attentions.items():
        if known.gets_no_keywords(attention):
            return f"{name} of {kind} does not get it"
    forward = stock_class(stub_forward.taker_of(body)).forward
    if not (_mask_names(body) & _CAUSAL_MASKS and stub_forward.is_decorated(forward, "merge_with_config_defaults")):
        return f"{kind} is not known to follow it"
    return None


def _mask_names(body: nn.Module) -> frozenset[str]:
    """Return the global names and attributes in the forward of a body, whose masks follow from them."""
    return known.code_names(stock_class(stub_forward.taker_of(body)).forward)


def embeds_positions(model: Any) -> bool:
    """Return whether a model has learned positions: a table that token ids don't index."""
    of_tokens = set(model.get_input_embeddings().modules())  # an adapter may wrap the embeddings and copy them
    for name, table in model.named_modules():
        by_ids = any(part.startswith("embed_tokens") for part in name.split("."))  # Gemma has one for each layer
        if isinstance(table, nn.Embedding) and table not in of_tokens and not by_ids:
            return True
    return False


def is_rotary(model: nn.Module) -> bool:
    """Return whether a model turns queries and keys by their positions."""
    return any(known.is_called(module, "RotaryEmbedding") for module in model.modules())


def depends_on_places(model: Any) -> bool:
    """Return whether a token's place matters, not only its distance to others: learned positions, growing scales."""
    config = model.config.get_text_config(decoder=True)
    scaled = getattr(config, "attn_temperature_tuning", None)
    scaled = scaled or "llama_4_scaling_beta" in str(getattr(config, "rope_parameters", None))
    return bool(scaled) or not is_rotary(model) or embeds_positions(model)


@torch.compiler.disable
def running_model() -> PreTrainedModel | None:
    """Return the outermost transformers model on this thread's call stack, or None: layers have no reference to it."""
    methods, frame = [], inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",):
            methods.append(frame)
        frame = frame.f_back
    owners = (each.f_locals.get("self") for each in reversed(methods))  # f_locals copies a frame, so read few of them
    return next((owner for owner in owners if isinstance(owner, PreTrainedModel)), None)


def check_model(model: PreTrainedModel, plan: PlanArgument) -> None:
    """Check by its parts and by measurement that a model can run on shards. Call it on all ranks.

    The attention also checks the parts, in its first call. ``check_model`` also finds models that never call it (for
    example, switched to ``sdpa``).

    The measurement runs the model with an attention in which each token sees only itself. Then other tokens, another
    place, more or fewer tokens on either side, and values ten times as large at other tokens must not change a token's
    hidden state. If the model is in training mode, it also runs in that mode, with ``nn.Dropout`` disabled. A repeated
    run detects random values.

    Args:
        model: the model on its device, not sharded yet.
        plan: as for ``model(..., plan=plan)``. With one rank nothing is checked.

    Raises:
        ValueError: the model can't run on shards; on every rank. The message names the part.
    """
    one = Plans.of(plan).one
    if one.world == 1:
        return
    with one.agreement.entering("check_model"):
        check_layers(model.config)
        parts.check_structure(model)
        parts.check_hooks(model)
        parts.check_implementations(model, parts.attention_configs(model))
        with converted.converted(model):
            _check_by_measure(model, plan)
    one.exchange_small([])


def _check_by_measure(model: PreTrainedModel, plan: PlanArgument) -> None:
    """Compare hidden states in evaluation, and in training mode if the model is in it."""
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError("the model's parameters are already sharded; call check_model before fully_shard")
    modes = {module: module.training for module in model.modules()}
    reached = [True] if converted.hands_plans(model) else []
    run = _tokens_apart(model, plan, reached)
    try:
        for training in sorted({False, model.training}):
            model.train(training)
            for module in model.modules():
                if type(module) is nn.Dropout:  # a call over ranks refuses it
                    module.eval()
            _measure(model, run, reached)
    finally:
        for module, mode in modes.items():
            module.training = mode


def _measure(model: PreTrainedModel, run: Callable[..., _Run], reached: list[bool]) -> None:
    """Compare the hidden states of short documents, each alone and beside others."""
    # A statistic of all tokens (maximum, mean, norm, threshold) may be the same for a permutation of the tokens, or be
    # set by the tokens that are compared. So the others have other ids, and once ten times as large values.
    bound, base = max(1e-4, torch.finfo(model.dtype).eps ** 0.5), [0, 1]
    plain, again, counted = run(base), run(base), run(base, counted=True)
    alone = dict(counted.quiet + plain.quiet)
    beside = {
        "other tokens": [counted, run([2, 1]), run([0, 3]), run([2, 1], counted=True)],
        "their place": [run([1, 0])],
        "the number of tokens": [run([0]), run([1]), run([2, 3, 0, 1]), run([0] * 8), run([1, 0, 2, 2, 2])],
        "the size of other tokens' values": [run(base, loud=1), run(base, loud=0), run([2, 0, 1], loud=0)],
    }
    if not reached:
        raise ValueError(
            f"{type(model).__name__} never called the attention {NAME!r}, so each rank would see only its shard; load "
            f"it with attn_implementation={NAME!r}. If it ignores that argument, {ALONE}"
        )
    most = bound * plain.states.abs().max().item()
    if not (random := _apart(again.states, plain.states)) <= most:
        raise ValueError(
            f"hidden states of {type(model).__name__} differ from run to run (by {random:.0e}) without nn.Dropout: "
            f"some part draws random values, different on each rank; set its rate to 0, or {ALONE}"
        )
    for what, runs in beside.items():
        apart = [_apart(states, alone[key]) for found in runs for key, states in found.quiet if key in alone]
        if wrong := [each for each in apart if not each <= most]:  # so written, a NaN counts as wrong
            raise ValueError(
                f"hidden states of {type(model).__name__} depend on {what} outside of the attention {NAME!r} (by "
                f"{max(wrong):.0e}), and each rank would see only its shard; {ALONE}"
            )


def _apart(x: torch.Tensor, y: torch.Tensor) -> float:
    return (x - y).abs().max().item()


class _Run(NamedTuple):
    """The hidden states [1, 7 n, E] of n documents, and ((document, its position), states) of those not loud."""

    states: torch.Tensor
    quiet: list[tuple[tuple[int, int], torch.Tensor]]


def _tokens_apart(model: PreTrainedModel, plan: PlanArgument, reached: list[bool]) -> Callable[..., _Run]:
    """Return a function that runs the model on documents of 7 tokens, where each token sees only itself."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: Plan, **options: Any) -> torch.Tensor:
        reached.append(True)
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)

    def alone(each: Plan, length: int) -> Plan:
        documents = tuple(range(0, length + 1, DOCUMENT))
        return single_rank_plan(length, mask=Mask(each.mask.causal, each.mask.window, documents))

    def run(documents: list[int], *, counted: bool = False, loud: int | None = None) -> _Run:
        """``documents``: numbers that give ids. ``counted``: positions go on. ``loud``: layers get it times ten."""
        within, vocabulary = torch.arange(DOCUMENT), model.config.get_text_config().vocab_size
        ids = torch.cat([(within + 3 + 8 * n) % vocabulary for n in documents])[None].to(model.device)
        positions = torch.arange(ids.shape[1]) if counted else within.repeat(len(documents))
        positions = positions[None].to(model.device)
        plans: Any = {key: alone(each, ids.shape[1]) for key, each in Plans.of(plan).items()}
        plans = Plans(Plans.of(plans), positions=positions)  # as a parallelized model's plans
        given = {"input_ids": ids, "position_ids": positions, "plan": plans, "attend": attend, "use_cache": False}
        with torch.no_grad(), running(plans), _loudly(model, ids.shape[1], loud):
            states = stub_forward.run_body(stub_forward.body_of(model), **given)[0]
        keys = [(document, DOCUMENT * n * counted) for n, document in enumerate(documents)]
        each = enumerate(zip(keys, states.split(DOCUMENT, 1), strict=True))
        return _Run(states, [pair for n, pair in each if n != loud])

    return run


@contextmanager
def _loudly(model: nn.Module, length: int, loud: int | None) -> Iterator[None]:
    """Multiply one document's rows by ten in the input of every layer without layers inside."""

    def louder(x: Any) -> Any:
        if loud is None or not isinstance(x, torch.Tensor) or not x.is_floating_point():
            return x
        if x.shape[:-1] not in ((1, length), (length,)):
            return x
        factor = x.new_ones(length, 1)
        factor[DOCUMENT * loud : DOCUMENT * (loud + 1)] = 10
        return x * factor

    def before(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        return tuple(map(louder, given)), {name: louder(x) for name, x in named.items()}

    leaves = [] if loud is None else [each for each in model.modules() if not [*each.children()]]
    handles = [each.register_forward_pre_hook(before, with_kwargs=True) for each in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
