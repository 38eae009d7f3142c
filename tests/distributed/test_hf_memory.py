"""Recomputation, chunks of heads and tokens, and offload change no loss and no gradient of a parallelized model."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from burst_attention.integrations import hf
from burst_attention.integrations.hf.reading import known
from tests.distributed import test_hf_parallel
from tests.distributed.test_hf_parallel import BATCHES
from tests.support.conditioning import moved_copy, share_of_loss, worst_share
from tests.support.equal import check, equal, own_loss, stock_loss
from tests.support.hf_models import MIXED, SMALL, WHOLE_HEADS, WINDOW
from tests.support.hybrid_models import make_hybrid
from tests.tools import families

EAGER = {"experts_implementation": "eager", "num_experts_per_tok": 2}
LATENT = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": 12, "kv_lora_rank": 8} | EAGER
LATENT |= {"first_k_dense_replace": 1, "moe_intermediate_size": 16, "num_key_value_heads": 4}
LATENT |= {"n_group": 1, "n_routed_experts": 4, "topk_group": 1}
FAMILIES = {  # the settings of each that differ from SMALL
    "llama": {"attention_bias": True},
    "qwen3": {},
    "mistral": {"sliding_window": WINDOW},
    "gemma3_text": MIXED,
    "mixtral": EAGER | {"num_local_experts": 4, "output_router_logits": True, "sliding_window": None},
    "gemma2": MIXED,
    "gpt_oss": MIXED | EAGER | {"num_local_experts": 4},
    "phi3": {"pad_token_id": 0, "sliding_window": None},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "glm": {"head_dim": 8, "pad_token_id": 0},
    "phi": {"embd_pdrop": 0.0, "resid_pdrop": 0.0},
}


def model_of(name):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name](**SMALL | FAMILIES[name])
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().train()


def one_process(model, batch):
    """Return the stock model's loss. gpt-oss builds its masks without position ids, so documents would see another."""
    if model.config.model_type == "gpt_oss":
        kinds = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
        given = {"config": model.config, "inputs_embeds": model.get_input_embeddings()(batch["input_ids"])}
        given |= {"attention_mask": None, known.CACHE: None, "position_ids": batch.get("position_ids")}
        batch = batch | {"attention_mask": {kind: make(**given) for kind, make in kinds.items()}}
    return stock_loss(model, batch)


def step(name, memory, batch):
    how = {"strategy": WHOLE_HEADS, "gradients": "sum", "memory": memory}
    return equal(model_of(name), BATCHES[batch](), stock=one_process, **how)


SAME = {"loss": 1e-7, "gradient": 2e-6, "largest": 2e-6}


@pytest.mark.parametrize(
    ("name", "batch", "recompute", "chunks", "mlp_chunks", "offload"),
    [
        ("llama", "plain", "layer", 2, 3, False),
        ("gemma3_text", "plain", "layer", 4, 3, True),
        ("mixtral", "packed", "layer", 2, 3, False),
        ("deepseek_v3", "packed", "layer", 2, 2, False),
        ("llama", "plain", "none", 1, 2, False),
        ("llama", "plain", "keep-attention", 1, 2, True),
        *(
            pytest.param(name, "packed", "layer", chunks, 3, chunks == 4, marks=pytest.mark.long)
            for name, chunks in zip(
                ("qwen3", "mistral", "gemma2", "gpt_oss", "phi3", "deepseek_v2", "glm", "phi"), (4, 2) * 4, strict=True
            )
        ),
    ],
)
def test_memory_options_change_nothing(pools, tmp_path, name, batch, recompute, chunks, mlp_chunks, offload):
    where = f"disk:{tmp_path}" if offload else None
    memory = hf.Memory(recompute=recompute, attention_chunks=chunks, mlp_chunks=mlp_chunks, offload=where)
    check(*pools(3 if recompute != "layer" else 2).run(step, name, memory, batch), **SAME)


@pytest.mark.parametrize("name", ["kimi_linear", "minimax"])
def test_recurrent_layers_that_are_called_attention_have_no_chunks_of_heads(name):
    model, memory = make_hybrid(name, vocab_size=64), hf.Memory(attention_chunks=2)
    check(equal(model, BATCHES["plain"](), threads=1, stock=own_loss, memory=memory), **SAME)


def test_unparallelize_takes_the_options_away(tmp_path):
    model, kinds = model_of("mixtral"), {name: type(part) for name, part in model_of("mixtral").named_modules()}
    memory = hf.Memory(recompute="layer", attention_chunks=2, mlp_chunks=2, offload=f"disk:{tmp_path}")
    hf.unparallelize(hf.parallelize(model, memory=memory))
    assert {name: type(part) for name, part in model.named_modules()} == kinds
    assert not model.model.layers[0].gradient_checkpointing
    names = {name for module in model.modules() for name in vars(module)}
    assert not {"structures", "token_chunks", "_gradient_checkpointing_func"} & names


