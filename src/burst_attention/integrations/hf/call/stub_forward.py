"""Run a model's own forward with other results for its modules; detect custom forwards and losses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..classes import stock_class
from ..reading.forwards import body_name, is_default, parameters_in, taker_of

_ALONE = "run the model without hf.parallelize"
_SILENT = ("use_cache", "return_dict")  # keywords of a body that don't change its results


def run_body(body: Any, **inputs: Any) -> Any:
    """Call a model's body with those arguments that its forward takes."""
    return body(**taken(body, inputs))


def taken(body: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return those arguments that a body's forward takes."""
    names = parameters_in(taker_of(body))
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in names.values()):
        return inputs
    return {name: value for name, value in inputs.items() if name in names}


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
    body = Output(router_logits[0].new_zeros(1, 1, 1))
    body.router_logits = router_logits
    twin = twin_of(model, {body_name(model): lambda **_: body, head: lambda hidden: hidden})
    return twin.forward(attention_mask=attention_mask, output_router_logits=True).aux_loss


class Around:
    """Runs a parallelized model's own forward around its body, which it must call once, on the arguments ``batch``."""

    def __init__(self, model: Any, inputs: Mapping[str, Any], batch: tuple[str, ...], *, router: bool) -> None:
        self._model, self._inputs, self._router = model, inputs, router
        tensors = {name: inputs[name] for name in batch if isinstance(inputs.get(name), Tensor)}
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
        out = twin.forward(**self._inputs)
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
        names = list(parameters_in(taker_of(self._model._modules[prefix])))
        passed = dict(zip(names, args, strict=False)) | dict(kwargs)
        wrong = [name for name, value in passed.items() if not self._is_same(name, value)]
        unread = {"position_ids"} - set(names)  # a body without positions; the plan has the documents
        matter = self._batch.keys() - unread
        if "attention_mask" in matter and bool(self._batch["attention_mask"].all()):
            matter -= {"attention_mask"}
        wrong += [name for name in matter if passed.get(name) is None]
        if wrong:
            raise ValueError(
                f"{self._kind}.forward calls its {prefix} with another {wrong[0]} than it got; pass that, or {_ALONE}"
            )

    def _is_same(self, name: str, value: Any) -> bool:
        if value is None or name in _SILENT:
            return True
        if name in self._batch:
            return isinstance(value, Tensor) and torch.equal(value, self._batch[name])
        if name == "output_router_logits":
            return bool(value) == self._router
        body = taker_of(self._model._modules[body_name(self._model)])
        forwards = stock_class(self._model).forward, stock_class(body).forward
        return value is self._inputs.get(name) or (name not in self._inputs and is_default(name, value, *forwards))

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
    """A body's output: ``[0]``, ``last_hidden_state`` and ``logits`` are one tensor, other attributes None or given."""

    last_hidden_state: Tensor
    logits: Tensor
    router_logits: Any

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
