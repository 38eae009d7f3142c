"""Tiny encoders, and models that compute their attention or count their positions themselves, in fp64."""

import functools
import itertools
from typing import Any

import torch
import torch.nn.functional as F
import transformers

from burst_attention.integrations.hf.reading import forwards
from tests.support.equal import check, equal
from tests.support.hf_models import WHOLE_HEADS
from tests.tools import families

PAD, LENGTH, LABELS = 0, 29, 3
LENGTHS = (29, 17)  # of the rows of a padded batch
DOCUMENTS = (0, 11, 12, 29)
HEADS = ("ForMaskedLM", "ForTokenClassification", "ForSequenceClassification")


@functools.cache
def made(model_type: str, head: str) -> Any:
    """A model with random weights. Copy it before you change it."""
    config = families.tiny_config(model_type)
    few = {"num_hidden_layers": 2, "decoder_layers": 2, "num_layers": 2, "n_layer": 2}
    own = {"attention_types": [[["global", "local"], 1]], "local_attention": 10}
    known = config.to_dict() | dict.fromkeys(config.attribute_map)
    config = families.tiny_config(model_type, **{name: x for name, x in (few | own).items() if name in known})
    config.num_labels = LABELS
    if head == "ForCausalLM":
        kind: Any = families.model_class(model_type)
    else:
        config.is_decoder = False
        kind = getattr(transformers, type(config).__name__.removesuffix("Config") + head)
    # Under eager attention ModernBERT's padding that sees no token is NaN, and OPT's softmax is in fp32.
    config._attn_implementation = "sdpa" if model_type in ("modernbert", "opt") else "eager"
    torch.manual_seed(0)
    return families.moved(kind(config).double().eval(), 1, 0.1)


def make_batch(head: str, case: str) -> dict[str, torch.Tensor]:
    """Token ids and labels: a "whole" batch, one with padding, or packed documents."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, families.VOCABULARY, (2, LENGTH), generator=generator)
    batch = {"input_ids": ids}
    real = torch.ones_like(ids)
    if case == "padded":
        real = (torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]).long()
        ids[real == 0] = PAD
        batch["attention_mask"] = real
    if case == "packed":
        batch["position_ids"] = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(DOCUMENTS)]).repeat(2, 1)
    if head == "ForSequenceClassification":
        return batch | {"labels": torch.tensor([2, 0])}
    labels = ids.clone() if head in ("ForCausalLM", "ForMaskedLM") else ids % LABELS
    if head == "ForMaskedLM":
        labels[torch.rand(ids.shape, generator=generator) < 0.6] = -100
    labels[real == 0] = -100
    labels[:, list(DOCUMENTS[:-1] if case == "packed" else ())] = -100
    return batch | {"labels": labels}


def stock_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of one process, which runs each document alone."""
    if "position_ids" in batch:
        pieces = [{name: x[:, a:b] for name, x in batch.items()} for a, b in itertools.pairwise(DOCUMENTS)]
        logits = torch.cat([_logits(model, piece) for piece in pieces], 1)
    else:
        logits = _logits(model, batch)
    labels = batch["labels"]
    if forwards.has_stock_forward(model) and not type(model).__name__.endswith("ForMaskedLM"):
        # others don't shift labels, Bart for example
        logits, labels = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def _logits(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    given = {name: x for name, x in batch.items() if name != "labels"}
    given = families.taken_by(model, given)
    with families.default_dtype(torch.float64):
        logits: torch.Tensor = model(**given).logits
    return logits


def check_step(model: Any, batch: dict[str, torch.Tensor], world: int, **options: Any) -> None:
    """Compare ranks with one process; ``options``: of :func:`equal`."""
    gradients = "mean" if world == 3 else "sum"
    check(equal(model, batch, threads=world, stock=stock_loss, gradients=gradients, strategy=WHOLE_HEADS, **options))
