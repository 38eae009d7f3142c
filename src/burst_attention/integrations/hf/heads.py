"""How a transformers model makes its logits of the hidden states, and the loss of exactly those logits.

Models multiply, divide, cap or shift the product of their head, each under names of its own. No list of names holds
for next year's model, so the model's own forward tells: it runs with its body and its head replaced by stand-ins that
give known numbers, and what comes out is compared with every form that the loss can compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from burst_attention import loss
from burst_attention.attention.batch import PlanArgument, Plans
from burst_attention.attention.plan import Plan
from burst_attention.loss import Head, LogitForm, TokenLogProbs

from .stub_forward import twin_of

# What the stand-in for the head gives: next to nothing, far more than any cap, and between.
_SMALL, _GREAT = 2.0**-30, 1e30
_PROBES = (0.0, _SMALL, _GREAT, -_GREAT, 1.0, -3.0, 11.0, -37.0, 120.0, -4000.0)

_DTYPES = (torch.float32, torch.float64)  # of logits that tell a form exactly


def next_token_loss(
    model: nn.Module,
    hidden: Tensor,
    shift_labels: Tensor,
    plan: PlanArgument,
    *,
    ignore_index: int = -100,
    num_valid: float | Tensor | None = None,
    chunk_tokens: int | None = None,
) -> Tensor:
    """The loss of :func:`burst_attention.loss.next_token_loss` for the logits that ``model`` makes of ``hidden``.

    Args:
        model: a causal language model of transformers. Its head's weight and bias, and the factor and the cap that its
            forward applies to their product, are found in it. Under FSDP call this inside the root's forward.
        hidden: [B, S_local, E], what the model's body gives: ``model.model(...)[0]``.
        shift_labels: [B, S_local], from :func:`burst_attention.integrations.hf.shard_batch`.
        plan: as for ``model(..., plan=plan)``.
        ignore_index, num_valid, chunk_tokens: as for :func:`burst_attention.loss.next_token_loss`.

    Returns:
        A scalar, as :func:`burst_attention.loss.next_token_loss` gives it. What a model adds to its loss (for its
        router, say) is not in it.

    Raises:
        TypeError, ValueError: as :func:`burst_attention.loss.next_token_loss` and :func:`find_head`, on every rank.
    """
    one = Plans.of(plan).one
    head = _head_for(model, one)
    return loss.next_token_loss(
        hidden,
        head.weight,
        shift_labels,
        one,
        **head.options,
        ignore_index=ignore_index,
        num_valid=num_valid,
        chunk_tokens=chunk_tokens,
    )


def next_token_nll(
    model: nn.Module,
    hidden: Tensor,
    shift_labels: Tensor,
    plan: PlanArgument,
    *,
    ignore_index: int = -100,
    chunk_tokens: int | None = None,
) -> Tensor:
    """What :func:`next_token_loss` sums, [B, S_local] in nats, as :func:`burst_attention.loss.next_token_nll` gives it.

    Raises:
        TypeError, ValueError: a bad argument; on the other ranks in their next call with this plan.
    """
    one = Plans.of(plan).one
    head = _head_for(model, one)
    return loss.next_token_nll(
        hidden, head.weight, shift_labels, one, **head.options, ignore_index=ignore_index, chunk_tokens=chunk_tokens
    )


def token_log_probs(
    model: nn.Module,
    hidden: Tensor,
    shift_labels: Tensor,
    plan: PlanArgument,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    outputs: Sequence[str] = ("log_probs", "entropy"),
    chunk_tokens: int | None = None,
) -> TokenLogProbs:
    """What the logits that ``model`` makes of ``hidden`` say of each label of the whole sequence.

    Args:
        model, hidden, shift_labels, plan: as for :func:`next_token_loss`.
        temperature, ignore_index, outputs, chunk_tokens: as for :func:`burst_attention.loss.token_log_probs`.

    Returns:
        What :func:`burst_attention.loss.token_log_probs` gives: fields [B, S - 1], the same on every rank.

    Raises:
        TypeError, ValueError: as :func:`burst_attention.loss.token_log_probs` and :func:`find_head`, on every rank.
    """
    one = Plans.of(plan).one
    head = _head_for(model, one, "token_log_probs")
    return loss.token_log_probs(
        hidden,
        head.weight,
        shift_labels,
        one,
        **head.options,
        temperature=temperature,
        ignore_index=ignore_index,
        outputs=outputs,
        chunk_tokens=chunk_tokens,
    )


def _head_for(model: nn.Module, plan: Plan, call: str = "next_token_loss") -> Head:
    """The model's head; a refusal of it reaches the other ranks."""
    with plan.agreement.entering(call):
        return find_head(model)


def find_head(model: nn.Module, form: LogitForm | None = None) -> Head:
    """The head of a causal language model of transformers. It exchanges nothing.

    Weight and bias are the model's own parameters: under FSDP they are whole inside the root module's forward.

    Args:
        form: what :func:`find_form` found before, for who calls often; default: it is found anew.

    Raises:
        TypeError, ValueError: as :func:`find_form`.
    """
    _, head = _linear_of(model)
    return Head(head.weight, head.bias, find_form(model) if form is None else form)


def find_form(model: nn.Module) -> LogitForm:
    """What a causal language model of transformers makes of its head's product. Takes milliseconds.

    Raises:
        TypeError: ``model`` has no head of its own that is a plain linear layer.
        ValueError: its logits are not of a :class:`~burst_attention.loss.LogitForm`; names the model's class, and a
            logit or what else is in the way.
    """
    check_untouched(model)
    name, head = _linear_of(model)
    product = _probe(head.weight.shape[0])
    logits = _logits_of(model, name, head, product)
    return _form(type(model).__name__, product, logits)


