"""Test whole logits, hidden states and embeddings as inputs over ranks: values and gradients are one process's."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from peft import PromptEncoderConfig, PromptTuningConfig, get_peft_model
from transformers import BertConfig, BertForMaskedLM, LlamaForSequenceClassification

from burst_attention import DisagreementError
from burst_attention.integrations import hf
from burst_attention.testing import WorkerError
from tests.distributed.test_hf_parallel import BATCHES, ids_of, model_of, plain, refusal
from tests.support.equal import check, equal, stock_loss
from tests.support.hf_models import SMALL, WHOLE_HEADS, fixed_strategy, make_model

LOSSES = ("labels", "shift_labels", "num_items_in_batch")
CASES = ["plain", "packed by row", "padded on both sides", "packed alike", "short"]


def inputs_of(batch):
    return {name: value for name, value in batch.items() if name not in LOSSES}


def real(batch):
    return batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()


def distance(logits, batch):
    """Return the divergence of fixed teachers from the student's logits, over real tokens."""
    generator = torch.Generator().manual_seed(5)
    teacher = torch.randn(logits.shape, generator=generator, dtype=torch.float64).log_softmax(-1)
    per_token = (teacher.exp() * (teacher - logits.log_softmax(-1))).sum(-1)
    return per_token[real(batch)].mean()


def distilled(name, case, reduction, labeled):
    batch, alone = BATCHES[case](), model_of(name)

    def stock(model, batch):
        logits = model(**inputs_of(batch), use_cache=False).logits
        return distance(logits, batch) + (stock_loss(model, batch) if labeled else 0)

    def call(model, batch):
        out = model(**(batch if labeled else inputs_of(batch)), logits="gather")
        logits = alone(**inputs_of(batch), use_cache=False).logits
        torch.testing.assert_close(out.logits[real(batch)], logits[real(batch)], rtol=2e-6, atol=2e-6)
        if labeled:
            assert torch.equal(model(**batch).loss, out.loss)  # not a bit differs when logits are gathered too
        return distance(out.logits, batch) + (out.loss if labeled else 0)

    return equal(alone, batch, stock=stock, call=call, strategy=fixed_strategy(name, case), gradients=reduction)


@pytest.mark.parametrize(
    ("world", "name", "case", "reduction", "labeled"),
    [
        *((2 + 2 * (n % 2), "llama", case, ("mean", "sum")[n % 2], n % 3 == 0) for n, case in enumerate(CASES)),
        *((4, "llama", "packed by row", reduction, True) for reduction in ("mean", "sum")),
        (2, "tied", "packed by row", "sum", True),
        (4, "gemma2", "packed by row", "mean", True),  # capped logits
        (2, "mixtral", "packed by row", "mean", True),
    ],
)
def test_a_distillation_on_whole_logits(pools, world, name, case, reduction, labeled):
    check(*pools(world).run(distilled, name, case, reduction, labeled), loss=1e-8, gradient=2e-6)


def probe():
    torch.manual_seed(7)
    return torch.nn.Linear(SMALL["hidden_size"], 3).double()


def probed(case, reduction, asked, memory=None):
    """Train a model and a probe of its middle layer."""
    batch, alone, own, other = BATCHES[case](), model_of("llama").train(), probe(), probe()
    seen = real(batch)

    def loss_of(states, probe):
        return probe(states[1])[seen].square().mean() + states[-1][seen].sin().mean()

    def stock(model, batch):
        own.zero_grad()
        out = model(**inputs_of(batch), use_cache=False, output_hidden_states=True)
        return loss_of(out.hidden_states, own) + stock_loss(model, batch)

    def call(model, batch):
        out = model(**batch, output_hidden_states=asked)
        expected = alone(**inputs_of(batch), use_cache=False, output_hidden_states=True).hidden_states
        assert [each is None for each in out.hidden_states] == [asked is not True and n not in (1, 2) for n in range(3)]
        for got, state in zip(out.hidden_states, expected, strict=True):
            if got is not None:
                torch.testing.assert_close(got[seen], state[seen], rtol=2e-6, atol=2e-6)
        return loss_of(out.hidden_states, other) + out.loss

    how = {"strategy": WHOLE_HEADS, "gradients": reduction, "memory": memory}
    found = equal(alone, batch, stock=stock, call=call, **how)
    for mine, its in zip(other.parameters(), own.parameters(), strict=True):  # whole on every rank, never to be summed
        torch.testing.assert_close(mine.grad, its.grad, rtol=2e-6, atol=2e-9)
    return found


