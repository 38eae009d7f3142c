"""Other values for the settings of a configuration: what a user's config.json might say instead."""

import ast
import dataclasses
import functools
import inspect
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.configuration_utils import ALLOWED_ATTN_LAYER_TYPES, ALLOWED_MLP_LAYER_TYPES

from tests.tools import families

# Settings that no forward depends on, or that say which outputs a caller wants and in which form.
IGNORED = {
    *("transformers_version", "architectures", "dtype", "id2label", "label2id", "problem_type", "name_or_path"),
    *("return_dict", "quantization_config", "bos_token_id", "eos_token_id", "initializer_range", "num_labels"),
    *("per_layer_config", "is_heterogeneous", "rope_scaling", "rope_theta", "_name_or_path", "model_type"),
}
# Settings that any configuration may have, and that code outside of its modeling file reads.
COMMON: Mapping[str, Any] = {
    **dict.fromkeys(("is_causal", "use_cache", "tie_word_embeddings"), True),
    **dict.fromkeys(("is_decoder", "add_cross_attention", "is_encoder_decoder"), False),
    **dict.fromkeys(("output_attentions", "output_hidden_states"), False),
    "chunk_size_feed_forward": 0,
}
_PARTS = ("attn_config", "ffn_config")  # parts of a configuration whose fields are settings of the language model
_SHORTER = {"max_position_embeddings": 16}  # than the batch, so that "dynamic" is another
_SHORT = {"original_max_position_embeddings": 16}
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0} | _SHORT,
    {"rope_type": "yarn", "factor": 4.0} | _SHORT,
    {"rope_type": "longrope", "factor": 4.0} | _SHORT,
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | _SHORT,
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "default", "rope_theta": 100.0},
)
SIZED = {*families.SIZES, *families.SMALL}  # settings of which 0 is no value
PATTERN = 4  # layers of a tiny model


