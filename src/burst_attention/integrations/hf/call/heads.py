"""Find how a transformers model computes its logits from hidden states, and compute the loss of those logits.

Models scale, cap or shift the product of their head, and each family has other names for these settings. A list of
names would miss future models, so we run the model's forward instead. Stand-ins replace its body and its head and
return known numbers. We then compare the resulting logits with the forms that the loss can compute.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from burst_attention import loss
from burst_attention.attention.batch import PlanArgument, Plans
from burst_attention.loss import Head, LogitForm

from ..reading import Reading
from ..reading.attached import hooks_of
from ..reading.forwards import body_name, body_of
from ..snapshots import Snapshot
from ..tensor import axis
from ..tensor.parts import forward_is_ours
from .stub_forward import Output, StandIn, twin_of

# The head's stand-in returns values near zero, values far above any soft cap, and values between.
_SMALL, _GREAT = 2.0**-30, 1e30
_PROBES = (0.0, _SMALL, _GREAT, -_GREAT, 1.0, -3.0, 11.0, -37.0, 120.0, -4000.0)

_NO_LOSS = "its loss can't be computed over shards"
_DTYPES = (torch.float32, torch.float64)  # logits in fewer bits would not identify the form


def next_token_loss(
    model: nn.Module,
    hidden: Tensor,
    shift_labels: Tensor,
    plan: PlanArgument,
    **options: Any,
) -> Tensor:
    """Compute the model's next-token loss over the whole sequence from this rank's hidden states.

    Like :func:`burst_attention.loss.next_token_loss`, with the head taken from ``model``.

    Args:
        model: a causal language model of transformers. This function finds its head's weight and bias, and the factor
            and soft cap that its forward applies to the logits. Under FSDP call it inside the root's forward.
        hidden: [B, S_local, E], the output of the model's body: ``model.model(...)[0]``.
        shift_labels: [B, S_local], from :func:`burst_attention.integrations.hf.shard_batch`.
        plan: as for ``model(..., plan=plan)``.
        options: ``ignore_index``, ``num_valid`` and ``chunk_tokens`` of :func:`burst_attention.loss.next_token_loss`.

    Returns:
        A scalar, as from :func:`burst_attention.loss.next_token_loss`, without the model's additional losses (of a
        router, for example).

    Raises:
        TypeError, ValueError: as :func:`burst_attention.loss.next_token_loss` and :func:`find_head`, on every rank.
    """
    base = Plans.of(plan).one
    with base.agreement.entering("next_token_loss"):
        head = find_head(model)
    return loss.next_token_loss(hidden, head.weight, shift_labels, base, **head.options, **options)


def find_head(model: nn.Module, form: LogitForm | None = None) -> Head:
    """Return the head of a causal language model of transformers. Exchanges nothing.

    Weight and bias are the model's parameters. Under FSDP they are whole only inside the root module's forward. After
    :func:`tensor_parallel` they are DTensors, cut by the vocabulary, as the losses take them.

    Args:
        model: the model, or a PEFT model of it.
        form: an earlier result of :func:`find_form`, to save time. By default this function calls it.

    Raises:
        TypeError, ValueError: as :func:`find_form`.
    """
    head = find_linear(model)
    return Head(head.weight, head.bias, find_form(model) if form is None else form)


def find_linear(model: Any) -> nn.Linear:
    """Return the module of a model's head."""
    return cast("nn.Linear", _linear_of(base_of(model))[2])


def for_head(hidden: Tensor, weight: Tensor) -> Tensor:
    """Cast to the head's dtype, as mixed precision does, if the weight has fewer bits than the body's output."""
    return hidden.to(weight.dtype) if weight.dtype.itemsize < hidden.dtype.itemsize else hidden


def find_form(model: nn.Module) -> LogitForm:
    """Find how a model computes its logits from its head's product. Takes milliseconds.

    Args:
        model: a causal language model of transformers.

    Raises:
        TypeError: the head of ``model`` is not found, is not a plain linear layer, or has a hook.
        ValueError: no :class:`~burst_attention.loss.LogitForm` describes its logits. The message names the model's
            class and an example logit, or another reason.
    """
    model = base_of(model)
    check_untouched(model)
    owner, name, head = _linear_of(model)
    product = _probe(head.weight.shape[0])
    logits, scale = _logits_of(owner, name, head, product)
    if owner is not model:
        _check_passed_on(model, owner, logits)
    form = _form(type(model).__name__, product, logits)
    return form if scale == 1 else replace(form, factor=scale * form.factor)


