"""Greedy search over a shared head: the tokens of whole logits, which ranks gather only if something reads them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import GenerationConfig, GenerationMixin, LogitsProcessor, LogitsProcessorList, StoppingCriteria

from burst_attention.attention.dealt import dealt_bytes
from burst_attention.comm.transport import Transport
from burst_attention.inference import ARGMAX_BYTES, ShardedCache, columns
from burst_attention.inference.weights import step_bytes
from burst_attention.loss import LogitForm
from tests.distributed.test_shared_weights import long, made, shared_model
from tests.support.generating import ids_of, labels_sent
from tests.support.hf_models import VOCABULARY

NEW = 6
PLAIN = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None}
ARGMAX, LOGITS = "a step, the argmax of lm_head", "a step, the columns of lm_head"


class Counts:
    """A streamer that notes the bytes that a cache's rank has sent when a token comes."""

    def __init__(self, cache):
        self.cache, self.sent = cache, []

    def put(self, value):
        self.sent.append(self.cache.sent)

    def end(self):
        pass


def searched(model, cache, ids, *args, **options):
    """Return the tokens, and which exchange each step's head had."""
    with pytest.MonkeyPatch.context() as patch:
        labels = labels_sent(patch, Transport)
        out = model.generate(ids, *args, past_key_values=cache, **PLAIN | options)
    ours = [label for rank, label in labels if label in (ARGMAX, LOGITS)]
    assert len(ours) == NEW * (cache.transport.world - 1)
    return getattr(out, "sequences", out), set(ours)


def plainly(name, ids, mask):
    model, cache = shared_model(name)
    counts = Counts(cache)
    tokens, heads = searched(model, cache, ids, attention_mask=mask, streamer=counts)
    later = {after - before for before, after in zip(counts.sent[2:], counts.sent[3:], strict=False)}
    return tokens, heads, later, step_bytes(model, batch=len(ids)), step_bytes(model, batch=len(ids), logits=True)


def padded(rows, count, padding):
    """Return ids, and a mask that leaves columns out in front of the last row."""
    mask = torch.ones(rows, count, dtype=torch.long)
    mask[-1, :padding] = 0
    return ids_of(count, rows) * mask, mask


@pytest.mark.parametrize(
    ("name", "world", "rows", "count", "padding"),
    [
        ("llama", 2, 1, 70, 0),
        ("llama", 3, 2, 7, 3),
        ("gemma3", 3, 1, 70, 0),  # embeddings and head are one weight
        ("gemma2", 2, 1, 70, 0),  # capped
        ("phi", 2, 1, 70, 0),  # its head has a bias
        long("cohere2", 3, 2, 100, 5),  # scaled
        long("lora of q and v", 2, 1, 70, 0),
        long("deepseek_v3", 2, 1, 70, 0),
        long("gpt_oss", 3, 1, 70, 0),
        long("lfm2", 2, 1, 70, 0),
        long("lfm2_moe", 2, 1, 70, 0),  # its experts stay with FSDP2, whose hooks are on the model
    ],
)
def test_tokens_are_those_of_whole_logits(pools, name, world, rows, count, padding):
    ids, mask = padded(rows, count, padding)
    alone = made(name, "eager")
    expected = alone.generate(ids, attention_mask=mask, **PLAIN)
    assert name != "gemma3" or alone.lm_head.weight is alone.model.embed_tokens.weight
    sizes = {"q_heads": 4, "v_head_dim": 8, "dtype": torch.float32}
    of_layer = dealt_bytes(world=world, batch=rows, queries=1, **sizes)
    for tokens, heads, later, predicted, with_logits in pools(world).run(plainly, name, ids, mask):
        assert torch.equal(tokens, expected)
        assert heads == {ARGMAX}
        if name in ("llama", "gemma3", "gemma2", "phi"):
            assert later == {2 * of_layer + predicted}
            own = with_logits - predicted + (world - 1) * rows * ARGMAX_BYTES
            assert own // ((world - 1) * rows * 4) in {len(each) for each in columns.rows_of(VOCABULARY, world)}


