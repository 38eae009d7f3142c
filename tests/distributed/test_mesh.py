"""Test tensor parallelism beside context parallelism and FSDP2: loss, gradients and tokens are one process's."""

import copy
import functools
import unittest.mock
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from burst_attention import make_plan
from burst_attention.inference import ShardedCache
from burst_attention.integrations import hf
from burst_attention.integrations.hf.tensor import parts as tensor_parts
from burst_attention.integrations.hf.tensor import styles as tensor_styles
from burst_attention.loss import next_token_loss
from tests.distributed.test_hf_parallel import packed, plain
from tests.support.conditioning import greatest, moved_copy, share_of_loss, worst_share
from tests.support.equal import Alone, check, step_of
from tests.support.hf_models import MIXED, SMALL, VOCABULARY, WHOLE_HEADS, make_model
from tests.tools.families import model_class

NAMES = ("dp", "cp", "tp")
RECURRENT = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {
    "llama": ("llama", {"vocab_size": VOCABULARY + 3}),  # not divisible by the ranks
    "tied": ("llama", {"tie_word_embeddings": True}),
    "wide": ("llama", {"num_key_value_heads": 4, "attention_bias": True}),
    "sinks": ("gpt_oss", MIXED | EXPERTS | {"num_key_value_heads": 4}),
    "normed": ("qwen3", {"num_key_value_heads": 4}),
    "biased": ("qwen2", {}),
    "mistral": ("mistral", {"sliding_window": 7}),
    "mixtral": ("mixtral", EXPERTS),
    "idle": ("mixtral", EXPERTS),  # all tokens choose the same experts
    "phi3": ("phi3", {"bos_token_id": 1, "eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3_text", MIXED | {"final_logit_softcapping": 2.0}),
    "gpt_oss": ("gpt_oss", MIXED | EXPERTS),
    "qwen3_5": ("qwen3_5_text", RECURRENT),
}


def model_of(name, dtype=torch.float64, **changes):
    """The same random weights on every rank."""
    kind, own = MODELS[name]
    sizes = SMALL | {"attn_implementation": "eager", "experts_implementation": "eager", "pad_token_id": 0}
    config = CONFIG_MAPPING[kind](**sizes | own | changes)
    torch.manual_seed(0)
    model = model_class(kind)(config).to(dtype)
    for parameter in model.parameters():  # so large that sinks, norms and biases matter
        torch.nn.init.normal_(parameter, std=0.2)
    for layer in model.model.layers if name == "idle" else ():
        torch.nn.init.zeros_(layer.mlp.gate.weight)
    return model


@functools.cache
def mesh_of(dp, cp, tp):
    """The mesh of a process: its groups are made once."""
    return init_device_mesh("cpu", (dp, cp, tp), mesh_dim_names=NAMES)


def meshed(name, sizes, dtype=torch.float64, *, shards=False, group="cp", memory=None, by_context=False, **changes):
    """Return a model over a mesh, and the mesh.

    ``shards``: by FSDP2 over the axes of data and context. ``by_context``: the ranks of a context share the experts.
    """
    mesh = mesh_of(*sizes)
    model = model_of(name, dtype, **changes)
    hf.tensor_parallel(model, mesh["tp"], experts=mesh["cp", "tp"]._flatten("ep") if by_context else None)
    strategy = None if name in ("llama", "qwen3_5") else WHOLE_HEADS  # None: the planner chooses
    hf.parallelize(model, mesh[group], strategy=strategy, timeout=30, memory=memory)
    if shards:
        over = mesh["dp", "cp"]._flatten("fsdp")
        for layer in model.model.layers:
            if by_context:
                fully_shard(layer.mlp.experts, mesh=mesh["dp"])
            fully_shard(layer, mesh=over)
        fully_shard(model, mesh=over)
    return model, mesh


def whole_gradients(model, mesh, *, shards):
    """Return the gradients of whole weights, a mean over data and context."""
    found = {}
    for name, x in model.named_parameters():
        grad = x.grad
        if grad is None:
            continue
        if not shards:
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            whole = isinstance(grad, DTensor) and grad.device_mesh.mesh_dim_names == ("ep",)
            for axis in ("dp",) if whole else ("dp", "cp"):
                dist.all_reduce(local, group=mesh[axis].get_group())
                local /= mesh[axis].size()
        found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


def batch_of(case, step):
    batch = {"plain": plain, "packed": functools.partial(packed, (11, 20, 6), (37,))}[case]()
    generator = torch.Generator().manual_seed(step)
    fresh = torch.randint(1, VOCABULARY, batch["input_ids"].shape, generator=generator)
    batch["labels"] = fresh.masked_fill(batch["labels"] == -100, -100)
    return batch | {"input_ids": fresh}


def stock_loss(model, batch):
    return model(**batch, use_cache=False).loss


def trained(
    name, sizes, case, shards, steps=2, accumulate=1, memory=None, dtype=torch.float64, own=None, clip=None, **options
):
    """Return losses and the worst gradients as shares of their bounds; with ``clip`` the worst weight at the end.

    A moved copy of the reference takes the same steps, which gives the bounds.
    """
    changes, shares = own or {}, []
    one = model_of(name, dtype, **changes)
    moved = moved_copy(one)
    model, mesh = meshed(name, sizes, dtype, shards=shards, memory=memory, **options, **changes)
    model.train()
    optimizers = [torch.optim.SGD(part.parameters(), 0.05) for part in (one, moved, model)]
    groups, mine = sizes[0], mesh["dp"].get_local_rank()
    for step in range(steps):
        for part in range(accumulate):
            rows = [batch_of(case, step * 64 + part * 8 + group) for group in range(groups)]
            losses = []
            for reference in (one, moved):
                of_groups = [stock_loss(reference, batch) for batch in rows]
                (sum(of_groups) / groups).backward()
                losses.append(of_groups[mine].item())
            loss = model(**rows[mine]).loss
            loss.backward()
            shares.append(share_of_loss(loss.item(), *losses))
        if clip is None:
            found = whole_gradients(model, mesh, shards=shards)
            shares.append(worst_share(found, gradients(one), gradients(moved)))
        else:
            for reference in (one, moved):
                torch.nn.utils.clip_grad_norm_(reference.parameters(), clip)
            hf.clip_grad_norm_(model.parameters(), clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if clip is not None:
        found = {key: x.full_tensor() for key, x in model.named_parameters()}
        shares.append(worst_share(found, weights_of(one), weights_of(moved)))
    return shares


def weights_of(model):
    return {key: x.detach() for key, x in model.named_parameters()}


def gradients(one):
    return {name: x.grad for name, x in one.named_parameters()}


def within(of_ranks):
    """Check shares of bounds on all ranks."""
    assert all(shares and all(share <= 1 for share in shares) for shares in of_ranks), of_ranks


@pytest.mark.parametrize(
    ("name", "sizes", "case", "shards"),
    [
        ("llama", (1, 2, 2), "packed", False),
        ("llama", (2, 1, 2), "plain", True),
        ("tied", (1, 2, 2), "packed", True),
        ("biased", (1, 2, 2), "packed", False),
        ("mistral", (1, 2, 2), "plain", True),
        ("mixtral", (1, 2, 2), "packed", True),
        ("phi3", (1, 2, 2), "packed", False),
        ("qwen3", (1, 2, 2), "packed", True),
        ("gemma3", (1, 2, 2), "packed", False),
        ("gpt_oss", (1, 2, 2), "plain", True),
        ("gpt_oss", (1, 2, 2), "plain", False),
        ("qwen3_5", (1, 2, 2), "plain", False),
    ],
)
def test_steps_over_a_mesh_are_one_process(pools, name, sizes, case, shards):
    within(pools(4).run(trained, name, sizes, case, shards))


@pytest.mark.parametrize(
    ("name", "sizes", "case"),
    [("llama", (1, 1, 2), "packed"), ("qwen3", (2, 2, 1), "plain"), ("llama", (1, 3, 2), "packed")],
)
def test_other_sizes_of_the_mesh(pools, name, sizes, case):
    within(pools(sizes[0] * sizes[1] * sizes[2]).run(trained, name, sizes, case, True))


ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.3}


@pytest.mark.parametrize(
    ("name", "sizes", "case", "shards", "own", "memory"),
    [
        ("mixtral", (1, 2, 2), "packed", True, ROUTED, hf.Memory(recompute="layer")),
        ("mixtral", (2, 2, 1), "packed", True, {"experts_implementation": "grouped_mm"}, None),
        ("gpt_oss", (1, 2, 2), "plain", False, {}, None),
        ("gpt_oss", (1, 4, 1), "plain", True, {}, None),
    ],
)
def test_ranks_of_a_context_share_experts(pools, name, sizes, case, shards, own, memory):
    dtype = torch.float32 if "experts_implementation" in own else torch.float64
    asked = (name, sizes, case, shards, 2, 2, memory, dtype, own)
    within(pools(4).run(functools.partial(trained, *asked, by_context=True)))


@pytest.mark.parametrize(
    ("by_context", "shards", "memory"),
    [
        (False, False, None),
        (True, True, None),
        (False, True, hf.Memory(recompute="layer")),
        (True, False, hf.Memory(recompute="layer")),
        (False, False, hf.Memory(recompute="keep-attention", mlp_chunks=2)),
        (True, True, hf.Memory(recompute="keep-attention")),
    ],
)
def test_ranks_whose_experts_get_no_token(pools, by_context, shards, memory):
    """Their outputs are zeros, from which no gradient flows and of which a checkpoint need not save anything.

    The other ranks would wait for their sums, in a backward and where it computes a layer again.
    """
    asked = ("idle", (1, 2, 2), "plain", shards, 1, 1, memory)
    within(pools(4).run(functools.partial(trained, *asked, by_context=by_context)))


def apart(alone, model, mesh, batch, *, shards=False):
    """Return how far a step over a mesh is from one process's."""
    reference, (loss, _) = Alone(alone, batch, stock_loss), step_of(model, batch)
    return reference.apart([loss], whole_gradients(model, mesh, shards=shards))


def summed_over_a_context(first, second):
    """Parallelize again with the other ``gradients``."""
    mesh, batch = mesh_of(1, 2, 2), batch_of("plain", 1)
    model = hf.tensor_parallel(model_of("mixtral"), mesh["tp"], experts=mesh["cp", "tp"]._flatten("ep"))
    hf.unparallelize(hf.parallelize(model, mesh["cp"], gradients=first, timeout=30))
    hf.parallelize(model, mesh["cp"], gradients=second, timeout=30)
    alone, (loss, own) = Alone(model_of("mixtral"), batch, stock_loss), step_of(model, batch)
    for name, grad in own.items():
        if second == "sum" and "experts" not in name:
            grad *= mesh["cp"].size()  # a sum over the context, less the mean that follows
    return alone.apart([loss], whole_gradients(model, mesh, shards=False))


@pytest.mark.parametrize(("first", "second"), [("mean", "sum"), ("sum", "mean")])
def test_gradients_of_shared_experts_are_whole(pools, first, second):
    check(*pools(4).run(summed_over_a_context, first, second))


@pytest.mark.parametrize("shards", [False, True])
def test_gradients_accumulate(pools, shards):
    """transformers' style of q_norm and k_norm sums earlier backwards again: 2.33 times three of them."""
    within(pools(4).run(trained, "qwen3", (1, 2, 2), "packed", shards, 2, 3))


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("qwen3", hf.Memory(recompute="layer")),
        ("llama", hf.Memory(recompute="keep-attention", mlp_chunks=2)),
        ("wide", hf.Memory(recompute="layer", attention_chunks=2)),
        ("normed", hf.Memory(attention_chunks=2, mlp_chunks=3)),
        ("sinks", hf.Memory(attention_chunks=2)),
    ],
)
def test_less_memory_over_a_mesh(pools, name, memory):
    case = "plain" if name == "sinks" else "packed"  # packed documents see each other in the stock model
    within(pools(4).run(trained, name, (1, 2, 2), case, True, 2, 1, memory))


