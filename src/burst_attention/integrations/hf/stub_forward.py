"""Run a model's own forward with other results for its modules; detect custom forwards and losses."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from .classes import stock_class

_TRANSFORMERS = Path(transformers.__file__).parent
_ALONE = "run the model without hf.parallelize"
_ROUTER = ("router_aux_loss_coef", "aux_loss_coef")  # the latter is JetMoE's
_SILENT = ("use_cache", "return_dict")  # keywords of a body that don't change its results
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
    while not _parameters(body).keys() - {"args", "kwargs"} and hasattr(body, "decoder"):
        body = body.decoder
    return body


@functools.cache
def parameters_of(forward: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a class's forward, without ``self``."""
    return {name: each for name, each in inspect.signature(forward).parameters.items() if name != "self"}


def _parameters(module: Any) -> Mapping[str, inspect.Parameter]:
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


def run_body(body: Any, **given: Any) -> Any:
    """Call a model's body with those arguments that its forward takes."""
    return body(**taken(body, given))


def taken(body: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return those arguments that a body's forward takes."""
    names = _parameters(taker_of(body))
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in names.values()):
        return given
    return {name: value for name, value in given.items() if name in names}


def has_stock_forward(model: Any) -> bool:
    """Return whether the class's forward is transformers' code and computes its loss by ``loss_function`` alone.

    A router's loss aside, which ``outputs`` adds.
    """
    code = _stock_forward(model)
    return code is not None and "loss_function" in code.co_names and not added_losses(model)


def added_losses(model: Any) -> dict[str, float]:
    """Return the factors other than 0 of losses that transformers' forward adds itself, by name.

    An example is Bamba's z-loss. A router's is not among them: only ``output_router_logits`` adds it.
    """
    code = _stock_forward(model)
    named = [name for name in code.co_names if "loss" in name and name not in _ROUTER] if code else []
    factors = [name for name in named if name.endswith(("coef", "coefficient", "weight"))]
    values = {name: getattr(model, name, None) or getattr(model.config, name, None) for name in factors}
    return {name: value for name, value in values.items() if value}


def is_stock(model: Any) -> bool:
    """Return whether the class's forward is transformers' code."""
    return _stock_forward(model) is not None


def _stock_forward(model: Any) -> CodeType | None:
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
    function, known = getattr(forward, "__func__", None), type(model).forward
    while known is not None and known is not function:
        known = getattr(known, "__wrapped__", None)
    return known is not None and getattr(forward, "__self__", None) is model


def is_fused_by_trl(model: Any, forward: Any) -> bool:
    """Return whether a forward set on the model is TRL's fused head around the class's forward."""
    function = getattr(forward, "__func__", forward)
    names = getattr(function, "__globals__", {})
    if names.get("__name__") != "trl.trainer.utils" or function.__code__.co_name != "_fused_forward":
        return False
    below = inspect.getclosurevars(function).nonlocals.get("original_forward")
    return getattr(below, "__func__", None) is type(model).forward


def twin_of(model: Any, stand_ins: Mapping[str, Callable[..., Any]]) -> Any:
    """Return a second object of the model's class, with some modules replaced by other callables, by name."""
    kind = stock_class(model)
    twin = object.__new__(kind)
    twin.__dict__.update(model.__dict__)
    twin.__dict__["_modules"] = {name: child for name, child in model._modules.items() if name not in stand_ins}
    twin.__dict__.update(stand_ins)
    twin.__dict__["forward"] = kind.forward.__get__(twin)  # the class's, even if the model's was replaced
    return twin


def router_loss(model: Any, router_logits: Any, attention_mask: Tensor | None) -> Tensor:
    """Compute the auxiliary loss of a mixture of experts from each layer's logits [tokens, experts]."""
    head = next(name for name, child in model.named_children() if child is model.get_output_embeddings())
    body = MoeModelOutputWithPast(last_hidden_state=router_logits[0].new_zeros(1, 1, 1), router_logits=router_logits)
    twin = twin_of(model, {body_name(model): lambda **_: body, head: lambda hidden: hidden})
    return twin.forward(attention_mask=attention_mask, output_router_logits=True).aux_loss


