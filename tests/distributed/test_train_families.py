"""``burst train`` on families other than Llama, and with LoRA: trained, evaluated, exported; or refused by name."""

import itertools
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from burst_train.cli.preflight import check_run
from burst_train.data.sequences import open_sequences
from burst_train.health.flops import ModelFlops
from burst_train.run.folder import list_checkpoints
from burst_train.step.export import export
from burst_train.step.loop import train
from burst_train.step.lora import add_adapters
from burst_train.step.sharding import shard_parameters
from burst_train.strategies import Heads
from tests.support.training import config_of, losses, metrics, norms, records, saved_model, summary_of, weights
from tests.tools.families import model_class, tiny_config

from .test_train import SMALL, one_device

HYBRIDS = ("bamba", "granitemoehybrid", "lfm2", "mamba2", "qwen3_5_text", "qwen3_next", "zamba2")
INDEXED = ("deepseek_v32", "glm_moe_dsa", "minimax_m3_vl_text")
EACH_KIND = ("deepseek_v2", "deepseek_v32", "gemma2", "gpt_oss", "gptj", "llama4_text", "mamba2", "qwen3_5_text")
FAMILIES = (
    *HYBRIDS,
    *INDEXED,
    *("cohere2", "deepseek_v2", "gemma2", "gemma3_text", "glm4", "gpt_neox", "gpt_oss", "granite", "llama4_text"),
    *("gpt_neo", "gptj", "minimax_m2", "mixtral", "olmo2", "phi3", "qwen3_moe", "smollm3"),
)


def folder_of(model_type: str, folder: Path, **changes: object) -> str:
    config = tiny_config(model_type)
    config.vocab_size, config.pad_token_id = 300, None
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model_class(model_type)(config).save_pretrained(folder)
    return str(folder)


def one_process(config, model):
    """Train a model as a run did, and return the losses of the steps."""
    settings, found = config.optim, []
    learned = [p for p in model.parameters() if p.requires_grad]
    betas = settings.beta1, settings.beta2
    optimizer = torch.optim.AdamW(learned, betas=betas, eps=settings.eps, weight_decay=0.0)
    sequences = open_sequences(config)[0].training()
    for rate in metrics(config.run.out, "lr"):
        loss = one_device(model, itertools.islice(sequences, config.sequences_per_step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, settings.clip)
        for p in learned:  # norms and biases don't decay
            p.data *= 1 - rate * settings.weight_decay * (p.ndim > 1)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(each, marks=pytest.mark.long if each in EACH_KIND else pytest.mark.slow) for each in FAMILIES],
)
def test_a_family_trains_as_one_device_does(pools, corpus, tmp_path, model_type):
    trained_as_one_device(pools(2), corpus, tmp_path, model_type)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model_type", "world", "flags"),
    [
        ("deepseek_v32", 4, {"tensor_parallel": 2}),
        ("minimax_m3_vl_text", 2, {"tensor_parallel": 2, "remat": "layer"}),
        ("glm_moe_dsa", 2, {"attention_chunks": 4}),
        ("minimax_m3_vl_text", 2, {"attention_chunks": 2, "remat": "layer"}),
    ],
)
def test_heads_that_share_a_choice_are_cut_and_split(pools, corpus, tmp_path, model_type, world, flags):
    trained_as_one_device(pools(world), corpus, tmp_path, model_type, **flags)


def trained_as_one_device(pool, corpus, tmp_path, model_type, **flags):
    """Compare the losses of a run, what it sends and its trained model with one process."""
    source = folder_of(model_type, tmp_path / "source")
    sizes = {
        "lr": 1e-3,
        "steps": 3,
        "seq_len": 61,
        "pack": "none" if model_type == "minimax_m3_vl_text" else "documents",
    }
    config = config_of(corpus, tmp_path / "run", model=source, tokenizer="bytes", **sizes, **flags)
    check_run(config, pool.world)
    pool.run(train, config)
    expected = one_process(config, AutoModelForCausalLM.from_pretrained(source).float())
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=2e-6)
    for record in records(tmp_path / "run"):  # states that recurrent layers send are not among the attention's bytes
        more = record["bytes_sent"] - record["bytes_predicted"]
        assert more > 0 if model_type in HYBRIDS else more == 0
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").float()
    held_out = list(itertools.islice(open_sequences(config)[0].held_out(), 3))
    with torch.no_grad():
        found = one_device(again, held_out).item()
    assert found == pytest.approx(summary_of(tmp_path / "run")["held_out_loss"], abs=1e-5)


@pytest.mark.long
def test_a_mixture_trains_in_fp64_which_transformers_fused_experts_do_not_take(pools, corpus, tmp_path):
    source = folder_of("mixtral", tmp_path / "source")
    for dtype in ("float32", "float64"):
        settings = {"model": source, "tokenizer": "bytes", "dtype": dtype, "steps": 2, "seq_len": 61}
        pools(2).run(train, config_of(corpus, tmp_path / dtype, **settings))
    assert losses(tmp_path / "float64") == pytest.approx(losses(tmp_path / "float32"), rel=1e-5)