def calls_of_a_part():
    """Count products with a rank's part of weights, without and with chunks of tokens."""
    found = []
    for memory in (None, hf.Memory(mlp_chunks=2)):
        model, _ = meshed("llama", (1, 2, 2), memory=memory)
        with unittest.mock.patch.object(tensor_styles, "part", side_effect=tensor_styles.part) as part, torch.no_grad():
            model(**batch_of("plain", 0))
        found.append(part.call_count)
    return found


def test_chunks_of_tokens_reach_the_parts(pools):
    for once, twice in pools(4).run(calls_of_a_part):
        assert twice == once + 2 * 5  # gate and up: weight and bias; down: weight; in two layers


def chunks_of_a_part():
    """Count the whole weights that chunks of heads use, whose gradients are summed over the axis."""
    model, _ = meshed("normed", (1, 2, 2), memory=hf.Memory(attention_chunks=2))
    with unittest.mock.patch.object(tensor_parts, "used", side_effect=tensor_parts.used) as used, torch.no_grad():
        model(**batch_of("plain", 0))
    return used.call_count


def test_chunks_of_heads_are_of_the_parts(pools):
    assert pools(4).run(chunks_of_a_part) == [2 * 2 * 2] * 4  # norms of q and k; compared once; two layers


def changed_after_a_call(name):
    """Change the scaling of each attention, computed in chunks, after a call."""
    alone, batch = model_of(name), batch_of("plain", 0)
    model, mesh = meshed(name, (1, 2, 2), memory=hf.Memory(attention_chunks=2))
    with torch.no_grad():
        model(**batch)
    for layer in (*alone.model.layers, *model.model.layers):
        layer.self_attn.scaling *= 2.0
    return apart(alone, model, mesh, batch)