def read_by(model: Any) -> Snapshot:
    """Return a snapshot of what a model's forward may read around its layers: configurations, and own attributes."""
    around = (model, *model.children(), body_of(model), model.get_output_embeddings())
    return Snapshot({id(part): part for part in around if part is not None}.values())


def base_of(model: Any) -> Any:
    """Return the model inside of a PEFT model; other models themselves."""
    adapted = not isinstance(model, PreTrainedModel) and hasattr(type(model), "get_base_model")
    return model.get_base_model() if adapted else model


def _check_passed_on(model: Any, owner: Any, logits: Tensor) -> None:
    """Refuse a model that changes the logits of the language model inside of it."""
    name = next(name for name, child in model.named_children() if child is owner)
    twin = twin_of(model, {name: StandIn(owner, lambda *_, **__: Output(logits))})
    try:
        with torch.no_grad():
            out = twin.forward(input_ids=torch.zeros(1, logits.shape[1], dtype=torch.long, device=model.device))
    except Exception as error:
        why = f"can't be called with input_ids alone ({type(error).__name__}: {error})"
        raise ValueError(
            f"{type(model).__name__} {why}, so what it does to the logits is unknown; {_NO_LOSS}"
        ) from error
    if not torch.equal(out.logits, logits):
        raise ValueError(f"{type(model).__name__} changes the logits of its {name}; {_NO_LOSS}")


def is_nested(reading: Reading) -> bool:
    """Return whether the model's head is the last of several layers, as in BERT."""
    model, head = reading.model, reading.model.get_output_embeddings()
    children = dict(model.named_children())
    if head is None or head in children.values():
        return False
    parts = {name: reading.by_id[id(child)].inside for name, child in children.items()}
    holders = [name for name, inside in parts.items() if any(part.module is head for part in inside)]
    return bool(holders) and body_name(model) not in holders


def check_untouched(model: nn.Module) -> None:
    """Refuse a model if its head has a hook or a replaced forward, which may change the logits."""
    owner, name, head = _linear_of(model)
    parts = {id(part): part for part in (owner.get_submodule(name), head)}.values()
    hooks = [hook for part in parts for hook in hooks_of(part)]
    # Hooks of FSDP2 and tensor parallelism only gather and scatter the head's tensors.
    added = [hook for hook in hooks if not getattr(hook, "__module__", "").startswith("torch.distributed.")]
    cut_by_us = axis.cut_of(model) is not None and forward_is_ours(head)
    if added or (any("forward" in vars(part) for part in parts) and not cut_by_us):
        what = f"hook {getattr(added[0], '__qualname__', added[0])}" if added else "replaced forward"
        raise TypeError(f"model's {name} has a {what}, which may change the logits; remove it to train over shards")


def _linear_of(model: Any) -> tuple[Any, str, Any]:
    """Return the module with the head among its children (the model, or one inside), the head's name, and the head."""
    head: Any = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    inner = [child for child in model.children() if isinstance(child, PreTrainedModel)] if head is not None else []
    owner = next((child for child in inner if child.get_output_embeddings() is head), model)
    kind, children = type(owner).__name__, owner.named_children() if head is not None else ()
    name = next((name for name, child in children if child is head), None)
    if name is None or not body_name(owner):
        raise TypeError(
            f"model is a {kind}, and its body or its head is not among its modules; load it by AutoModelForCausalLM "
            "(or another class with a head), and pass that model, or a PEFT model of it, before DDP or FSDP wraps it"
        )
    head = _trained_by_peft(head)
    if getattr(type(head), "forward", None) is not nn.Linear.forward:
        raise TypeError(f"model's {name} {_why_not_plain(kind, name, type(head))}")
    weight = type(getattr(head.weight, "_local_tensor", head.weight))
    if weight not in (Tensor, nn.Parameter):
        raise TypeError(
            f"model's {name} has a weight of type {weight.__name__}, which the loss can't multiply; leave {name} "
            "out of the quantization (filter_fn of torchao's quantize_, or modules_to_not_convert)"
        )
    return owner, name, head


def _trained_by_peft(head: Any) -> Any:
    """Return the layer that runs where PEFT has a copy of the head to train (``modules_to_save``), else ``head``."""
    # Asked again in each call: adapters are switched and disabled between calls.
    names = [f"{base.__module__}.{base.__name__}" for base in type(head).__mro__]
    if "peft.utils.other.ModulesToSaveWrapper" not in names:
        return head
    active = head.active_adapters
    off = head.disable_adapters or not active or any(name not in head.modules_to_save for name in active)
    return head.original_module if off else head.modules_to_save[active[0]]