def settings_of(config: PreTrainedConfig, model_class: Any) -> dict[str, list[dict[str, Any]]]:
    """Return what to set for each setting, by name: those of the class, and those that its modeling file reads."""
    files = [sys.modules[type(config).__module__], sys.modules[model_class.__module__]]
    compared = _merged(map(_literals, files))
    read = dict(pair for file in files for pair in _read(file).items())
    hints = {each.name: str(each.type) for each in dataclasses.fields(config)}
    names = {**dict.fromkeys(hints), **read, **COMMON}
    found = {}
    for name, default in names.items():
        if name in IGNORED or name.startswith("_") or (name.endswith("_config") and name not in _PARTS):
            continue
        if name in _varying(config):
            continue
        value = getattr(config, name, default)
        if isinstance(value, PreTrainedConfig) and name in _PARTS:
            value = {each.name: getattr(value, each.name) for each in _own_fields(value)}
        if isinstance(value, PreTrainedConfig) or callable(value):
            continue
        optional = [None] if value is not None and "None" in hints.get(name, "") else []
        moved = optional + _moved(name, value, hints.get(name, ""), compared.get(name, set()), config)
        moved = [each for n, each in enumerate(moved) if each != value and each not in moved[:n]]
        if name == "sliding_window" and value and hasattr(config, "is_heterogeneous"):
            found["per_layer_config"] = [{"per_layer_config": {1: {name: each}}} for each in (value + 2, None)]
        if name in ("num_hidden_layers", "n_layer"):
            found[name] = [{name: each} | _lists_of(config, value, each) for each in (2 * value, value // 2)]
        elif moved:
            found[name] = [{name: each} | _needed(each, config) for each in moved]
    return found


def _varying(config: PreTrainedConfig) -> Collection[str]:
    """The fields that differ between layers: a configuration has no one value of them."""
    return getattr(config, "per_layer_attributes", None) or ()


def _needed(value: Any, config: PreTrainedConfig) -> dict[str, Any]:
    """What a value needs beside it."""
    if "dynamic" in str(value):
        return _SHORTER
    if isinstance(value, list) and "sliding_attention" in value and getattr(config, "sliding_window", 0) is None:
        used = {"use_sliding_window": True} if hasattr(config, "use_sliding_window") else {}
        return {"sliding_window": families.WINDOW} | used
    return {}


def _lists_of(config: PreTrainedConfig, now: int, then: int) -> dict[str, Any]:
    """The lists with an entry for each layer, for another number of layers."""
    names = [each.name for each in dataclasses.fields(config) if each.name not in _varying(config)]
    lists = {name: getattr(config, name) for name in names}
    found = {name: [*x] for name, x in lists.items() if isinstance(x, (list, tuple)) and len(x) == now}
    return {name: (2 * x)[:then] for name, x in found.items()}


def _own_fields(config: PreTrainedConfig) -> Iterator[Any]:
    """The fields that a class adds to those of any configuration."""
    common = {each.name for each in dataclasses.fields(PreTrainedConfig)}
    return (each for each in dataclasses.fields(config) if each.name not in common)


def _moved(name: str, value: Any, hint: str, compared: set[Any], config: Any) -> list[Any]:
    options = [*re.findall(r"'(\w+)'", hint.removeprefix("<class '")), *sorted(x for x in compared if type(x) is str)]
    if name == "pad_token_id":
        return [5]  # a token of the batch
    if isinstance(value, bool):
        return [not value, *options]
    if isinstance(value, int):
        exact = [x for x in compared if isinstance(x, int) and not isinstance(x, bool)]
        least = 1 if name in SIZED else min(0, value)
        return [x for x in (0, value * 2, value // 2, value + 1, value - 1, 1, 2, 3, *exact) if x >= least]
    if isinstance(value, float):
        return [value * (1.5 if value > 1e-3 else 1e4) + (0.5 if value == 0 else 0.0), 0.0]
    if isinstance(value, str):
        return (["gelu", "silu"] if value in ACT2FN else []) + options
    if isinstance(value, Mapping):
        return [*_of_rope(value)] if "rope" in name else [*_of_leaves(value)]
    if isinstance(value, (list, tuple)):
        return [*_of_list([*value], options, compared, config)]
    if value is None:
        return _of_nothing(name, hint, options, config)
    return []


def _of_nothing(name: str, hint: str, options: list[str], config: Any) -> list[Any]:
    """Values for a setting that is None, by its annotation."""
    kinds = {*re.findall(r"\w+", re.sub(r"(list|tuple|dict)\[[^|]*\]", r"\1", hint))} or {"bool", "int"}
    found: list[Any] = [*options]
    found += [True] if "bool" in kinds else []
    found += [5, 2, 4, 8] if "int" in kinds else []
    found += [0.5, 2.0, 30.0] if "float" in kinds else []
    found += [*_of_rope({})] if "rope" in name else []
    if "list" in kinds or "tuple" in kinds:
        found += [[*options, *options][:2] * (PATTERN // 2)] if options else []
        found += [[0, 1] * (PATTERN // 2), [1, 0] * (PATTERN // 2), [1, 3]]
    return found


def _of_list(value: list[Any], options: list[str], compared: set[Any], config: Any) -> Iterator[list[Any]]:
    if not value:
        yield from ([0], [1], [1, 3])
    elif all(isinstance(x, str) for x in value):
        for kind in sorted(_kinds_of_layers(value, config) or {*options, *value}):
            yield [kind] * len(value)
            yield [kind, value[-1]] * (len(value) // 2) + value[: len(value) % 2]
            yield value[:1] + [kind] * (len(value) - 1)
    elif all(isinstance(x, (bool, int, float)) for x in value):
        yield value[::-1]
        for n in (0, 1):
            moved = [_moved("", x, "", compared, config)[n : n + 1] or [x] for x in value]
            yield [each[0] for each in moved]
            yield [each[0] if n % 2 else x for n, (each, x) in enumerate(zip(moved, value, strict=True))]


def _kinds_of_layers(value: list[str], config: Any) -> set[str]:
    """The kinds of layers that the family's modeling file may name; none if the list is of something else."""
    if {*value} <= {*ALLOWED_MLP_LAYER_TYPES}:
        return {*ALLOWED_MLP_LAYER_TYPES}
    if not {*value} <= {*ALLOWED_ATTN_LAYER_TYPES}:
        return set()
    file = sys.modules.get(type(config).__module__.replace(".configuration_", ".modeling_"))
    return {*value, *((_strings(file) if file else set()) & {*ALLOWED_ATTN_LAYER_TYPES})}


def _of_rope(value: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Other rotary frequencies; where each kind of layer has its own, those of one kind."""
    nested = [name for name, inner in value.items() if isinstance(inner, Mapping)]
    for rope in ROPES:
        if not nested:
            yield _with_factors({**value} | {"rope_theta": value.get("rope_theta", 10000.0)} | rope)
        for name in nested:
            inner = value[name]
            yield {**value, name: _with_factors({**inner} | {"rope_theta": inner.get("rope_theta", 1e4)} | rope)}
    for moved in _of_leaves(value):
        if not {"rope_type", "rope_theta"} & {name for name in moved if moved[name] != value[name]}:
            yield moved


def _with_factors(rope: dict[str, Any]) -> dict[str, Any]:
    """A "longrope" with a factor for each frequency of a head of 16, or of its turned part of 8."""
    if rope["rope_type"] != "longrope":
        return rope
    return rope | {"short_factor": [1.0] * 8, "long_factor": [1.0, 1.5] * 4}


def _of_leaves(value: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            for moved in _of_leaves(inner):
                yield {**value, name: moved}
        elif isinstance(inner, (bool, int, float)):
            yield {**value, name: _moved(name, inner, "", set(), None)[0]}


@functools.cache
def _tree(file: Any) -> ast.Module:
    return ast.parse(inspect.getsource(file))


@functools.cache
def _strings(file: Any) -> set[str]:
    return {each.value for each in ast.walk(_tree(file)) if isinstance(each, ast.Constant) and type(each.value) is str}


@functools.cache
def _literals(file: Any) -> dict[str, set[Any]]:
    """The constants that a file compares each attribute with."""
    found: dict[str, set[Any]] = {}
    for each in ast.walk(_tree(file)):
        if not isinstance(each, ast.Compare):
            continue
        sides = [each.left, *each.comparators]
        names = {side.attr for side in map(_bare, sides) if isinstance(side, ast.Attribute)}
        constants = [x for side in sides for x in ast.walk(side) if isinstance(x, ast.Constant)]
        for name in names:
            found.setdefault(name, set()).update(x.value for x in constants if isinstance(x.value, (str, int)))
    return found


def _bare(node: ast.AST) -> ast.AST:
    """An expression without its index: ``config.layer_types`` of ``config.layer_types[i]``."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node


@functools.cache
def _read(file: Any) -> dict[str, Any]:
    """The attributes of configurations that a file reads, with the defaults that it states."""
    found: dict[str, Any] = {}
    for each in ast.walk(_tree(file)):
        if isinstance(each, ast.Attribute) and _is_config(each.value):
            found.setdefault(each.attr, None)
        elif isinstance(each, ast.Call) and getattr(each.func, "id", "") == "getattr" and _is_config(each.args[0]):
            name, default = each.args[1], each.args[2] if len(each.args) > 2 else None
            if isinstance(name, ast.Constant):
                found[name.value] = default.value if isinstance(default, ast.Constant) else None
    return found


def _is_config(node: ast.AST) -> bool:
    return getattr(node, "id", getattr(node, "attr", "")) in ("config", "text_config")


def _merged(every: Any) -> dict[str, set[Any]]:
    found: dict[str, set[Any]] = {}
    for each in every:
        for name, values in each.items():
            found.setdefault(name, set()).update(values)
    return found