@pytest.mark.parametrize(("world", "changes"), [(2, {"accumulate": 2}), (4, {"data_parallel": 2})])
def test_the_loss_of_routers_is_the_mean_of_a_steps_batches(pools, corpus, tmp_path, world, changes):
    source = folder_of("mixtral", tmp_path / "source", output_router_logits=True, router_aux_loss_coef=0.5)
    sizes = {"tokenizer": "bytes", "steps": 1, "seq_len": 61, "pack": "none", "clip": 0}
    config = config_of(corpus, tmp_path / "run", model=source, **sizes, **changes)
    check_run(config, world)
    pools(world).run(train, config)
    plain = AutoModelForCausalLM.from_pretrained(source).float()
    sequences = [*itertools.islice(open_sequences(config)[0].training(), 2)]
    tokens = sum(sequence.valid_tokens for sequence in sequences)
    parts = [torch.tensor(sequence.ids, dtype=torch.int64)[None] for sequence in sequences]
    outs = [plain(ids, labels=ids, num_items_in_batch=tokens) for ids in parts]
    routers = [0.5 * out.aux_loss for out in outs]
    loss = sum(out.loss for out in outs) - sum(routers) / 2
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()]).item()
    assert sum(routers).item() > 0.1
    assert losses(tmp_path / "run") == pytest.approx([loss.item()], rel=2e-6)
    assert norms(tmp_path / "run") == pytest.approx([norm], rel=2e-5)


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2, 4, 4), 0.5))

    def forward(self, x, used):
        return x @ self.weight[0] if used else x


class Layer(GradientCheckpointingLayer):
    def __init__(self):
        super().__init__()
        self.first, self.experts = torch.nn.Linear(4, 4, bias=False), Experts()

    def forward(self, x, used):
        return self.experts(self.first(x), used)


class Mixture(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.config = torch.nn.ModuleList([Layer()]), LlamaConfig()
        self.config.zero_expert_num = 1

    def forward(self, x, used):
        return self.layers[0](x, used).sum()


def idle_on_one_rank():
    """The whole gradient of experts that rank 0 alone uses."""
    model, rank = Mixture(), torch.distributed.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    shard_parameters(model, model, mesh, torch.float32)
    model(torch.ones(3, 4), rank == 0).backward()
    return model.layers[0].experts.weight.grad.full_tensor()


def test_experts_that_one_rank_alone_uses_have_its_gradient(pools):
    for gradient in pools(2).run(idle_on_one_rank, timeout=60):
        assert gradient[0].abs().min() > 0 and not gradient[1].any()


def test_tokens_that_need_no_expert_are_trained_as_in_one_process(pools, corpus, tmp_path):
    source = folder_of("longcat_flash", tmp_path / "source")
    plain = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():  # all tokens choose experts without weights
        for name, buffer in plain.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer[-plain.config.zero_expert_num :] = 1e4
    plain.save_pretrained(source)
    sizes = {"tokenizer": "bytes", "steps": 2, "seq_len": 61, "pack": "none", "clip": 0, "lr": 1e-3}
    config = config_of(corpus, tmp_path / "run", model=source, **sizes)
    check_run(config, 2)
    pools(2).run(train, config)
    plain = AutoModelForCausalLM.from_pretrained(source).float()
    sequence = next(open_sequences(config)[0].training())
    loss = one_device(plain, [sequence])
    loss.backward()
    idle = [p for p in plain.parameters() if p.grad is None]
    assert idle, "no expert was used"
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None]).item()
    assert losses(tmp_path / "run")[0] == pytest.approx(loss.item(), rel=2e-6)
    assert norms(tmp_path / "run")[0] == pytest.approx(norm, rel=2e-5)


def test_what_can_not_be_trained_is_refused_before_the_start(corpus, tmp_path):
    def check(model_type: str, strategy: str = "auto", **changes: object) -> None:
        source = folder_of(model_type, tmp_path / f"{model_type}-{strategy}", **changes)
        settings = {"tokenizer": "bytes", "strategy": strategy, "seq_len": 64}
        check_run(config_of(corpus, tmp_path / "run", model=source, **settings), 1 if strategy == "single" else 2)

    for model_type, strategy, changes, why in (
        ("hrm_text", "burst", {}, "HrmTextForCausalLM has 2 lists of decoder layers"),
        ("qwen3_next", "layout=striped", {}, "layout='striped' of the strategy separates"),
        ("gemma4_unified_text", "burst", {}, "does not state one size of the heads"),
        ("phi3", "tensor", {}, "--strategy tensor can't share the projections of a phi3"),
    ):
        with pytest.raises(ValueError, match=why):
            check(model_type, strategy, **changes)


RANK = 4


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return saved_model(LlamaConfig(**SMALL, initializer_range=0.2), tmp_path_factory.mktemp("llama"), 3)


