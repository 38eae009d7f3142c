"""Check that an attention computes the same in chunks of heads (:mod:`.head_chunks`). Each check raises ValueError."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from burst_attention.attention.new_plan import single_rank_plan
from burst_attention.plan.mask import Mask

from ..reading import read
from ..reading.attached import hooks_of, origin_of
from ..reading.known import CACHES, is_tempered
from ..running import RunningPlans
from ..snapshots import inside
from ..tensor import parts as tensor_parts

Refusal: TypeAlias = Callable[[str], ValueError]  # the error for a reason

_OUTPUT = ("o_proj", "dense", "out_proj")
_BY_TOKEN = ("position_embeddings", "position_ids")  # arguments that are cut to some tokens
_COMPARED = 5  # tokens


def refusal_of(module: nn.Module, chunks: int) -> Refusal:
    """Return a function that makes the error for a module that can't run in ``chunks`` of heads."""
    kind = type(module).__name__
    return lambda reason: ValueError(
        f"memory=Memory(attention_chunks={chunks}) does not know how to split {kind}: {reason}. Leave "
        "attention_chunks out for this model"
    )


def output_of(module: nn.Module) -> str:
    """Return the name of an attention's output projection; empty if it has none that is known."""
    return next((name for name in _OUTPUT if name in module._modules), "")


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's weights by name. One that several parts share has several names."""
    every = [(f"{path}." if path else "", part) for path, part in module.named_modules()]
    return {f"{path}{name}": x for path, part in every for name, x in part._parameters.items() if x is not None}


def check_parts(module: Any, output: str, refusal: Refusal) -> None:
    """Refuse a module whose parts can't run on the heads of a chunk. ``output``, its output projection, sees all."""
    if is_tempered(module):
        raise refusal("it scales queries by their places")
    if any(vars(module).get(name) for name in ("is_kv_shared_layer", "store_full_length_kv")):
        count = getattr(module.config, "num_kv_shared_layers", None)
        raise refusal(f"it shares keys and values with other layers (num_kv_shared_layers={count})")
    if not output or next(module.buffers(), None) is not None:
        raise refusal(f"its parts are {', '.join(module._modules)}")
    for name, part in ((part.name, part.module) for part in read(module)):
        own = vars(part)
        if any(isinstance(x, Tensor) and x.requires_grad for x in own.values()):
            raise refusal(f"{name or 'it'} has a tensor that needs a gradient and is no parameter")
        if not name or name.split(".")[0] == output:
            continue
        for hook in hooks_of(part):
            if not origin_of(hook).startswith("torch.distributed."):  # FSDP2's: its weights are checked at each call
                called = getattr(hook, "__qualname__", repr(hook))
                raise refusal(f"{name} has the hook {called}, which would get some of its heads at a time")
        forward = own.get("forward")
        bound = isinstance(forward, MethodType) and forward.__self__ is part
        if forward is not None and not (bound or tensor_parts.forward_is_ours(part)):
            raise refusal(f"{name} has a replaced forward")


def check_given(hidden: Tensor, kwargs: Mapping[str, Any], refusal: Refusal) -> None:
    """Refuse arguments that can't be cut by tokens, that need a gradient, or that would store a chunk's keys."""
    for name, value in kwargs.items():
        if name in CACHES and value is not None:
            raise refusal(f"{name} needs all heads")
        several = isinstance(value, (Mapping, tuple, list)) and name != "plan"
        every = [*(value.values() if isinstance(value, Mapping) else value)] if several else [value]
        tensors = [x for x in every if isinstance(x, Tensor)]
        if any(x.requires_grad for x in tensors) and torch.is_grad_enabled():
            raise refusal(f"its argument {name} needs a gradient")
        if name not in _BY_TOKEN and any(hidden.shape[1] in x.shape for x in tensors):
            raise refusal(f"its forward takes the tensor {name}")


def of_tokens(kwargs: Mapping[str, Any], tokens: slice, rows: slice = slice(None)) -> dict[str, Any]:
    """Return the arguments that belong to tokens, for some of the tokens."""
    some: dict[str, Any] = {}
    if (angles := kwargs.get("position_embeddings")) is not None:  # cosines and sines, or complex numbers
        cut = [x[rows, tokens] for x in ([angles] if isinstance(angles, Tensor) else angles)]
        some["position_embeddings"] = cut[0] if isinstance(angles, Tensor) else tuple(cut)
    if (positions := kwargs.get("position_ids")) is not None:
        some["position_ids"] = positions[:, tokens]
    return some


