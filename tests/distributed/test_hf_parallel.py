"""Compare a parallelized model with the stock model on one device: loss, gradients and outputs of whole batches."""

import functools

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MixtralConfig,
    MixtralForCausalLM,
)

from burst_attention import Hardware, Mask, make_plan
from burst_attention.integrations import hf
from tests.support.equal import check, equal, stock_loss
from tests.support.hf_models import SMALL, VOCABULARY, fixed_strategy, make_model

LENGTH = 37  # not divisible by any number of ranks


def ids_of(rows, length=LENGTH, seed=1):
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def plain(length=LENGTH):
    ids = ids_of(2, length)
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
    """Return a batch with one row for each list of document lengths; first tokens have no label."""
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
    "across documents": lambda: packed((11, 20, 6)) | {"labels": ids_of(1)},  # labels cross the documents' borders
    "short": functools.partial(plain, 2),
    "shifted": shifted,
}
MODELS = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "qwen3": {},
    "gemma2": {},
    "mixtral": {},
    "llama4": {},
}
CHUNKS = {
    "attention_chunk_size": 8,
    "attn_temperature_tuning": True,
    "floor_scale": 4,
    "attn_scale": 0.9,
    "intermediate_size_mlp": 48,
    "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
    "no_rope_layers": [1, 0, 1],
    "num_hidden_layers": 3,
    "num_local_experts": 4,
    "moe_layers": [1],
    "router_aux_loss_coef": 0.0,
}


def model_of(name, implementation="sdpa"):
    if name == "llama4":
        torch.manual_seed(0)
        config = Llama4TextConfig(**SMALL | CHUNKS, attn_implementation="eager", pad_token_id=0)
        model = Llama4ForCausalLM(config).double()
        for parameter in model.parameters():  # its experts' weights are not initialised
            torch.nn.init.normal_(parameter, std=0.3)
        return model
    if name == "gpt2":
        torch.manual_seed(0)
        sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
        none = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
        return GPT2LMHeadModel(GPT2Config(**sizes, **none, attn_implementation=implementation)).double()
    if name == "mixtral":
        torch.manual_seed(0)
        config = MixtralConfig(
            **SMALL,
            num_local_experts=4,
            sliding_window=None,
            output_router_logits=True,
            router_aux_loss_coef=0.5,
            attn_implementation=implementation,
            experts_implementation="eager",  # the default does not support fp64
        )
        return MixtralForCausalLM(config).double()
    return make_model(
        "llama" if name == "tied" else name, "eager" if name == "gemma2" else implementation, **MODELS[name]
    )


def loss_of_documents(model, batch):
    """Return the stock loss, each packed document alone: Llama 4's temperature counts from the row."""
    logits = torch.cat([model(input_ids=part[None]).logits[0] for part in documents_of(batch)])
    labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100).flatten()
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / (labels != -100).sum()


def documents_of(batch):
    starts = (batch["position_ids"] == 0).flatten().nonzero().flatten().tolist()
    return torch.tensor_split(batch["input_ids"].flatten(), starts[1:])


def refusal(call, *args, **options):
    """Return the text of an error, or that there was none."""
    try:
        call(*args, **options)
    except (TypeError, ValueError) as error:
        return str(error)
    return "nothing was raised"


def against_stock(name, case, reduction, checkpointing=None):
    batch, alone = BATCHES[case](), model_of(name).train()
    if checkpointing is not None:
        alone.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    stock = loss_of_documents if name == "llama4" and "position_ids" in batch else stock_loss
    strategy = None if case in ("plain", "packed by row") else fixed_strategy(name, case)
    return equal(alone, batch, stock=stock, strategy=strategy, gradients=reduction)