def test_chunks_of_heads_follow_a_change_over_a_mesh(pools):
    check(*pools(4).run(changed_after_a_call, "sinks"))


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_the_loss_of_a_router(pools, implementation):
    own = {"output_router_logits": True, "router_aux_loss_coef": 0.3, "experts_implementation": implementation}
    dtype = torch.float64 if implementation == "eager" else torch.float32
    within(pools(4).run(trained, "mixtral", (1, 2, 2), "plain", False, 2, 1, None, dtype, own))


def after_twenty_steps(name, sizes, case, by_context=False):
    """Train 20 steps with clipping; return what ``trained`` does."""
    own = {"experts_implementation": "grouped_mm"} if name in ("mixtral", "gpt_oss") else {}
    return trained(name, sizes, case, True, 20, dtype=torch.float32, own=own, by_context=by_context, clip=1.0)


EVERY = [(1, 2, 2), (2, 2, 1), (1, 1, 2), (2, 1, 2), (1, 3, 2)]
WITHOUT_DOCUMENTS = ("gpt_oss", "qwen3_5")  # the stock model lets packed documents see each other


@pytest.mark.parametrize(
    ("name", "sizes", "case"),
    [
        ("mixtral", (1, 2, 2), "packed"),
        ("gpt_oss", (1, 2, 2), "plain"),
        *(
            pytest.param(name, sizes, case, marks=pytest.mark.slow)
            for sizes in EVERY
            for name in ("llama", "qwen3", "gemma3", "gpt_oss", "qwen3_5", "phi3")
            for case in ("plain", "packed")
            if case == "plain" or name not in WITHOUT_DOCUMENTS
        ),
    ],
)
def test_twenty_steps_in_fp32(pools, name, sizes, case):
    within(pools(sizes[0] * sizes[1] * sizes[2]).run(after_twenty_steps, name, sizes, case))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 2, 1), (1, 4, 1)])