def check_untouched(model: nn.Module) -> None:
    """Refuse a model on whose head somebody has put what may change its logits."""
    name, head = _linear_of(model)
    hooks = [*head._forward_hooks.values(), *head._forward_pre_hooks.values()]
    # Those of FSDP2 and of tensor parallelism gather and scatter what the head holds.
    added = [hook for hook in hooks if not getattr(hook, "__module__", "").startswith("torch.distributed.")]
    if added or "forward" in vars(head):
        what = f"hook {getattr(added[0], '__qualname__', added[0])}" if added else "forward of its own"
        raise TypeError(
            f"model's {name} has a {what}, which may change its logits and is not looked into; remove it for training "
            "over shards"
        )


def _linear_of(model: Any) -> tuple[str, Any]:
    """(attribute, module) of the head."""
    kind, find = type(model).__name__, getattr(model, "get_output_embeddings", None)
    children = dict(model.named_children()) if isinstance(model, nn.Module) and callable(find) else {}
    head: Any = find() if children and find else None
    name = next((name for name, child in children.items() if child is head), None)
    if name is None or getattr(model, "base_model_prefix", None) not in children:
        raise TypeError(
            f"model is a {kind}, whose body and head are not found among its modules; pass the causal language model "
            "of transformers itself and not what wraps it (of a PEFT model: model.get_base_model())"
        )
    if getattr(type(head), "forward", None) is not nn.Linear.forward:
        raise TypeError(
            f"model's {name} is a {type(head).__name__}, not a plain linear layer, so its weight does not tell its "
            f"logits; give {kind} a linear head, or merge into it what was added"
        )
    return name, head


def _probe(vocabulary: int) -> Tensor:
    """fp64 [1, tokens, V] that holds all of ``_PROBES``, and several of them in each column."""
    tokens = max(3, -(-len(_PROBES) // vocabulary))
    index = torch.arange(tokens, device="cpu")[:, None] + tokens * torch.arange(vocabulary, device="cpu")
    return torch.tensor(_PROBES, dtype=torch.float64, device="cpu")[index % len(_PROBES)][None]


@torch.no_grad()
def _logits_of(model: Any, name: str, head: Any, product: Tensor) -> Tensor:
    """The logits [1, tokens, V] that ``model`` would return if its head's product were ``product``."""
    kind, tokens = type(model).__name__, product.shape[1]
    # Exact in every dtype that a model may cast it to.
    hidden = (torch.arange(tokens * head.weight.shape[1], device="cpu").view(1, tokens, -1) % 7 - 3).double() / 4
    instead = _Product(head, product)
    body = model.base_model_prefix
    twin = twin_of(model, {body: _Body(model._modules[body], hidden), name: instead})
    try:
        out = twin.forward(input_ids=torch.zeros(1, tokens, dtype=torch.long, device="cpu"))
        logits = out[0] if isinstance(out, tuple) else out.logits
    except Exception as error:
        raise ValueError(
            f"{kind}.forward does not run with its {body} and {name} replaced ({type(error).__name__}: {error}), so "
            "what it does to its logits is not known; its loss can't be computed over shards"
        ) from error
    if instead.seen is None or not torch.equal(instead.seen.detach().cpu().double(), hidden):
        raise ValueError(
            f"{kind} does not give its {name} the hidden states of its {body} as they are; its loss can't be computed "
            "over shards"
        )
    return logits


def _form(kind: str, product: Tensor, logits: Any) -> LogitForm:
    """That by which every logit comes of its product."""
    if not isinstance(logits, Tensor) or logits.shape != product.shape or logits.dtype not in _DTYPES:
        what = f"{logits.dtype} {list(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(
            f"{kind} makes {what} of a product of its head of shape {list(product.shape)}; its loss can't be computed "
            "over shards"
        )
    made = logits.cpu().double()
    rounding = 16 * torch.finfo(logits.dtype).eps
    factor = made[product == _SMALL].median().item() / _SMALL  # what holds for most tokens, for a clear refusal
    if abs(factor - 1) <= rounding:
        factor = 1.0
    most = made[product == _GREAT].abs().median().item()
    softcap = most if 0 < most < _GREAT * abs(factor) / 2 else None
    form = LogitForm(factor, softcap)
    expected = form.apply_(product.clone())
    wrong = ~((made - expected).abs() <= rounding * expected.abs())  # a logit that is not a number is wrong
    if not factor:
        wrong = product != 0
    if wrong.any():
        where = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            f"the logits of {kind} are neither a factor times its head's product nor a cap's tanh of that: of a "
            f"product of {product[where].item():g} it makes {made[where].item():g} for token id {where[2]}; its loss "
            "can't be computed over shards"
        )
    return form


class _Body:
    """Stands for the model's body: gives ``hidden`` whatever it is given, and has the attributes of the real one."""

    def __init__(self, real: nn.Module, hidden: Tensor) -> None:
        self._real, self._hidden = real, hidden

    def __call__(self, *args: Any, **kwargs: Any) -> _BodyOutput:
        return _BodyOutput(self._hidden)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _BodyOutput(tuple):
    """What bodies return, of one element: ``[0]`` and ``last_hidden_state``. All else that a model may ask is None."""

    last_hidden_state: Tensor

    def __new__(cls, hidden: Tensor) -> _BodyOutput:
        self = super().__new__(cls, (hidden,))
        self.last_hidden_state = hidden
        return self

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Product:
    """Stands for the head: gives ``product`` and remembers what it was given."""

    def __init__(self, real: nn.Module, product: Tensor) -> None:
        self._real, self._product = real, product
        self.seen: Tensor | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        self.seen = hidden
        return self._product.clone()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)
