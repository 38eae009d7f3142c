"""The forward of a model: where its body is, what both take, and whether transformers' code computes the loss."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Mapping
from pathlib import Path
from types import CodeType
from typing import Any

import transformers
from transformers import PreTrainedModel

from ..classes import stock_class

_TRANSFORMERS = Path(transformers.__file__).parent
_ROUTER = ("router_aux_loss_coef", "aux_loss_coef")  # the latter is JetMoE's
_MORE = ("output_attentions", "output_hidden_states", "output_router_logits")  # transformers' own: False asks for none


def body_name(model: Any) -> str:
    """Return the name of a model's body among its modules, or an empty string."""
    children = dict(model.named_children()) if isinstance(model, PreTrainedModel) else {}
    if getattr(model, "base_model_prefix", None) in children:
        return str(model.base_model_prefix)
    embeddings = model.get_input_embeddings() if children else None  # Llama 4's prefix names another model's body
    inside = (n for n, child in children.items() if child is not embeddings and embeddings in [*child.modules()])
    return next(inside, "")


def body_of(model: Any) -> Any:
    """Return a model's body, which makes hidden states of token ids; the model itself if it has none."""
    name = body_name(model)
    return getattr(model, name) if name else model


def taker_of(body: Any) -> Any:
    """Return the module that gets a body's arguments: Bart's body passes everything on to its decoder."""
    while not parameters_in(body).keys() - {"args", "kwargs"} and hasattr(body, "decoder"):
        body = body.decoder
    return body


@functools.cache
def parameters_of(forward: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a class's forward, without ``self``."""
    return {name: each for name, each in inspect.signature(forward).parameters.items() if name != "self"}


def parameters_in(module: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a module's forward, without ``self``."""
    own = vars(module).get("forward")  # may hold the module, so no cache may hold it
    return parameters_of(type(module).forward) if own is None else inspect.signature(own).parameters


def is_default(name: str, value: Any, *forwards: Any) -> bool:
    """Return whether an argument has its default value, in transformers or in the signature of one of the forwards."""
    if name in _MORE and value is False:
        return True
    named = (parameters_of(forward).get(name) for forward in forwards)
    plain = isinstance(value, (bool, int, float, str))
    return plain and any(
        each is not None and type(each.default) is type(value) and each.default == value for each in named
    )


def drops(model: Any, name: str) -> bool:
    """Return whether transformers' forward of a model takes types of tokens by this name, but never reads them."""
    code = stock_forward(model)
    if code is None or not name.endswith("_token_type_ids") or name not in code.co_varnames:
        return False
    if name in code.co_cellvars:  # a function inside reads it
        return False
    reads = (each.argval for each in dis.get_instructions(code) if each.opname.startswith("LOAD_FAST"))
    return not any(name in each if isinstance(each, tuple) else name == each for each in reads)


def has_stock_forward(model: Any) -> bool:
    """Return whether the class's forward is transformers' code and computes its loss by ``loss_function`` alone.

    A router's loss aside, which ``outputs`` adds.
    """
    code = stock_forward(model)
    return code is not None and "loss_function" in code.co_names and not added_losses(model)


def added_losses(model: Any) -> dict[str, float]:
    """Return the factors other than 0 of losses that transformers' forward adds itself, by name.

    An example is Bamba's z-loss. A router's is not among them: only ``output_router_logits`` adds it.
    """
    code = stock_forward(model)
    named = [name for name in code.co_names if "loss" in name and name not in _ROUTER] if code else []
    factors = [name for name in named if name.endswith(("coef", "coefficient", "weight"))]
    values = {name: getattr(model, name, None) or getattr(model.config, name, None) for name in factors}
    return {name: value for name, value in values.items() if value}


def stock_forward(model: Any) -> CodeType | None:
    """Return the code of the class's forward if it is transformers', else None."""
    # The class's name is not enough: a subclass, a decorator or an assignment may replace its forward.
    kind = stock_class(model)
    owner = next(each for each in kind.__mro__ if "forward" in vars(each))
    return _stock_code(vars(owner)["forward"], f"{owner.__qualname__}.forward")


def has_stock_loss(model: Any) -> bool:
    """Return whether the model's loss is transformers' next-token loss."""
    return _stock_code(model.loss_function, "ForCausalLMLoss") is not None


def _stock_code(function: Any, name: str) -> CodeType | None:
    """Return a function's code if transformers defines it under ``name``, and all of its decorators; else None."""
    while True:
        code = getattr(function, "__code__", None)
        if not isinstance(code, CodeType) or _TRANSFORMERS not in Path(code.co_filename).parents:
            return None
        if not hasattr(function, "__wrapped__"):
            return code if code.co_qualname == name else None
        function = function.__wrapped__


def is_decorated(forward: Any, decorator: str) -> bool:
    """Return whether a function has a decorator of transformers, by its name."""
    function = forward
    while function is not None:
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType) and code.co_qualname.startswith(f"{decorator}."):
            return _TRANSFORMERS in Path(code.co_filename).parents
        function = getattr(function, "__wrapped__", None)
    return False


def is_of_class(model: Any, forward: Any) -> bool:
    """Return whether a forward set on the model is its class's, with or without the class's decorators."""
    function, stock = getattr(forward, "__func__", None), type(model).forward
    while stock is not None and stock is not function:
        stock = getattr(stock, "__wrapped__", None)
    return stock is not None and getattr(forward, "__self__", None) is model


def is_fused_by_trl(model: Any, forward: Any) -> bool:
    """Return whether a forward set on the model is TRL's fused head around the class's forward."""
    function = getattr(forward, "__func__", forward)
    names = getattr(function, "__globals__", {})
    if names.get("__name__") != "trl.trainer.utils" or function.__code__.co_name != "_fused_forward":
        return False
    below = inspect.getclosurevars(function).nonlocals.get("original_forward")
    return getattr(below, "__func__", None) is type(model).forward
