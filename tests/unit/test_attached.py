"""Losses, heads, hooks and adapters on a tiny Llama over two ranks: equal to one process, or refused by name.

test_hf_own.py, test_hf_wrapped.py, test_hf_adapters.py and test_hf_models.py cover the common ones.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.loss.loss_utils import ForCausalLMLoss

from burst_attention.integrations import hf
from burst_attention.testing import WorkerError, local_world
from tests.distributed.test_hf_own import KINDS
from tests.support.adapters import adapted
from tests.support.hf_models import SMALL
from tests.tools.families import is_ours

pytestmark = pytest.mark.long
WORLD, BOUND = 2, 2e-6  # transformers computes its loss in fp32
HEAD = "not a plain linear layer"
UNKNOWN = "is not known to treat each token independently"


def llama(kind: type = LlamaForCausalLM) -> Any:
    """Return a tiny model in fp64 with the same weights at each call."""
    torch.manual_seed(0)
    return kind(LlamaConfig(**SMALL | {"initializer_range": 0.2})).double().train()


def focal(logits: Any, labels: Any, vocab_size: int, **_: Any) -> Any:
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:]
    nll = F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), reduction="none")
    return ((1 - (-nll).exp()) ** 2 * nll).sum() / (shifted != -100).sum()


class Called:
    def __call__(self, logits: Any, labels: Any, vocab_size: int, **_: Any) -> Any:
        return 2 * ForCausalLMLoss(logits, labels, vocab_size)


class NoisyForCausalLM(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.loss = out.loss * (1 + torch.rand(()))
        return out


class CallingForCausalLM(LlamaForCausalLM):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(*args, **kwargs)
        out.loss = 3 * out.loss
        return out


class MixingLinear(nn.Linear):
    def forward(self, x: Any) -> Any:
        return super().forward(x) + super().forward(x.roll(1, 1))


class PlainLinear(nn.Linear):
    """A subclass that changes nothing."""


class RememberingModel(LlamaModel):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.last_hidden_state = out.last_hidden_state + out.last_hidden_state.mean(1, keepdim=True)
        return out


def with_loss(loss: Any, model: Any = None) -> Any:
    model = llama() if model is None else model
    model.loss_function = loss
    return model


def replaced(place: str, kind: Callable[[Any], nn.Module]) -> Any:
    """Put another module in a place, with the weights of the one that was there."""
    model = llama()
    old = model.get_submodule(place)
    new = kind(old).double()
    new.load_state_dict(old.state_dict(), strict=False)
    model.set_submodule(place, new)
    return model.train()


def linear(kind: type) -> Callable[[Any], nn.Module]:
    return lambda old: kind(old.in_features, old.out_features, bias=old.bias is not None)


def changed(change: Callable[[Any], Any]) -> Any:
    model = llama()
    change(model)
    return model


def triple_loss(_: Any, __: Any, out: Any) -> Any:
    out.loss = 3 * out.loss
    return out


def head_in(*more: nn.Module) -> Any:
    model = llama()
    model.lm_head = nn.Sequential(model.lm_head, *more).double()
    return model


def lora(model: Any = None, **options: Any) -> Any:
    config = peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "down_proj"]} | options)
    return adapted(llama() if model is None else model, config).train()


def two_adapters() -> Any:
    model = lora()
    model.add_adapter("second", peft.LoraConfig(r=4, target_modules=["v_proj"]))
    model.base_model.set_adapter(["default", "second"])
    return model.double()


def weighted() -> Any:
    model = lora()
    model.add_adapter("second", peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    model.add_weighted_adapter(["default", "second"], [0.7, 0.3], "both", combination_type="linear")
    model.set_adapter("both")
    return model.double().train()


MLP = "model.layers.0.mlp"
weight_norm = nn.utils.parametrizations.weight_norm
# By name: what makes the model, and None if it must equal one process, else a part of the refusal.
CASES: dict[str, tuple[Callable[[], Any], str | None]] = {
    "focal loss": (lambda: with_loss(focal), None),
    "a constant loss": (lambda: with_loss(lambda logits, **_: 123.0 + 0 * logits.sum()), None),
    "a loss of the first token": (lambda: with_loss(lambda logits, **_: logits[:, 0].square().mean()), None),
    "a partial of the stock loss": (lambda: with_loss(functools.partial(ForCausalLMLoss, ignore_index=-100)), None),
    "an object that is called": (lambda: with_loss(Called()), None),
    "a random factor after the forward": (lambda: llama(NoisyForCausalLM), "draws random values"),
    "__call__ overridden": (lambda: llama(CallingForCausalLM), None),
    "an nn.Linear that changes nothing": (lambda: replaced(f"{MLP}.up_proj", linear(PlainLinear)), None),
    "an nn.Linear that mixes tokens": (lambda: replaced(f"{MLP}.up_proj", linear(MixingLinear)), UNKNOWN),
    "a body that averages": (lambda: replaced("model", lambda old: RememberingModel(old.config)), UNKNOWN),
    "a hook on the model": (lambda: changed(lambda model: model.register_forward_hook(triple_loss)), None),
    "a hook on a weight": (
        lambda: changed(lambda model: model.get_parameter(f"{MLP}.down_proj.weight").register_hook(lambda x: 2 * x)),
        None,
    ),
    "a head with a bias": (lambda: replaced("lm_head", lambda old: nn.Linear(32, SMALL["vocab_size"])), None),
    "a head of a plain subclass": (lambda: replaced("lm_head", linear(PlainLinear)), None),
    "a head that mixes tokens": (lambda: replaced("lm_head", linear(MixingLinear)), HEAD),
    "a tanh behind the head": (lambda: head_in(nn.Tanh()), HEAD),
    "a head in an nn.Sequential": (head_in, HEAD),
    "a head with weight normalisation": (lambda: changed(lambda model: weight_norm(model.lm_head)), None),
    "an MLP with weight normalisation": (
        lambda: changed(lambda model: weight_norm(model.get_submodule(f"{MLP}.up_proj"))),
        UNKNOWN,
    ),
    "a resized vocabulary": (
        lambda: changed(lambda model: model.resize_token_embeddings(80, mean_resizing=False)),
        None,
    ),
    "a frozen body": (lambda: changed(lambda model: model.model.requires_grad_(False)), None),
    "LoRA of the head": (lambda: lora(target_modules=["embed_tokens", "lm_head"]), "has an adapter"),
    "LoRA, the head trained whole": (lambda: lora(modules_to_save=["lm_head"]), None),
    "LoRA merged": (lambda: lora().merge_and_unload().requires_grad_(), None),
    "two LoRAs": (two_adapters, None),
    "two LoRAs, weighted": (weighted, None),
    "LoRA on a subclass": (lambda: lora(llama(KINDS["decorated"]())), None),
    "LoRA with a focal loss": (lambda: lora(with_loss(focal)), None),
}


def batches() -> list[dict[str, torch.Tensor]]:
    """Return a plain batch and one that is padded on the right."""
    ids = torch.randint(SMALL["vocab_size"], (2, 23), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, 15:] = 0
    plain = {"input_ids": ids, "labels": ids.clone()}
    return [plain, {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}]


def results(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the loss and every gradient by its parameter's name."""
    model.zero_grad()
    loss = model(**batch).loss
    if loss.requires_grad:
        loss.backward()
    return {"the loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_what_is_attached_is_equal_or_refused(name: str) -> None:
    make, refusal = CASES[name]
    expected = [results(make(), batch) for batch in batches()]
    models = [make() for _ in range(WORLD)]

    def rank(group: Any) -> list[dict[str, torch.Tensor]]:
        model = hf.parallelize(models[group.rank()], group, timeout=30)
        return [results(model, copy.deepcopy(batch)) for batch in batches()]

    with local_world(WORLD, timeout=30) as ranks:
        if refusal is None:
            found = ranks.run(rank)
        else:
            with pytest.raises(WorkerError) as caught:
                ranks.run(rank)
            raised = caught.value.errors
            assert len(raised) == WORLD
            assert all(
                isinstance(x, TypeError | ValueError) and is_ours(x) and refusal in str(x) for x in raised.values()
            )
            return
    for wanted, *parts in zip(expected, *found, strict=True):
        assert all({*each} == {*wanted} for each in parts)
        for key, right in wanted.items():
            got = [each[key] for each in parts]
            got = got if key == "the loss" else [sum(got) / WORLD]
            assert all((each - right).norm() <= BOUND * right.norm().clamp(min=1e-6) for each in got), key