@pytest.mark.parametrize(("name", "case"), [("mixtral", "packed"), ("mixtral", "plain"), ("gpt_oss", "plain")])
def test_twenty_steps_with_experts_shared_by_context(pools, name, sizes, case):
    within(pools(4).run(after_twenty_steps, name, sizes, case, True))


def stock_values(one, batch):
    """Return whole logits, hidden states, values of each token and gradients of a stock model, by name."""
    stock = one(**batch, use_cache=False, output_hidden_states=True)
    (stock.logits.float().sin().sum() + stock.loss).backward()
    found = {"logits": stock.logits, "hidden": stock.hidden_states[1]} | taken_gradients("a loss of logits", one)
    log_p = one(**batch, use_cache=False).logits[:, :-1].double().log_softmax(-1)
    p, label = log_p.exp(), batch["labels"][:, 1:]
    seen, chosen = label != -100, log_p.gather(-1, label.clamp(min=0)[..., None]).squeeze(-1)
    entropy = -(p * log_p).sum(-1)
    found |= {"log_probs": chosen[seen], "entropy": entropy[seen], "squares": p.square().sum(-1).log()[seen]}
    (of_tokens(chosen, entropy, seen)).backward()
    found |= taken_gradients("a loss of tokens", one)
    found["last"] = one(batch["input_ids"]).logits[:, -3:]
    return found, (log_p.argmax(-1) == label)[seen]


def mesh_values(model, mesh, batch):
    """Return the same of a model over a mesh."""

    def taken(name):
        gradients = {f"{name}, {key}": x.clone() for key, x in whole_gradients(model, mesh, shards=False).items()}
        model.zero_grad()
        return gradients

    out = model(**batch, logits="gather", output_hidden_states=True)
    (out.logits.float().sin().sum() + out.loss).backward()
    found = {"logits": out.logits, "hidden": out.hidden_states[1]} | taken("a loss of logits")
    fields = model(**batch, fused_lm_head=True)
    seen = fields.label_mask
    found |= {"log_probs": fields.log_probs[seen], "entropy": fields.entropy[seen]}
    found["squares"] = fields.log_sum_sq_probs[seen]
    of_tokens(fields.log_probs, fields.entropy, seen).backward()
    found |= taken("a loss of tokens")
    found["last"] = model(input_ids=batch["input_ids"], logits_to_keep=3).logits
    return found, fields.is_top1[seen]


def of_tokens(log_probs, entropy, seen):
    """Return a loss in which every token has another weight."""
    weights = torch.linspace(-1, 1, seen.numel(), dtype=torch.float64).view(seen.shape)
    return ((log_probs + 0.3 * entropy) * weights * seen).sum()


def taken_gradients(name, one):
    """Return the gradients of a stock model by new names, and forget them."""
    taken = {f"{name}, {key}": x.clone() for key, x in gradients(one).items()}
    one.zero_grad()
    return taken


