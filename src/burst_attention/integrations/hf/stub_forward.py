"""What a model's own forward makes of results that come from elsewhere: it runs with some of its modules replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from transformers.modeling_outputs import MoeModelOutputWithPast


def twin_of(model: Any, stand_ins: Mapping[str, Callable[..., Any]]) -> Any:
    """A second object of the model's own class in which other callables stand in for some of its modules, by name.

    The model itself is not touched, nor are hooks of the modules replaced run.
    """
    kind: Any = getattr(model, "stock_class", type(model))  # of a parallelized model
    twin = object.__new__(kind)
    twin.__dict__.update(model.__dict__)
    twin.__dict__["_modules"] = {name: child for name, child in model._modules.items() if name not in stand_ins}
    twin.__dict__.update(stand_ins)
    twin.__dict__["forward"] = kind.forward.__get__(twin)  # not what was put over the model's own
    return twin


def router_loss(model: Any, router_logits: Any, attention_mask: Tensor | None) -> Tensor:
    """The auxiliary loss of a mixture of experts.

    Args:
        model: a causal language model.
        router_logits: of each layer, [tokens, experts], of the whole batch.
        attention_mask: [B, S], zeros for padding; or None.
    """
    head = next(name for name, child in model.named_children() if child is model.get_output_embeddings())
    body = MoeModelOutputWithPast(last_hidden_state=router_logits[0].new_zeros(1, 1, 1), router_logits=router_logits)
    twin = twin_of(model, {model.base_model_prefix: lambda **_: body, head: lambda hidden: hidden})
    return twin.forward(attention_mask=attention_mask, output_router_logits=True).aux_loss


def classified(model: Any, hidden: Tensor, given: Mapping[str, Any]) -> Any:
    """What a model that classifies sequences returns for the hidden states [B, S, E] of whole sequences."""
    body = MoeModelOutputWithPast(last_hidden_state=hidden)
    return twin_of(model, {model.base_model_prefix: lambda *_, **__: body}).forward(**given)