class Around:
    """Runs a parallelized model's own forward around its body, which it must call once, on the arguments ``batch``."""

    def __init__(self, model: Any, given: Mapping[str, Any], batch: tuple[str, ...], *, router: bool) -> None:
        self._model, self._given, self._router = model, given, router
        tensors = {name: given[name] for name in batch if isinstance(given.get(name), Tensor)}
        self._batch = {name: value.clone() for name, value in tensors.items()}  # a forward may write into them
        self._kind = stock_class(model).__name__

    def run(self, body: Callable[[], Any], entering: Callable[[], Any], *, keep: bool = True) -> Any:
        """Run the forward on the body's results; ``keep``: attributes that it sets stay. ``entering`` guards checks."""
        prefix, states = body_name(self._model), [random_states(self._model)]

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            with entering():
                self._check(args, kwargs, again=len(states) > 1)
                self._check_random(states[-1])
            results = body()
            states.append(random_states(self._model))
            return results

        twin = twin_of(self._model, {prefix: StandIn(self._model._modules[prefix], stand_in)})
        out = twin.forward(**self._given)
        self._check_random(states[-1])
        if len(states) < 2:
            raise ValueError(f"{self._kind}.forward never calls its {prefix}; {_ALONE}")
        own, replaced = vars(self._model), ("_modules", "forward", prefix)
        set_by_it = {name: value for name, value in vars(twin).items() if name not in replaced}
        own.update(set_by_it if keep else {})
        return out

    def _check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, again: bool) -> None:
        """Refuse a second call of the body, or a call with another batch."""
        prefix = body_name(self._model)
        if again:
            raise ValueError(f"{self._kind}.forward calls its {prefix} twice; call it once, or {_ALONE}")
        names = list(_parameters(taker_of(self._model._modules[prefix])))
        asked = dict(zip(names, args, strict=False)) | dict(kwargs)
        wrong = [name for name, value in asked.items() if not self._is_given(name, value)]
        unread = {"position_ids"} - set(names)  # a body without positions; the plan has the documents
        matter = self._batch.keys() - unread
        if "attention_mask" in matter and bool(self._batch["attention_mask"].all()):
            matter -= {"attention_mask"}
        wrong += [name for name in matter if asked.get(name) is None]
        if wrong:
            raise ValueError(
                f"{self._kind}.forward calls its {prefix} with another {wrong[0]} than it got; pass that, or {_ALONE}"
            )

    def _is_given(self, name: str, value: Any) -> bool:
        if value is None or name in _SILENT:
            return True
        if name in self._batch:
            return isinstance(value, Tensor) and torch.equal(value, self._batch[name])
        if name == "output_router_logits":
            return bool(value) == self._router
        body = taker_of(self._model._modules[body_name(self._model)])
        forwards = stock_class(self._model).forward, stock_class(body).forward
        return value is self._given.get(name) or (name not in self._given and is_default(name, value, *forwards))

    def _check_random(self, before: list[Tensor]) -> None:
        """Refuse random values, which differ between ranks or repeat on all of them."""
        if any(not torch.equal(a, b) for a, b in zip(before, random_states(self._model), strict=True)):
            raise ValueError(
                f"{self._kind}.forward, or its loss function, draws random values, which differ between ranks; "
                f"remove them (set dropout to 0), or {_ALONE}"
            )


class StandIn:
    """A stand-in for a module: another call, but the attributes of the real module. Its decoder is the stand-in too."""

    def __init__(self, real: nn.Module, call: Callable[..., Any]) -> None:
        self._real, self._call = real, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        alone = [*self._real.children()] == [value]  # OPT's head calls its body's decoder
        return self if isinstance(value, nn.Module) and (alone or value is taker_of(self._real)) else value


class Output(tuple):
    """A body's output: ``[0]``, ``last_hidden_state`` and ``logits`` are one tensor, other attributes None."""

    last_hidden_state: Tensor
    logits: Tensor

    def __new__(cls, first: Tensor) -> Output:
        self = super().__new__(cls, (first,))
        self.last_hidden_state = self.logits = first
        return self

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def random_states(model: Any) -> list[Tensor]:
    """Return the states of torch's default random generators on the CPU and the model's device."""
    states, device = [torch.get_rng_state()], model.device
    if device.type not in ("cpu", "meta"):
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


def tensors_of(out: Any) -> Iterator[Tensor]:
    """Yield all tensors in the output of a forward: a tensor, or nested mappings, tuples and lists."""
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, (Mapping, tuple, list)):
        for each in out.values() if isinstance(out, Mapping) else out:
            yield from tensors_of(each)


def mapped(out: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``change`` to each tensor with a gradient in the output of a forward, and return the output."""
    if isinstance(out, Tensor):
        return change(out) if out.requires_grad else out
    if isinstance(out, Mapping):
        for name in out:
            out[name] = mapped(out[name], change)  # type: ignore[index]  # transformers' outputs are dicts
        return out
    if type(out) in (tuple, list):
        return type(out)(mapped(each, change) for each in out)
    return out