def per_token():
    """Return the worst value or gradient, as a share of its bound, and whether the top tokens are equal."""
    batch, one = batch_of("packed", 3), model_of("gemma3")
    moved = moved_copy(one)
    model, mesh = meshed("gemma3", (1, 2, 2))
    (wanted, top), (other, _), (found, ours) = (
        stock_values(one, batch),
        stock_values(moved, batch),
        mesh_values(model, mesh, batch),
    )
    return worst_share(found, wanted, other), torch.equal(ours, top)


def test_values_of_every_token(pools):
    for share, equal in pools(4).run(per_token):
        assert share <= 1
        assert equal


def with_its_own_loss():
    """Train with a loss of the caller's on whole logits, which the cut head gathers itself."""
    alone, (model, mesh) = model_of("llama"), meshed("llama", (1, 2, 2))
    for part in (alone, model):
        part.loss_function = lambda logits, labels, **_: logits.double().sin().mean() + labels.double().mean()
    return apart(alone, model, mesh, batch_of("plain", 5))


def test_a_loss_of_the_callers(pools):
    check(*pools(4).run(with_its_own_loss))


def generated(name, sizes, by_context):
    """Return whether tokens over the mesh are one process's: with a sharded cache, with sampling, and without."""
    one = model_of(name).eval()
    model, mesh = meshed(name, sizes, by_context=by_context)
    model.eval()
    ids = torch.randint(1, VOCABULARY, (2, 70), generator=torch.Generator().manual_seed(4))
    settings = {"max_new_tokens": 9, "min_new_tokens": 9}
    wanted = one.generate(ids, do_sample=False, **settings)
    cache = ShardedCache(model.config, mesh["cp"])
    same = [torch.equal(model.generate(ids, past_key_values=cache, do_sample=False, **settings), wanted)]
    same.append(torch.equal(model.generate(ids, do_sample=False, **settings), wanted))
    torch.manual_seed(7)
    wanted = one.generate(ids, do_sample=True, **settings)
    for past in (ShardedCache(model.config, mesh["cp"]), None):
        torch.manual_seed(7)
        same.append(torch.equal(model.generate(ids, past_key_values=past, do_sample=True, **settings), wanted))
    return same


@pytest.mark.parametrize(
    ("name", "sizes", "by_context"),
    [
        ("llama", (1, 2, 2), False),
        ("phi3", (1, 2, 2), False),
        ("qwen3", (1, 2, 2), False),
        ("mixtral", (1, 2, 2), True),
        ("mixtral", (1, 4, 1), True),
    ],
)
def test_generated_tokens_are_one_process(pools, name, sizes, by_context):
    assert all(all(same) for same in pools(4).run(generated, name, sizes, by_context))


def grouped_head():
    """Shard the norm and the head as a group of FSDP2, as without tensor parallelism."""
    mesh = mesh_of(1, 2, 2)
    model = hf.parallelize(hf.tensor_parallel(model_of("llama"), mesh["tp"]), mesh["cp"], timeout=30)
    for part in ([model.model.norm, model.lm_head], model):
        fully_shard(part, mesh=mesh["cp"], reshard_after_forward=False)
    return apart(model_of("llama"), model, mesh, batch_of("plain", 2), shards=True)


def test_a_head_in_a_group_of_its_own(pools):
    check(*pools(4).run(grouped_head))


def checkpointed(name, folder, by_context):
    """Save changed weights on one mesh; return their greatest errors after a load on others, and in one folder."""
    model, _ = meshed(name, (1, 2, 2), shards=True, by_context=by_context)
    wanted = {key: 1.5 * x for key, x in model_of(name).named_parameters()}
    with torch.no_grad():
        for x in model.parameters():
            x.mul_(1.5)
    checkpoint.save(get_model_state_dict(model), checkpoint_id=f"{folder}/sharded")
    model.save_pretrained(f"{folder}/whole", True)
    dist.barrier()
    back = AutoModelForCausalLM.from_pretrained(f"{folder}/whole", dtype=torch.float64)
    assert (back.lm_head.weight is back.model.embed_tokens.weight) == (name == "tied")
    errors = [(x - wanted[key]).abs().max().item() for key, x in back.named_parameters()]
    for sizes in ((2, 2, 1), (2, 1, 2)):
        other, _ = meshed(name, sizes, shards=True)
        state = get_model_state_dict(other)
        checkpoint.load(state, checkpoint_id=f"{folder}/sharded")
        set_model_state_dict(other, state)
        errors += [(x.full_tensor() - wanted[key]).abs().max().item() for key, x in other.named_parameters()]
    return greatest(errors)