@pytest.mark.parametrize(
    ("world", "case", "reduction", "asked", "memory"),
    [
        (2, "plain", "mean", True, None),
        (4, "packed by row", "sum", [1, -1], None),
        (4, "padded on both sides", "mean", True, None),
        (2, "packed by row", "sum", True, hf.Memory(recompute="layer")),
        (2, "plain", "mean", [1, -1], hf.Memory(recompute="keep-attention", attention_chunks=1, mlp_chunks=2)),
    ],
)
def test_a_probe_of_a_middle_layer(pools, world, case, reduction, asked, memory):
    check(*pools(world).run(probed, case, reduction, asked, memory), gradient=2e-6)


def soft_prompt():
    return torch.nn.Parameter(torch.randn(5, SMALL["hidden_size"], generator=torch.Generator().manual_seed(9)).double())


def prompted(model, batch):
    """Return the batch behind the model's learned prompt."""
    embeds, prompt = model.get_input_embeddings()(batch["input_ids"]), model.prompt
    rows = len(embeds)
    labels = torch.cat([torch.full((rows, len(prompt)), -100), batch["labels"]], 1)
    given = {"inputs_embeds": torch.cat([prompt.expand(rows, -1, -1), embeds], 1), "labels": labels}
    if "attention_mask" in batch:
        ones = torch.ones(rows, len(prompt), dtype=torch.long)
        given["attention_mask"] = torch.cat([ones, batch["attention_mask"]], 1)
    if "position_ids" in batch:
        begin = torch.arange(len(prompt)).expand(rows, -1)
        given["position_ids"] = torch.cat([begin, batch["position_ids"]], 1)
    return given


def embedded(name, case, reduction):
    alone = model_of(name)
    alone.prompt = soft_prompt()

    def stock(model, batch):
        return stock_loss(model, prompted(model, batch))

    def call(model, batch):
        return model(**prompted(model, batch)).loss

    how = {"strategy": fixed_strategy(name, case), "gradients": reduction}
    return equal(alone, BATCHES[case](), stock=stock, call=call, **how)


@pytest.mark.parametrize(
    ("world", "name", "case", "reduction"),
    [
        (2, "llama", "plain", "mean"),
        (4, "llama", "packed by row", "sum"),
        (4, "tied", "right padded", "mean"),
        (2, "gemma2", "packed", "sum"),  # scales its embeddings
        (4, "llama", "short", "sum"),
        (2, "gpt2", "plain", "mean"),  # learned positions
    ],
)
def test_a_soft_prompt_learns(pools, world, name, case, reduction):
    check(*pools(world).run(embedded, name, case, reduction), loss=1e-8, gradient=2e-6)


TUNED = {
    "prompt": lambda: PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    "p-tuning": lambda: PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=16, task_type="CAUSAL_LM"),
    "dropout": lambda: PromptEncoderConfig(
        num_virtual_tokens=4,
        encoder_hidden_size=16,
        encoder_reparameterization_type="LSTM",
        encoder_dropout=0.5,
        task_type="CAUSAL_LM",
    ),
}


def tuned(kind, case):
    model = make_model("llama", "sdpa", dtype=torch.float32, use_cache=False)
    torch.manual_seed(1)
    alone = get_peft_model(model, TUNED[kind]()).double().train()
    found = equal(alone, BATCHES[case](), prepare=lambda _: torch.manual_seed(dist.get_rank()) and None)
    return found, sum(bool(x.grad.any()) for x in alone.parameters() if x.grad is not None)