@pytest.mark.parametrize(
    ("world", "name", "case", "reduction", "reentrant"),
    [
        *((2 + n % 2, "llama", case, "mean", None) for n, case in enumerate(BATCHES)),
        (3, "tied", "packed by row", "sum", None),
        (3, "qwen3", "right padded", "sum", None),
        (2, "gemma2", "packed by row", "sum", None),  # unpadded: with padding the stock attention gives NaN in fp64
        (3, "mixtral", "right padded", "sum", None),
        (2, "mixtral", "packed by row", "mean", None),
        (3, "llama4", "right padded", "sum", None),
        (2, "llama4", "packed alike", "mean", None),
        (3, "llama4", "packed by row", "sum", True),  # chunks and temperatures count from the document
        (2, "llama", "packed by row", "mean", False),
        (2, "llama", "packed by row", "mean", True),
    ],
)
def test_a_batch_gives_the_one_device_loss_and_gradients(pools, world, name, case, reduction, reentrant):
    found = pools(world).run(against_stock, name, case, reduction, reentrant)
    check(*found, loss=1e-8, gradient=2e-6)  # norms compute in fp32


def tokens_of(model, batch, temperature):
    """Return log-probabilities and entropies [B, S - 1] of the stock model's logits."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids") if name in batch}
    logits = model(**inputs, use_cache=False).logits[:, :-1] / temperature
    every, labels = logits.log_softmax(-1), batch["labels"][:, 1:]
    log_probs = every.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    entropy = -(every.exp() * every).sum(-1)
    return log_probs * (labels != -100), entropy * (labels != -100), labels, logits


def fused_against_stock(case):
    batch, alone = BATCHES[case](), model_of("llama")
    weights = torch.randn(batch["labels"][:, 1:].shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def stock(model, batch):
        log_probs, entropy, *_ = tokens_of(model, batch, 0.7)
        return (weights * log_probs).sum() + 0.1 * entropy.mean()

    def fused(model, batch):
        log_probs, entropy, labels, logits = tokens_of(alone, batch, 0.7)
        out, seen = model(**batch, fused_lm_head=True), labels != -100
        torch.testing.assert_close(out.log_probs, log_probs, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(out.entropy, entropy, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(out.mean_logits, logits.mean(-1) * seen, rtol=2e-6, atol=2e-6)
        squares = (2 * logits.log_softmax(-1)).logsumexp(-1) * seen
        torch.testing.assert_close(out.log_sum_sq_probs, squares, rtol=2e-6, atol=2e-6)
        assert torch.equal(out.label_mask, seen)
        assert torch.equal(out.is_top1.bool(), (logits.argmax(-1) == labels) & seen)
        torch.testing.assert_close(out.loss, -log_probs.sum() / seen.sum(), rtol=2e-6, atol=0)
        return (weights * out.log_probs).sum() + 0.1 * out.entropy.mean()

    return equal(alone, batch, stock=stock, call=fused, strategy=fixed_strategy(case), temperature=0.7)


@pytest.mark.parametrize("case", ["padded on both sides", "packed by row", "short"])
def test_results_per_token_in_the_order_of_the_batch(pools, case):
    check(*pools(3).run(fused_against_stock, case), gradient=5e-6)


def last_logits():
    batch, one, model = BATCHES["left padded"](), model_of("llama"), model_of("llama")
    expected = one(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], logits_to_keep=3).logits
    hf.parallelize(model, strategy=fixed_strategy(), timeout=30)
    with torch.no_grad():
        out = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], logits_to_keep=3)
        both = model(**batch, logits_to_keep=3)
    torch.testing.assert_close(out.logits, expected, rtol=2e-6, atol=2e-6)
    assert torch.equal(both.logits, out.logits)
    assert both.loss > 0
    assert model(**batch).logits is None


def test_logits_only_of_the_last_positions_that_are_asked_for(pools):
    pools(2).run(last_logits)


def planned():
    """Use a caller's plan: its layout stays, whatever the documents; its transport counts; the bytes are predicted."""
    batch, expected = BATCHES["packed"](), model_of("llama")
    length = batch["input_ids"].shape[1]
    plan = make_plan(length, strategy=fixed_strategy(), hardware=Hardware(rates="cpu"), timeout=30)
    model = hf.parallelize(model_of("llama"), plan=plan, gradients="sum")
    before = plan.transport.sent
    loss = model(**batch).loss
    loss.backward()
    assert plan.transport.sent > before
    plans = hf.plans_of(model, length, None)
    assert {each.layout for each in plans.values()} == {plan.layout}
    assert all(torch.equal(each.positions, plan.positions) for each in plans.values())
    config, count = expected.config, len(hf.attention_windows(expected))
    sizes = {"q_heads": config.num_attention_heads, "kv_heads": config.num_key_value_heads, "head_dim": config.head_dim}
    one = next(iter(plans.values())).bytes(batch=1, **sizes, dtype=expected.dtype)
    assert count == config.num_hidden_layers and one.forward_sent > 0
    with pytest.raises(ValueError, match="strategy='ring' and a plan"):
        hf.parallelize(model_of("llama"), plan=plan, strategy="ring")
    with pytest.raises(ValueError, match="plan has the mask"):
        hf.parallelize(model_of("llama"), plan=plan.with_mask(Mask(window=3)))
    with pytest.raises(TypeError, match="must be a Plan"):
        hf.parallelize(model_of("llama"), plan=3)
    with pytest.raises(TypeError, match="that is not parallelized"):
        hf.plans_of(expected, length)