@pytest.mark.parametrize(
    ("name", "by_context"),
    [("tied", False), ("mixtral", True), ("gpt_oss", False), ("phi3", False), ("qwen3_5", False)],
)
def test_checkpoints_load_on_another_mesh(pools, name, by_context, tmp_path):
    assert pools(4).run(checkpointed, name, str(tmp_path), by_context) == [0.0] * 4


def saved_by_fsdp(axis, sizes, folder):
    """Save weights that FSDP2 shards; return the greatest error of what every rank finds in the folder."""
    mesh, model = mesh_of(*sizes), model_of("tied")
    if axis:
        hf.tensor_parallel(model, mesh["tp"])
    hf.parallelize(model, mesh["cp"], strategy=WHOLE_HEADS, timeout=30)
    fully_shard(model, mesh=mesh["dp", "cp"]._flatten("fsdp"))
    model.save_pretrained(folder, True, None, False, "20KB")
    dist.barrier()
    back = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    assert (Path(folder) / "model.safetensors.index.json").exists()  # by position: the size of a file
    wanted = dict(model_of("tied").named_parameters())
    return greatest((x - wanted[key]).abs().max().item() for key, x in back.named_parameters())


@pytest.mark.parametrize(("axis", "sizes"), [(True, (1, 2, 1)), (False, (2, 1, 1))])
def test_sharded_weights_are_saved_whole(pools, axis, sizes, tmp_path):
    """With an axis "tp" of one rank, or without one; rank 0 raised, and the others returned."""
    assert pools(2).run(saved_by_fsdp, axis, sizes, str(tmp_path / "whole")) == [0.0] * 2


def clipped(most):
    one = model_of("qwen3")
    model, _ = meshed("qwen3", (1, 2, 2), shards=True)
    moved, batch, norms, results = moved_copy(one), batch_of("plain", 1), [], []
    for part in (model, one, moved):
        part(**batch, use_cache=False).loss.backward()
        part.model.norm.weight.grad = None
        clip = hf.clip_grad_norm_ if part is model else torch.nn.utils.clip_grad_norm_
        norms.append(clip(part.parameters(), most).item())
        results.append({name: x for name, x in gradients(part).items() if x is not None})
    found = {name: x.full_tensor() for name, x in results[0].items()}
    return share_of_loss(*norms), worst_share(found, *results[1:])


@pytest.mark.parametrize("most", [0.1, 1e6])
def test_clipping_by_the_norm_of_all_gradients(pools, most):
    within(pools(4).run(clipped, most))


def clipped_partial():
    mesh = mesh_of(1, 2, 2)
    parameter = torch.nn.Parameter(distribute_tensor(torch.zeros(4), mesh["tp"], [Shard(0)]))
    whole = torch.nn.Parameter(DTensor.from_local(torch.zeros(4), mesh["tp"]))
    whole.grad = DTensor.from_local(torch.ones(4), mesh["tp"], [Partial()])
    for given in (parameter, [parameter]):
        parameter.grad = distribute_tensor(torch.ones(4), mesh["tp"], [Shard(0)])
        assert hf.clip_grad_norm_(given, 1.0).item() == pytest.approx(2.0)
    with pytest.raises(TypeError, match="partial sum"):
        hf.clip_grad_norm_([whole], 1.0)


def test_a_partial_gradient_is_no_norm(pools):
    pools(4).run(clipped_partial)


def cut(model, sizes=(1, 2, 2)):
    return hf.tensor_parallel(model, mesh_of(*sizes)["tp"])


def refused(wrong):
    """Return this rank's error, after something was made wrong: of ``REFUSED``, or a function."""
    torch.manual_seed(0)
    try:
        REFUSED[wrong][0]() if wrong in REFUSED else wrong()
    except (TypeError, ValueError) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def other_labels_in_the_loss():
    model, hidden, plan, labels = ready_for_a_loss()
    labels = labels.roll(1) if dist.get_rank() == 1 else labels
    hf.next_token_loss(model, hidden, labels, plan)


def no_gradient_on_one_rank():
    model, hidden, plan, labels = ready_for_a_loss()
    hf.next_token_loss(model, hidden.requires_grad_(dist.get_rank() != 2), labels, plan)


def a_rank_that_raises_in_the_loss():
    model, hidden, plan, labels = ready_for_a_loss()
    hf.next_token_loss(model, hidden, labels + 900 * (dist.get_rank() == 1), plan)


def ready_for_a_loss():
    mesh = mesh_of(1, 2, 2)
    model = hf.tensor_parallel(model_of("llama"), mesh["tp"])
    plan = make_plan(37, group=mesh["cp"], timeout=20)
    generator = torch.Generator().manual_seed(mesh["cp"].get_local_rank())
    hidden = torch.randn(2, plan.length, 32, generator=generator, dtype=torch.float64)
    return model, hidden, plan, torch.randint(VOCABULARY, (2, plan.length), generator=generator)


