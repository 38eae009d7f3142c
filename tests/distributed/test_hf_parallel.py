"""A parallelized model against the stock model on one device: the whole batch in, the whole loss and gradients out."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from transformers import MixtralConfig, MixtralForCausalLM

from burst_attention.integrations import hf
from tests.hf_models import SMALL, VOCABULARY, make_model

LENGTH = 37  # divides by no number of ranks


def ids_of(rows, length=LENGTH, seed=1):
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def plain():
    ids = ids_of(2)
    return {"input_ids": ids, "labels": ids.clone()}


def prompts_without_labels():
    batch = plain()
    batch["labels"][:, :9] = -100
    batch["num_items_in_batch"] = torch.tensor(61.0)
    return batch


def ones():
    return plain() | {"attention_mask": torch.ones(2, LENGTH, dtype=torch.long)}


def padded(*, left=(0, 0), right=(0, 0)):
    batch = ones()
    for row, (before, behind) in enumerate(zip(left, right, strict=True)):
        batch["attention_mask"][row, :before] = 0
        batch["attention_mask"][row, LENGTH - behind :] = 0
        batch["labels"][row, : before + bool(before)] = -100
        batch["labels"][row, LENGTH - behind :] = -100
    return batch


def packed(*documents, borders="position_ids"):
    """One row of documents for each list of their lengths; of each document's first token no label."""
    ids = ids_of(len(documents))
    batch = {"input_ids": ids, "labels": ids.clone()}
    places = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in documents])
    batch["labels"][places == 0] = -100
    if borders == "seq_idx":
        batch["seq_idx"] = (places == 0).cumsum(1).int() - 1
    if borders == "cu_seq_lens":
        lengths = torch.tensor([0] + [n for row in documents for n in row], dtype=torch.int32).cumsum(0)
        batch |= {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "max_length_q": 20, "max_length_k": 20}
    return batch | {"position_ids": places}


def across_documents():
    """Targets over the documents' borders, as the labels say."""
    batch = packed((11, 20, 6))
    return batch | {"labels": batch["input_ids"].clone()}


def short():
    ids = ids_of(2, length=2)
    return {"input_ids": ids, "labels": ids.clone()}


def shifted():
    batch = plain()
    labels = torch.nn.functional.pad(batch.pop("labels")[:, 1:], (0, 1), value=-100)
    return batch | {"shift_labels": labels, "labels": labels}


BATCHES = {
    "plain": plain,
    "prompts": prompts_without_labels,
    "ones": ones,
    "right padded": functools.partial(padded, right=(0, 9)),
    "left padded": functools.partial(padded, left=(5, 0)),
    "padded on both sides": functools.partial(padded, left=(5, 3), right=(2, 9)),
    "packed": functools.partial(packed, (11, 20, 6)),
    "packed alike": functools.partial(packed, (11, 26), (11, 26)),
    "packed by row": functools.partial(packed, (11, 20, 6), (37,), (1, 36)),
    "seq_idx": functools.partial(packed, (11, 20, 6), borders="seq_idx"),
    "cu_seq_lens": functools.partial(packed, (11, 20, 6), borders="cu_seq_lens"),
    "across documents": across_documents,
    "short": short,
    "shifted": shifted,
}
MODELS = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "qwen3": {},
    "gemma2": {},
    "mixtral": {},
}


def model_of(name, implementation="sdpa"):
    if name == "mixtral":
        torch.manual_seed(0)
        config = MixtralConfig(
            **SMALL,
            num_local_experts=4,
            sliding_window=None,
            output_router_logits=True,
            router_aux_loss_coef=0.5,
            attn_implementation=implementation,
            experts_implementation="eager",  # the other knows no fp64
        )
        return MixtralForCausalLM(config).double()
    return make_model(
        "llama" if name == "tied" else name, "eager" if name == "gemma2" else implementation, **MODELS[name]
    )


def stock_loss(model, batch):
    """The loss of the stock model's logits in fp64, where transformers would cast them to fp32; and of its router."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids") if name in batch}
    out = model(**inputs, use_cache=False)
    labels = batch.get("shift_labels", torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100))
    loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss = loss / batch.get("num_items_in_batch", (labels != -100).sum())
    return loss + model.router_aux_loss_coef * out.aux_loss if "aux_loss" in out else loss


def gradients(model, loss):
    loss.backward()
    return {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}


def against_stock(name, case, reduction, checkpointing=None):
    """(relative error of the loss, of the gradients) over the ranks against the stock model on one."""
    batch, one, model = BATCHES[case](), model_of(name), model_of(name)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.train()
    expected = stock_loss(one, batch)
    wanted = gradients(one, expected)
    hf.parallelize(model, gradients=reduction, timeout=30)
    out = model(**batch)
    got = gradients(model, out.loss)
    for gradient in got.values():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size() if reduction == "mean" else 1
    error = max(((got[n] - w).norm() / w.norm().clamp(min=1e-9)).item() for n, w in wanted.items())
    return abs(out.loss.item() / expected.item() - 1), error


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("case", BATCHES)
def test_a_batch_gives_the_one_device_loss_and_gradients(pools, world, case):
    for loss, gradient in pools(world).run(against_stock, "llama", case, "mean"):
        assert loss <= 1e-8
        assert gradient <= 2e-6  # norms compute in fp32


@pytest.mark.parametrize("case", ["right padded", "packed by row"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama"])
def test_models_give_the_one_device_loss_and_gradients(pools, name, case):
    for loss, gradient in pools(3).run(against_stock, name, case, "sum"):
        assert loss <= 1e-8
        assert gradient <= 2e-6  # norms compute in fp32


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers(pools, reentrant):
    for loss, gradient in pools(2).run(against_stock, "llama", "packed by row", "mean", reentrant):
        assert loss <= 1e-8
        assert gradient <= 2e-6  # norms compute in fp32