def test_a_callers_plan_is_used_and_its_bytes_are_counted(pools):
    pools(2).run(planned)


def degrees():
    """Return the errors of Ulysses degrees that can't split the heads, and the loss of a correct model afterwards."""
    model, batch, chunks = model_of("llama"), plain(), hf.Memory(attention_chunks=2)
    plan = make_plan(LENGTH, strategy="ulysses", timeout=30)
    texts = (
        refusal(hf.parallelize, model, strategy="ulysses", memory=chunks),
        refusal(hf.parallelize, model, plan=plan, memory=chunks),
    )
    return texts, hf.parallelize(model, strategy="ulysses", timeout=30)(**batch).loss.item() > 0


def test_a_degree_that_can_not_split_the_heads_is_refused_before_the_first_call(pools):
    """In the call itself, ranks would stop within an exchange and their group could not be used again."""
    for texts, works in pools(4).run(degrees):
        for text in texts:
            assert "ulysses_degree=4 can't split 2 query heads and 1 key-value heads" in text
            assert "memory=Memory(attention_chunks=2)" in text
        assert works


def some_fields():
    batch, model = (
        BATCHES["right padded"](),
        hf.parallelize(model_of("llama"), hardware=Hardware(rates="cpu"), timeout=30),
    )
    every, named = model(**batch, fused_lm_head=True), model(**batch, fused_lm_head=["log_probs", "is_top1"])
    assert torch.equal(every.log_probs, named.log_probs) and torch.equal(every.is_top1, named.is_top1)
    assert named.entropy is None and torch.equal(every.loss, named.loss)
    with pytest.raises(ValueError, match="fused_lm_head='entropy' must be True, or names with log_probs"):
        model(**batch, fused_lm_head="entropy")


def test_fields_per_token_by_name(pools):
    pools(2).run(some_fields)


def generate():
    """Generate from another prompt on each rank, then compute a loss over the ranks."""
    one, model = model_of("llama"), model_of("llama")
    prompt = ids_of(1, length=5, seed=dist.get_rank())
    options = {"max_new_tokens": 6 + dist.get_rank(), "do_sample": False, "pad_token_id": 0}
    hf.parallelize(model, timeout=30)
    assert torch.equal(model.generate(prompt, **options), one.generate(prompt, **options))
    assert model(**plain()).loss > 0


def test_ranks_generate_by_themselves(pools):
    pools(2).run(generate)


def shard_batch_differs():
    plan, batch = make_plan(LENGTH, timeout=30), plain()
    batch["input_ids"][0, 3] += dist.get_rank()
    return refusal(hf.shard_batch, batch, plan)


def test_shard_batch_compares_batches(pools):
    for text in pools(2).run(shard_batch_differs):
        assert "the digest of input_ids" in text and "Give their samplers the same seed" in text


def refused(name, case, changes, calls):
    """Change arguments on rank 1 or on all ranks; return this rank's error, and whether a later correct call works."""
    model = hf.parallelize(model_of(name), strategy=fixed_strategy(*changes), timeout=10)
    batch = BATCHES[case]()
    if calls == "all" or dist.get_rank() == 1:
        batch |= changes
    if batch.pop("switched", False):
        model.set_attn_implementation("sdpa")
    text = refusal(model, **batch)
    model.set_attn_implementation("burst")
    return text, model(**plain()).loss.item() > 0