def other_weights():
    model = model_of("llama")
    model.model.norm.weight.data += dist.get_rank() == 3
    hf.tensor_parallel(model, mesh_of(1, 2, 2)["tp"])


def other_strategy():
    model = hf.tensor_parallel(model_of("llama"), (mesh := mesh_of(1, 2, 2))["tp"])
    hf.parallelize(model, mesh["cp"], strategy="ulysses" if dist.get_rank() % 2 else "ring", timeout=20)


def hooked():
    """Half of the features are not all that a function of each token needs."""
    model, _ = meshed("llama", (1, 2, 2))
    hook = hf.token_wise(lambda module, given, out: out / out.norm(dim=-1, keepdim=True))
    model.model.layers[0].self_attn.q_proj.register_forward_hook(hook)
    model(**batch_of("plain", 0))


def hooked_without_contexts():
    model, _ = meshed("llama", (2, 1, 2))
    model.model.embed_tokens.register_forward_hook(lambda module, given, out: out + torch.randn_like(out))
    model(**batch_of("plain", 0))


def frozen_on_one():
    model, _ = meshed("qwen3", (1, 2, 2))
    model.model.layers[0].self_attn.q_norm.weight.requires_grad_(dist.get_rank() != 3)
    model(**batch_of("plain", 0)).loss.backward()


def timed():
    model, _ = meshed("llama", (1, 2, 2))
    model.eval().generate(torch.ones(1, 4, dtype=torch.long), max_time=0.1, do_sample=False)


def bias_on_one(whole=False):
    model, hidden, plan, labels = ready_for_a_loss()
    mesh = model.lm_head.weight.device_mesh
    bias = torch.ones(VOCABULARY + 3, dtype=torch.float64)
    if not whole:
        bias = distribute_tensor(bias, mesh, [Shard(0)])
    bias = bias if dist.get_rank() == 1 else None
    next_token_loss(hidden, model.lm_head.weight, labels, plan, bias=bias)


def dropout():
    model, _ = meshed("phi3", (2, 1, 2), resid_pdrop=0.1)
    model.train()
    model(**batch_of("plain", 0))


def adapters_before():
    hf.tensor_parallel(
        get_peft_model(model_of("llama"), LoraConfig(target_modules=["q_proj"])).base_model.model,
        mesh_of(1, 2, 2)["tp"],
    )


def adapters_after():
    model, _ = meshed("llama", (1, 2, 2))
    inject_adapter_in_model(LoraConfig(target_modules=["q_proj"]), model)
    model(**batch_of("plain", 0))


def other_seed():
    model, _ = meshed("llama", (1, 2, 2))
    torch.manual_seed(dist.get_rank())
    model.eval().generate(torch.ones(1, 4, dtype=torch.long), do_sample=True, max_new_tokens=2)