class Shifts(LogitsProcessor):
    """Makes a step's least likely token the most likely."""

    def __call__(self, input_ids, scores):
        return -scores


class Never(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(len(input_ids), dtype=torch.bool)


def upper_half(batch, sent):
    return [*range(VOCABULARY // 2, VOCABULARY)]


def watch(model):
    """A hook that makes the least likely token the most likely."""

    def turn_round(module, args, out):
        out.logits = -out.logits

    return model.register_forward_hook(turn_round)


def turned_round(model, *args, **kwargs):
    """What a class may have in place of ``nn.Module.__call__``."""
    out = nn.Module.__call__(model, *args, **kwargs)
    out.logits = -out.logits
    return out


# What reads or changes logits, each so that it matters, by arguments of ``generate``.
READERS = {
    "output_logits": {"output_logits": True, "return_dict_in_generate": True},
    "output_scores": {"output_scores": True, "return_dict_in_generate": True},
    "repetition_penalty": {"repetition_penalty": 9.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "suppress_tokens": {"suppress_tokens": [*range(VOCABULARY // 2)]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [*range(VOCABULARY // 2, VOCABULARY)]},
    "bad_words_ids": {"bad_words_ids": [[n] for n in range(VOCABULARY // 2)]},
    "sequence_bias": {"sequence_bias": {(3,): 1e3}},
    "forced_eos_token_id": {"forced_eos_token_id": 5},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": upper_half},
    "generation_config": {"generation_config": GenerationConfig(repetition_penalty=9.0)},
    "logits_processor": {"logits_processor": [Shifts()]},
    "stopping_criteria": {"stopping_criteria": [Never()]},
    "logits_to_keep": {"logits_to_keep": 1},
}
SAME = {"output_logits", "output_scores", "stopping_criteria", "logits_to_keep"}  # tokens are those of a plain search


def read():
    """Return tokens and exchanges by reader: of generate's arguments, by position, and of a hook on the model."""
    model, _ = shared_model("llama")
    found = {
        name: searched(model, ShardedCache(model.config, timeout=30), ids_of(70), **how)
        for name, how in READERS.items()
    }
    cache = ShardedCache(model.config, timeout=30)
    found["by position"] = searched(model, cache, ids_of(70), None, [Shifts()])
    hook, cache = watch(model), ShardedCache(model.config, timeout=30)
    found["a hook"] = searched(model, cache, ids_of(70))
    hook.remove()
    for name, *how in (
        ("another package", GenerationMixin, "_get_logits_processor", lambda *_, **__: LogitsProcessorList([Shifts()])),
        ("a call of its own", type(model), "__call__", turned_round),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*how)
            found[name] = searched(model, ShardedCache(model.config, timeout=30), ids_of(70))
    found["nothing"] = searched(model, ShardedCache(model.config, timeout=30), ids_of(70), temperature=0.3, top_k=2)
    return found


def test_what_reads_logits_gets_them(pools):
    model, ids = made("llama", "eager"), ids_of(70)
    expected = {name: model.generate(ids, **PLAIN | how) for name, how in READERS.items()}
    changed = ("by position", "a hook", "another package", "a call of its own")
    expected |= dict.fromkeys(changed, expected["logits_processor"])
    plain = expected["nothing"] = model.generate(ids, **PLAIN)
    for found in pools(2).run(read):
        for name, (tokens, heads) in found.items():
            wanted = getattr(expected[name], "sequences", expected[name])
            assert torch.equal(tokens, wanted), name
            assert heads == {ARGMAX if name == "nothing" else LOGITS}, name
            assert torch.equal(wanted, plain) == (name in SAME | {"nothing"}), f"{name} has no effect"


class Calls:
    """A streamer that calls the model itself while it generates."""

    def __init__(self, model):
        self.model, self.logits = model, []

    def put(self, value):
        cache = ShardedCache(self.model.config, timeout=30)
        with torch.no_grad():
            self.logits.append(self.model(ids_of(9), past_key_values=cache, logits_to_keep=1).logits)

    def end(self):
        pass


def called_inside():
    model, cache = shared_model("llama")
    calls = Calls(model)
    tokens = model.generate(ids_of(70), past_key_values=cache, streamer=calls, **PLAIN)
    calls.put(None)
    return tokens, calls.logits


def test_another_call_of_the_model_gets_logits(pools):
    model = made("llama", "eager")
    expected = model(ids_of(9)).logits[:, -1:]
    for tokens, logits in pools(2).run(called_inside):
        assert torch.equal(tokens, model.generate(ids_of(70), **PLAIN))
        assert len(logits) == NEW + 2
        for each in logits:
            torch.testing.assert_close(each, expected, rtol=0, atol=1e-5)


def one_reads():
    model, cache = shared_model("llama")
    more = {"logits_processor": [Shifts()]} if dist.get_rank() else {}
    with pytest.raises(ValueError) as caught:
        model.generate(ids_of(70), past_key_values=cache, **PLAIN | more)
    return str(caught.value), cache.sent


def test_ranks_agree_on_who_reads_logits(pools):
    for error, sent in pools(2).run(one_reads):
        assert "whether a step gathers logits: rank 0 has False, rank 1 has True" in error
        assert sent == 0


NAN, INF = float("nan"), float("inf")
# Heads of one column, by the weights of some tokens; the rest have -1. Then the token, for an input of 1.
HEADS = {
    "the greatest": ({9: 3, 60: 2}, 9),
    "on the last rank": ({9: 2, 63: 3}, 63),
    "a tie of one rank": ({20: 3, 12: 3}, 12),
    "a tie of two ranks": ({50: 3, 12: 3}, 12),
    "all alike": ({}, 0),
    "zeros of both signs": ({50: 0.0, 12: -0.0}, 12),
    "one NaN": ({12: 3, 50: NAN}, 50),
    "two NaN": ({40: NAN, 63: NAN, 1: INF}, 40),
    "infinities": ({63: INF, 33: INF, 2: 1e38}, 33),
    "nothing is possible": (dict.fromkeys(range(VOCABULARY), -INF), 0),
}
FORMS = {"as it is": LogitForm(), "capped": LogitForm(2.0, 3.0), "turned round": LogitForm(-1.0)}


def argmax_of_heads(dtype):
    """Return tokens by head and form: by the exchange of maxima, and of the logits of all ranks."""
    model, _ = shared_model("llama")
    head, shared, found = model.lm_head, model._burst.shared, {}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.ones(2, 1, 1, dtype=dtype)
    for name, (weights, _) in HEADS.items():
        weight = torch.full((VOCABULARY, 1), -1.0, dtype=dtype)
        for token, value in weights.items():
            weight[token] = value
        head._parameters["weight"] = columns.cut_weight(nn.Parameter(weight, requires_grad=False), mesh)
        for way, form in FORMS.items():
            whole = form.apply_(shared.product(head, x)).float().argmax(-1)
            found[name, way] = shared.argmax(head, x, form.apply_), whole
    return found


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.long)])
@pytest.mark.parametrize("world", [2, 3])
def test_the_argmax_is_that_of_all_logits(pools, world, dtype):
    for found in pools(world).run(argmax_of_heads, dtype):
        assert len(found) == len(HEADS) * len(FORMS)
        for (name, way), (token, whole) in found.items():
            assert token.dtype == torch.int64 and torch.equal(token, whole), (name, way)
            if way == "as it is":
                assert token.flatten().tolist() == 2 * [HEADS[name][1]], name


def tie_in_fp32():
    """Two logits in fp64 that are equal in fp32, in which generate compares them."""
    model, _ = shared_model("llama")
    head, shared = model.lm_head, model._burst.shared
    weight = torch.zeros(VOCABULARY, 1, dtype=torch.float64)
    weight[50], weight[5] = 1 + 1e-12, 1
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    head._parameters["weight"] = columns.cut_weight(nn.Parameter(weight, requires_grad=False), mesh)
    return shared.argmax(head, torch.ones(1, 1, 1, dtype=torch.float64), LogitForm().apply_).item()


def test_logits_are_compared_in_fp32(pools):
    assert pools(2).run(tie_in_fp32) == [5, 5]