FAR = ids_of(2)
FAR[1, 30] = VOCABULARY
BEHIND = torch.ones(2, LENGTH, dtype=torch.long)
BEHIND[0, -2:] = 0


@pytest.mark.parametrize(
    ("name", "case", "changes", "calls", "message"),
    [
        ("llama", "plain", {"switched": True, "labels": None, "logits_to_keep": 2}, "all", "call model.set_attn"),
        (
            "llama",
            "plain",
            {"input_ids": FAR},
            "one",
            f"input_ids holds {VOCABULARY}, outside of the",
        ),
        ("llama", "plain", {"num_items_in_batch": torch.tensor(0)}, "all", "num_items_in_batch=0, but"),
        ("llama", "plain", {"num_items_in_batch": -5, "fused_lm_head": True}, "all", "num_items_in_batch=-5 must be"),
        ("llama", "plain", {"label": FAR}, "all", "label=Tensor [2, 37] is refused: did you mean labels?"),
        ("llama", "plain", {"labels": FAR}, "one", f"labels holds {VOCABULARY} at token 30 of row 1, neither in"),
        ("llama", "plain", {"output_router_logits": True}, "all", "LlamaForCausalLM has no router loss"),
        ("llama", "plain", {"labels": None}, "all", "labels are missing"),
        ("llama", "right padded", {"labels": None, "logits_to_keep": 2}, "all", "would return logits of padding"),
        (
            "llama",
            "plain",
            {"attention_mask": torch.ones(2, 1, LENGTH, LENGTH)},
            "all",
            "pass position_ids that restart",
        ),
        ("llama", "plain", {"past_key_values": 1}, "all", "a cache holds whole sequences"),
        ("mixtral", "plain", {"output_router_logits": False}, "one", "output_router_logits"),
        ("mixtral", "plain", {"attention_mask": BEHIND, "labels": None}, "one", "labels are missing"),
        (
            "gpt2",
            "plain",
            {"position_ids": torch.arange(5, 5 + LENGTH)[None]},
            "all",
            "first token away from position 0",
        ),
        ("gpt2", "left padded", {}, "all", "first token away from position 0"),
        ("llama4", "left padded", {}, "all", "first token away from position 0"),
    ],
)
def test_what_would_be_another_number_is_refused_on_all_ranks(pools, name, case, changes, calls, message):
    for text, works in pools(2).run(refused, name, case, changes, calls):
        assert message in text
        assert works


def put_wrong(what):
    """Return a rank's error after one mistake."""
    model = model_of("llama")
    if what == "weights" and dist.get_rank() == 1:
        model.lm_head.weight.data *= 1.2
    if what == "forward":
        model.forward = functools.partial(type(model).forward, model)
    if what == "FullyShardedDataParallel":  # it forwards attributes, so it seems to be the PEFT model inside
        adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
        model = FullyShardedDataParallel(adapted, use_orig_params=True, device_id=torch.device("cpu"))
        return refusal(hf.parallelize, model, timeout=10)
    if what in ("torch.compile", "DistributedDataParallel"):
        wrapper = torch.compile if what == "torch.compile" else torch.nn.parallel.DistributedDataParallel
        return refusal(hf.parallelize, wrapper(model), timeout=10)
    if what == "forward":
        return refusal(hf.parallelize, model, timeout=10)
    hf.parallelize(model, strategy=fixed_strategy(what), timeout=10)
    batch = plain()
    if what == "hook":
        model.lm_head.register_forward_hook(lambda module, args, out: 2 * out)
    return refusal(model, **batch)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("weights", "a sample of the weights"),
        ("forward", "in place of its class's forward"),
        ("hook", "has a hook"),
        pytest.param("torch.compile", "model is a OptimizedModule; pass a model of", marks=pytest.mark.long),
        ("FullyShardedDataParallel", "model is a FullyShardedDataParallel; pass a model of transformers, or a PEFT"),
        ("DistributedDataParallel", "model is a DistributedDataParallel; pass a model of transformers, or a PEFT"),
    ],
)
def test_a_mistake_is_refused_on_all_ranks(pools, what, message):
    for text in pools(2).run(put_wrong, what):
        assert message in text
        assert what != "weights" or ("broadcast rank 0's" in text and "whole batch" not in text)