def _why_not_plain(kind: str, name: str, layer: type) -> str:
    """Return what the head of a ``kind`` is instead of a linear layer, and what to do."""
    if layer.__module__.startswith("peft."):
        return (
            f"has an adapter ({layer.__module__}.{layer.__name__}), and the loss takes the head's own weight alone; "
            f"train the head whole (modules_to_save=[{name!r}]), keep the adapter off it, or merge the adapter"
        )
    return (
        f"is a {layer.__name__}, not a plain linear layer, so its weight does not define the logits; give {kind} a "
        "linear head. A quantized one: leave it out of the quantization"
    )


def _probe(vocabulary: int) -> Tensor:
    """Return fp64 [1, tokens, V] with all of ``_PROBES``, and several of them in each column."""
    tokens = max(3, -(-len(_PROBES) // vocabulary))
    index = torch.arange(tokens, device="cpu")[:, None] + tokens * torch.arange(vocabulary, device="cpu")
    return torch.tensor(_PROBES, dtype=torch.float64, device="cpu")[index % len(_PROBES)][None]


@torch.no_grad()
def _logits_of(model: Any, name: str, head: Any, product: Tensor) -> tuple[Tensor, float]:
    """Return the model's logits [1, tokens, V] for a given product of its head, and the factor of the head's input."""
    kind, tokens = type(model).__name__, product.shape[1]
    # These values are exact in every dtype that a model may cast to.
    hidden = (torch.arange(tokens * head.weight.shape[1], device="cpu").view(1, tokens, -1) % 7 - 3).double() / 4
    seen: list[Tensor] = []

    def multiply(features: Tensor) -> Tensor:
        seen.append(features.detach().cpu().double())
        return product.clone()

    body = body_name(model)
    twin = twin_of(
        model, {body: StandIn(model._modules[body], lambda *_, **__: Output(hidden)), name: StandIn(head, multiply)}
    )
    try:
        out = twin.forward(input_ids=torch.zeros(1, tokens, dtype=torch.long, device="cpu"))
        logits = out[0] if isinstance(out, tuple) else out.logits
    except Exception as error:
        raise ValueError(
            f"{kind}.forward fails on stand-ins of its {body} and {name} ({type(error).__name__}: {error}); {_NO_LOSS}"
        ) from error
    received = seen[-1] if seen and seen[-1].shape == hidden.shape else torch.full_like(hidden, torch.nan)
    scale = (received[0, 0, 0] / hidden[0, 0, 0]).item()
    # A factor of the input is one of the product, if the head has no bias (MiniCPM3).
    if not torch.equal(received, hidden * scale) or (scale != 1 and head.bias is not None):
        raise ChangedError(f"{kind} does not pass the hidden states of its {body} to its {name} unchanged; {_NO_LOSS}")
    return logits, scale


def _form(kind: str, product: Tensor, logits: Any) -> LogitForm:
    """Return the form that maps each entry of ``product`` to its logit."""
    if not isinstance(logits, Tensor) or logits.shape != product.shape or logits.dtype not in _DTYPES:
        what = f"{logits.dtype} {list(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(
            f"{kind} returns {what} for a head product {list(product.shape)}, not its fp32 or fp64 logits; {_NO_LOSS}"
        )
    made = logits.cpu().double()
    rounding = 16 * torch.finfo(logits.dtype).eps
    factor = made[product == _SMALL].median().item() / _SMALL  # a median, so that the message names the odd token
    if abs(factor - 1) <= rounding:
        factor = 1.0
    most = made[product == _GREAT].abs().median().item()
    softcap = most if 0 < most < _GREAT * abs(factor) / 2 else None
    form = LogitForm(factor, softcap)
    expected = form.apply_(product.clone())
    wrong = ~((made - expected).abs() <= rounding * expected.abs())  # so written, a NaN counts as wrong
    if not factor:
        wrong = product != 0
    if wrong.any():
        where = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            f"the logits of {kind} are neither a factor times its head's product nor its soft cap (tanh): of "
            f"{product[where].item():g} it makes {made[where].item():g} for token id {where[2]}; {_NO_LOSS}"
        )
    return form


class ChangedError(ValueError):
    """A model's forward changes the hidden states before its head gets them."""