def other_name():
    hf.tensor_parallel(model_of("llama"), init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tensor"))["tensor"])


def experts_of_no_axis():
    mesh = mesh_of(1, 2, 2)
    hf.tensor_parallel(model_of("mixtral"), mesh["tp"], experts=mesh["cp"])


def experts_of_other_contexts():
    meshed("mixtral", (2, 2, 1), group="dp", by_context=True)


def experts_in_chunks():
    meshed("mixtral", (1, 2, 2), by_context=True, memory=hf.Memory(mlp_chunks=2))


def experts_without_a_plan():
    mesh = mesh_of(1, 2, 2)
    hf.tensor_parallel(model_of("mixtral"), mesh["tp"], experts=mesh["cp", "tp"]._flatten("ep"))(**batch_of("plain", 0))


def experts_of_other_prompts():
    model, _ = meshed("mixtral", (1, 2, 2), by_context=True)
    model.eval().generate(torch.ones(1, 4 + dist.get_rank() // 2, dtype=torch.long), max_new_tokens=2, do_sample=False)


def experts_without_tokens():
    plan = make_plan(3, timeout=30)
    tensor_parts.whole_tokens(torch.ones(plan.length, 2), plan)


def experts_of_other_weights():
    mesh, model = mesh_of(1, 2, 2), model_of("mixtral")
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj += dist.get_rank() // 2
    hf.tensor_parallel(model, mesh["tp"], experts=mesh["cp", "tp"]._flatten("ep"))


def chunks_of_heads():
    meshed("phi3", (1, 2, 2), memory=hf.Memory(attention_chunks=2))


def cut_by_others():
    mesh, model = mesh_of(1, 2, 2), model_of("llama")
    parallelize_module(model, mesh["tp"], {"model.layers.0.mlp.up_proj": ColwiseParallel()})
    hf.parallelize(model, mesh["cp"], timeout=20)


def twice():
    model, mesh = meshed("llama", (1, 2, 2))
    hf.tensor_parallel(hf.unparallelize(model), mesh["tp"])


REFUSED = {  # by what is wrong: who makes it so on the ranks, the class of the error, a part of its text
    "other labels in the loss": (other_labels_in_the_loss, "DisagreementError", "digest of labels"),
    "no gradient on one rank": (no_gradient_on_one_rank, "DisagreementError", "whether hidden needs a gradient"),
    "a rank that raises in the loss": (a_rank_that_raises_in_the_loss, "ValueError", "labels holds"),
    "other strategy": (other_strategy, "DisagreementError", "strategy"),
    "no group": (lambda: hf.parallelize(cut(model_of("llama")), timeout=20), "DisagreementError", "rank in the group"),
    "copied": (lambda: copy.deepcopy(meshed("llama", (1, 2, 2))[0]), "TypeError", "can't be copied"),
    "copied before": (lambda: copy.deepcopy(cut(model_of("llama"))), "TypeError", "can't be copied"),
    "hooked": (hooked, "ValueError", "q_proj has a hook"),
    "hooked without contexts": (hooked_without_contexts, "ValueError", "embed_tokens"),
    "frozen on one": (frozen_on_one, "DisagreementError", "Set requires_grad of the same parameters on every rank"),
    "timed": (timed, "ValueError", "max_time=0.1 is refused"),
    "bias on one": (bias_on_one, "DisagreementError", "whether there is a bias"),
    "whole bias on one": (lambda: bias_on_one(whole=True), "TypeError", "bias is not cut"),
    "dropout": (dropout, "ValueError", "resid_pdrop"),
    "adapters before": (adapters_before, "ValueError", "an adapter or a quantized layer"),
    "adapters after": (adapters_after, "ValueError", "is an adapter"),
    "too many ranks": (lambda: cut(model_of("llama"), (1, 1, 4)), "ValueError", "num_key_value_heads=2"),
    "other architecture": (lambda: cut(make_model("phi")), "ValueError", "was not compared"),
    "other name": (other_name, "TypeError", "tp"),
    "chunks of heads": (chunks_of_heads, "ValueError", "computes all of its heads"),
    "experts of no axis": (experts_of_no_axis, "TypeError", "these the inner ones"),
    "experts of llama": (lambda: meshed("llama", (1, 2, 2), by_context=True), "ValueError", "which has no experts"),
    "experts of other contexts": (experts_of_other_contexts, "ValueError", "pass the same axis to both"),
    "experts in chunks": (experts_in_chunks, "ValueError", "mlp_chunks=2, but the ranks of the context share"),
    "experts without a plan": (experts_without_a_plan, "ValueError", "plan did not reach MixtralExperts"),
    "experts of other prompts": (experts_of_other_prompts, "DisagreementError", "the digests of tensors"),
    "experts without tokens": (experts_without_tokens, "ValueError", "leaves some of 4 ranks none"),
    "experts of other weights": (experts_of_other_weights, "DisagreementError", "weights"),
    "cut by others": (cut_by_others, "ValueError", "hf.tensor_parallel"),
    "twice": (twice, "ValueError", "cut already"),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_refusals_on_every_rank(pools, wrong):
    _, kind, text = REFUSED[wrong]
    for found, error in pools(4).run(refused, wrong):
        assert found == kind, error
        assert text in error


def sharded_twice():
    """FSDP2 itself refuses to shard, over the context, experts that the context shares."""
    model, mesh = meshed("mixtral", (1, 2, 2), by_context=True)
    with pytest.raises(RuntimeError, match="overlapping meshes"):
        fully_shard(model.model.layers[0], mesh=mesh["cp"])


def test_fsdp_takes_no_experts_that_a_context_shares(pools):
    pools(4).run(sharded_twice)


@pytest.mark.parametrize(("change", "ranks"), [(other_weights, (2, 3)), (other_seed, (0, 1, 2, 3))])
def test_refusals_along_the_axis(pools, change, ranks):
    """Groups that do not meet in the call go on."""
    found = pools(4).run(refused, change)
    assert all("DisagreementError" in found[rank][0] for rank in ranks), found


def saved(folder):
    model, mesh = meshed("llama", (1, 2, 2))
    model.eval()
    cache = ShardedCache(model.config, mesh["cp"])
    model.generate(torch.ones(1, 70, dtype=torch.long), past_key_values=cache, max_new_tokens=2, do_sample=False)
    with pytest.raises(ValueError, match="cut over 2 tensor-parallel ranks"):
        cache.save(folder)


def test_a_cache_of_parts_is_not_saved(pools, tmp_path):
    pools(4).run(saved, str(tmp_path / "cache"))