@pytest.mark.parametrize(
    ("kind", "world", "case"), [("prompt", 2, "right padded"), ("prompt", 4, "plain"), ("p-tuning", 2, "plain")]
)
def test_prompt_tuning_of_peft(pools, kind, world, case):
    for found, learned in pools(world).run(tuned, kind, case):
        check(found, loss=1e-8, gradient=2e-6)
        assert learned >= 1


def test_prompts_that_differ_between_ranks_are_refused(pools):
    with pytest.raises(WorkerError, match="the digest of inputs_embeds") as caught:
        pools(2).run(tuned, "dropout", "plain")
    assert set(map(type, caught.value.errors.values())) == {DisagreementError}


def bert():
    torch.manual_seed(0)
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {name: SMALL[name] for name in SMALL if name not in ("num_key_value_heads", "head_dim")}
    return BertForMaskedLM(BertConfig(**sizes | none, attn_implementation="sdpa")).double()


def classifier():
    model = make_model("llama", "sdpa")
    torch.manual_seed(0)
    return LlamaForSequenceClassification(model.config).double()


def custom():
    model = model_of("llama")
    model.loss_function = lambda logits, labels, vocab_size, **_: logits[..., :5].square().mean()
    return model


WHOLE = {"bert": bert, "classifier": classifier, "custom loss": custom}


def around(what, reduction):
    """Compare a loss on logits, hidden states and embeddings of a model whose own forward runs."""
    alone = WHOLE[what]()
    alone.prompt = soft_prompt()

    def loss_of(model, ids, **asked):
        embeds = torch.cat([model.prompt.expand(2, -1, -1), model.get_input_embeddings()(ids)], 1)
        given = {"labels": torch.zeros(embeds.shape[:2], dtype=torch.long)} if what == "custom loss" else {}
        out = model(inputs_embeds=embeds, output_hidden_states=True, **given, **asked)
        loss = out.logits.square().mean() + out.hidden_states[1].sin().mean() + out.hidden_states[-1].cos().mean()
        return loss if out.loss is None else loss + out.loss

    gathered = partial(loss_of, logits="gather")
    return equal(alone, ids_of(2), stock=loss_of, call=gathered, gradients=reduction, dtype=torch.float32)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("what", WHOLE)
def test_models_whose_own_forward_runs(pools, what, reduction):
    check(*pools(3).run(around, what, reduction), loss=2e-6, gradient=2e-6)


def asked_wrongly(name, changes, calls):
    model, batch = hf.parallelize(model_of(name), strategy=fixed_strategy(*changes), timeout=10), plain()
    if calls == "all" or dist.get_rank() == 1:
        batch |= changes
    return refusal(model, **batch), model(**plain()).loss.item() > 0


@pytest.mark.parametrize(
    ("changes", "calls", "message"),
    [
        ({"logits": "gather"}, "one", "logits"),
        ({"output_hidden_states": True}, "one", "output_hidden_states"),
        ({"output_hidden_states": "all"}, "all", "output_hidden_states='all' must be True, False, or the numbers"),
        ({"output_hidden_states": [1, 7]}, "all", "output_hidden_states=[1, 7] has 7, but LlamaForCausalLM has states"),
        ({"logits": "shard"}, "all", "logits='shard' is unknown; pass logits='gather'"),
        ({"logits": "gather", "logits_to_keep": 2}, "all", "logits_to_keep=2 and logits='gather' are both given"),
        ({"logits": "gather", "fused_lm_head": True}, "one", "fused_lm_head=True and logits='gather' are both given"),
        ({"inputs_embeds": torch.zeros(2, 37, 32)}, "one", "input_ids and inputs_embeds are both given"),
        ({"inputs_embeds": torch.zeros(2, 3), "input_ids": None}, "one", "pass [batch, sequence, hidden]"),
        ({"inputs_embeds": torch.zeros(2, 37, 32).long(), "input_ids": None}, "all", "floating-point"),
        ({"input_ids": None}, "all", "or inputs_embeds"),
    ],
)
def test_wrong_requests_are_refused_on_all_ranks(pools, changes, calls, message):
    for text, works in pools(2).run(asked_wrongly, "llama", changes, calls):
        assert message in text
        assert works