def lora_config(corpus, out, model, **changes):
    settings = {"model": model, "tokenizer": "bytes", "lora": RANK, "lr": 5e-3, "seq_len": 61}
    return config_of(corpus, out, **settings | changes)


def of_peft(config, exclude=None):
    """(losses of the run's steps, the trained model) of PEFT in one process."""
    plain = AutoModelForCausalLM.from_pretrained(config.model.model).float()
    torch.manual_seed(config.run.seed)
    options = {"target_modules": "all-linear", "exclude_modules": exclude, "task_type": "CAUSAL_LM"}
    model = get_peft_model(plain, LoraConfig(r=RANK, lora_alpha=2 * RANK, **options))
    return one_process(config, model), model


def test_twenty_steps_are_those_of_peft_in_one_process(pools, corpus, llama, tmp_path):
    config = lora_config(corpus, tmp_path / "run", llama, steps=20, strategy="burst")
    summary = pools(2).run(train, config)[0]
    expected, model = of_peft(config)
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=2e-6)
    assert expected[-1] < expected[0] - 0.1, "it learns"
    merged = weights(tmp_path / "run")
    adapters = load_file(tmp_path / "run" / "model" / "adapter" / "adapter_model.safetensors")
    trained = {name: p for name, p in model.state_dict().items() if ".lora_" in name}
    assert {name.replace(".default", "") for name in trained} == adapters.keys()
    for name, value in model.merge_and_unload().state_dict().items():
        assert torch.allclose(merged[name], value, atol=2e-5), name
    held_out = list(itertools.islice(open_sequences(config)[0].held_out(), 3))
    plain = AutoModelForCausalLM.from_pretrained(llama).float()
    with torch.no_grad():
        alone = one_device(AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model"), held_out).item()
        adapted = one_device(PeftModel.from_pretrained(plain, tmp_path / "run" / "model" / "adapter"), held_out).item()
    assert alone == pytest.approx(summary.held_out_loss, abs=1e-5)
    assert adapted == pytest.approx(summary.held_out_loss, abs=1e-5)


def test_adapters_in_fp64_are_alike_on_all_ranks(pools, corpus, llama, tmp_path):
    for world in (1, 2):
        config = lora_config(corpus, tmp_path / str(world), llama, steps=2, dtype="float64", eps=1e-5)
        pools(world).run(train, config)
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-7)  # some norms are in fp32


@pytest.mark.parametrize(
    "model_type", ["falcon_h1", *(pytest.param(each, marks=pytest.mark.slow) for each in ("qwen3_5_text", "gpt_oss"))]
)
@pytest.mark.slow
def test_other_mechanisms_take_adapters(pools, corpus, tmp_path, model_type):
    source = folder_of(model_type, tmp_path / "source")
    config = lora_config(corpus, tmp_path / "run", source, steps=5, remat="layer", accumulate=2)
    check_run(config, 2)
    pools(2).run(train, config)
    expected, _ = of_peft(config, ["mamba.out_proj"] if model_type == "falcon_h1" else None)
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=2e-6)


@pytest.mark.long
def test_a_resumed_run_has_the_adapters_of_one_that_was_not_stopped(pools, corpus, llama, tmp_path):
    config = lora_config(corpus, tmp_path / "whole", llama, steps=4, save_every="2", keep=5)
    pools(2).run(train, config)
    saved = list_checkpoints(tmp_path / "whole")[-1]
    on_disk = {name for file in saved.glob("*.safetensors") for name in load_file(file)}
    assert on_disk and all(".lora_" in name or name.startswith("data.") for name in on_disk)
    export(saved, tmp_path / "exported")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "exported" / "adapter") is not None
    pools(2).run(train, replace(config, run=replace(config.run, out=str(tmp_path / "again"), resume=str(saved))))
    whole, again, half = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "whole" / "model", tmp_path / "again" / "model", tmp_path / "exported")
    )
    assert all(torch.equal(again[name], value) for name, value in whole.items())
    assert any(not torch.equal(half[name], value) for name, value in whole.items())
    frozen = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert all(torch.equal(half[name], whole[name]) for name in frozen)


def test_adapters_without_their_package_are_refused_before_the_start(corpus, llama, tmp_path):
    with (
        mock.patch("burst_train.config.find_spec", return_value=None),
        pytest.raises(ValueError, match=r"--lora 4 needs PEFT: in the checkout, run pip install -e '.\[trainer\]'"),
    ):
        check_run(lora_config(corpus, tmp_path, llama), 2)


def test_frozen_weights_need_no_gradients_moments_or_operations(corpus, llama, tmp_path):
    least = check_run(lora_config(corpus, tmp_path, llama, lora=RANK), 2).memory
    model = AutoModelForCausalLM.from_pretrained(llama)
    whole = ModelFlops.of(model, Heads.of(model.config), [])
    add_adapters(model, RANK)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert least["AdamW"] == 2 * least["gradients"] == 8 * (trained // 2), "of the adapters alone"
    assert ModelFlops.of(model, Heads.of(model.config), []).per_token == whole.per_token * 4 // 6 + 6 * trained
