"""Steps of models whose indexers choose keys, over ranks and in one process."""

import pytest
import torch

from burst_attention.attention.call import keep_attention
from burst_attention.testing import WorkerError, local_world
from tests.support.hybrid_models import check_steps

HIDDEN, GRADIENTS = 1e-11, 1e-10
DOCUMENTS = (0, 3, 40, 41, 90)  # with fewer tokens than are chosen, too


def check(model, world, documents, *, rows=1, layout="auto", prepare=None):
    how = {"rows": rows, "layout": layout, "prepare": prepare, "hidden": HIDDEN, "gradients": GRADIENTS}
    check_steps(model, world, documents, **how)


def of_latents(model):
    return [part for part in model.modules() if hasattr(part, "kv_b_proj") and hasattr(part, "indexer")]


def padded(ids, side):
    """Pad the second row of a batch."""
    mask = torch.ones(2, 70, dtype=torch.long)
    hidden = slice(0, 19) if side == "left" else slice(51, None)
    mask[1, hidden] = 0
    labels = ids.masked_fill(mask == 0, -100)
    if side == "left":
        labels[1, 19] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def stepped(model, batch, **options):
    loss = model(**batch, **options).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def checkpointed(model, *, keep=False):
    model.train()
    options = {"use_reentrant": False} | ({"context_fn": keep_attention} if keep else {})
    model.gradient_checkpointing_enable(options)


def refused(function):
    with local_world(2) as ranks, pytest.raises(WorkerError) as caught:
        ranks.run(function)
    assert all(type(error) is ValueError for error in caught.value.errors.values())
    assert len(caught.value.errors) == 2
    return str(caught.value.errors[0])