def compare_few(
    module: Any, run: Callable[..., Any], hidden: Tensor, kwargs: Mapping[str, Any], refusal: Refusal
) -> None:
    """Compare ``run`` with the module's own forward: outputs and gradients of a few tokens."""
    few = min(_COMPARED, hidden.shape[1])
    # Without saved_tensors_hooks, a checkpoint around the layer would count these tensors, and run the layer again.
    with torch.inference_mode(False), torch.enable_grad(), saved_tensors_hooks(_same, _same), _trained(module):
        arguments = {**kwargs, **_few(few, kwargs)}
        leaves = [hidden[:1, :few].detach().clone().requires_grad_()]
        leaves += [x for x in weights_of(module).values() if x.requires_grad]
        own = module.stock_class.forward(module, hidden_states=leaves[0], **arguments)
        with _refusing(refusal, ValueError):
            ours = run(module, leaves[0], arguments)
        if len(own) != 2 or own[1] is not None or own[0].shape != ours[0].shape:
            raise refusal("its forward returns other results")
        with _refusing(refusal):
            _compare(few, own[0], ours[0], leaves, refusal)


@contextmanager
def _refusing(refusal: Refusal, *more: type[Exception]) -> Iterator[None]:
    """Turn errors of a module's code on some of its heads into a refusal."""
    try:
        yield
    except Exception as error:
        kinds: tuple[type[Exception], ...] = (RuntimeError, TypeError, AttributeError, IndexError, *more)
        if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, kinds):
            raise
        raise refusal(f"some of its heads can't run alone ({type(error).__name__}: {error})") from error


def _compare(few: int, own: Tensor, ours: Tensor, leaves: Sequence[Tensor], refusal: Refusal) -> None:
    """Refuse other outputs, another gradient of the hidden states, and other weights that get a gradient."""
    dout = torch.linspace(-1, 1, own.numel(), dtype=own.dtype, device=own.device).view_as(own)
    right, gradients = (torch.autograd.grad(x, leaves, dout, allow_unused=True) for x in (own, ours))
    # Products are rounded alike; norms of fp64 models may round to fp32, which shows where gradients are summed.
    eps = torch.finfo(own.dtype).eps
    bounds = {"outputs": 50 * eps, "gradients": 50 * max(eps, torch.finfo(torch.float32).eps)}
    if own.dtype.itemsize <= 2:
        bounds = dict.fromkeys(bounds, 12 * eps)
    for what, x, y in (("outputs", own, ours), ("gradients", right[0], gradients[0])):
        assert x is not None and y is not None
        apart, most = (x - y).abs().max().item(), x.abs().max().item()
        if not apart <= bounds[what] * max(most, 1e-30):
            raise refusal(f"on {few} tokens its {what} differ by {apart:.1e} of {most:.1e}")
    if [x is None for x in right] != [x is None for x in gradients]:
        raise refusal("other weights get a gradient")


def _few(few: int, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call on the first tokens of the first row."""
    running: RunningPlans = kwargs["plan"]
    masks = ((key, plan.mask) for key, plan in running.items())
    plans = {key: single_rank_plan(few, mask=Mask(causal=x.causal, window=x.window)) for key, x in masks}
    some = of_tokens(kwargs, slice(0, few), rows=slice(1))
    if "position_ids" in some:
        some["position_ids"] = torch.arange(few, device=some["position_ids"].device)[None]
    if "position_embeddings" in some:  # tensors of inference mode can't be saved for a backward; copies can
        angles = some["position_embeddings"]
        copies = angles.clone() if isinstance(angles, Tensor) else tuple(x.clone() for x in angles)
        some["position_embeddings"] = copies
    some["plan"] = RunningPlans(plans, positions=some.get("position_ids"), masked=running.masked)
    return some


@contextmanager
def _trained(module: nn.Module) -> Iterator[None]:
    """Replace weights that need a gradient by others with the same values, so that no hook sees their gradients."""
    with ExitStack() as stack:
        for part in inside(module):
            stack.enter_context(
                tensor_parts.using(part, lambda x: x.detach().requires_grad_() if x.requires_grad else x)
            )
        yield


def _same(x: Tensor) -> Tensor:
    return x