def test_other_gradient_checkpointing_is_refused():
    model = hf.parallelize(model_of("llama"), memory=hf.Memory(recompute="layer"))
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient_checkpointing=False"):
        model(**BATCHES["plain"]())


def with_adapters(memory):
    """Compare a model with LoRA on every projection."""
    torch.manual_seed(1)
    config = LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.0)
    model = get_peft_model(model_of("llama"), config).double()
    return equal(model, BATCHES["plain"](), memory=memory)


def test_adapters_in_chunks_of_heads(pools):
    memory = hf.Memory(recompute="layer", attention_chunks=4)
    check(*pools(2).run(with_adapters, memory), **SAME)


def wrapped(memory, way):
    """Return (loss, this rank's shards of gradients) in fp32: of a moved copy, without the options, with them twice."""
    results, plain = [], model_of("qwen3").float()
    for origin, options in ((moved_copy(plain), None), (plain, None), (plain, memory), (plain, memory)):
        model = hf.parallelize(copy.deepcopy(origin), strategy=WHOLE_HEADS, memory=options)
        if way == "ddp":
            model = torch.nn.parallel.DistributedDataParallel(model)
        for part in (*model.model.layers, model) if way == "fsdp2" else ():
            fully_shard(part)
        loss = model(**BATCHES["packed"]()).loss
        loss.backward()
        grads = {n: getattr(p.grad, "to_local", lambda p=p: p.grad)().clone() for n, p in model.named_parameters()}
        results.append((loss.item(), grads))
    return results


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_under_wrappers(pools, tmp_path, way):
    memory = hf.Memory(recompute="layer", attention_chunks=2, mlp_chunks=2, offload=f"disk:{tmp_path}")
    for moved, expected, found, again in pools(2).run(wrapped, memory, way):
        losses, gradients = zip(found, expected, moved, strict=True)
        assert share_of_loss(*losses) <= 1
        assert worst_share(*gradients) <= 1
        assert found[0] == again[0] and all(torch.equal(x, again[1][n]) for n, x in found[1].items())


def test_what_is_not_known_is_refused_by_name():
    none = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    gpt2 = GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, bos_token_id=0, eos_token_id=0, **none)
    )
    with pytest.raises(ValueError, match="how to split GPT2Attention: its parts are c_attn"):
        hf.parallelize(gpt2, memory=hf.Memory(attention_chunks=2))
    with pytest.raises(ValueError, match=r"mlp_chunks=...\) can't split Llama4TextMoe, whose experts take all tokens"):
        hf.parallelize(test_hf_parallel.model_of("llama4"), memory=hf.Memory(mlp_chunks=2))
    model = model_of("llama")
    with pytest.raises(ValueError, match=r"attention_chunks=3\) can't split the 4 query heads of LlamaAttention"):
        hf.parallelize(model, memory=hf.Memory(recompute="layer", attention_chunks=3, mlp_chunks=2))
    assert not model.model.layers[0].gradient_checkpointing, "it is left as it was"
    assert type(model.model.layers[0].mlp) is type(model_of("llama").model.layers[0].mlp)
    with pytest.raises(
        ValueError, match=r"no attention_chunks=2 for .*self_attn \(LlamaAttention\); use recompute='layer'"
    ):
        hf.parallelize(model, memory=hf.Memory(attention_chunks=2, recompute="keep-attention"))
    for options, why in (
        ({"mlp_chunks": 0}, "mlp_chunks=0 must be at least 1"),
        ({"recompute": "all"}, "recompute='all' is unknown"),
        ({"offload": "host"}, "add recompute='layer'"),
        ({"offload": "ssd", "recompute": "layer"}, r"offload='ssd'\) names no place"),
    ):
        with pytest.raises(ValueError, match=why):
            hf.Memory(**options)


@pytest.mark.parametrize("name", ["bert", "diffllama", "gemma4_unified_text"])
def test_attentions_whose_heads_do_not_run_apart_are_refused_by_name(name):
    """BERT's class around its attention has an attention's name; the others' code fails on some heads."""
    config, parts = families.built(name)
    model = families.model_of(name, config, "eager", parts)
    ids = torch.arange(16)[None]
    with pytest.raises(
        ValueError, match=r"memory=Memory\(attention_chunks=2\) does not know how to split \w+Attention: "
    ):
        hf.parallelize(model, memory=hf.Memory(attention_chunks=2))(input_ids=ids, labels=ids)
