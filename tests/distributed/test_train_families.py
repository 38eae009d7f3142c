"""``burst train`` on families other than Llama: loaded, trained, evaluated, exported; or refused by name."""

import itertools
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from burst_train.cli.preflight import check_run
from burst_train.data.sequences import open_sequences
from burst_train.step.loop import train
from tests.support.training import config_of, losses, records, summary_of
from tests.tools.families import model_class, tiny_config

from .test_train import one_device

HYBRIDS = ("bamba", "granitemoehybrid", "lfm2", "mamba2", "qwen3_5_text", "qwen3_next", "zamba2")
EACH_KIND = ("deepseek_v2", "gemma2", "gpt_oss", "llama4_text", "mamba2", "qwen3_5_text")
FAMILIES = (
    *HYBRIDS,
    *("cohere2", "deepseek_v2", "gemma2", "gemma3_text", "glm4", "gpt_neox", "gpt_oss", "granite", "llama4_text"),
    *("minimax_m2", "mixtral", "olmo2", "phi3", "qwen3_moe", "smollm3"),
)


def folder_of(model_type: str, folder: Path, **changes: object) -> str:
    config = tiny_config(model_type)
    config.vocab_size, config.pad_token_id = 300, None
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model_class(model_type)(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(each, marks=pytest.mark.long if each in EACH_KIND else pytest.mark.slow) for each in FAMILIES],
)
def test_a_family_trains_as_one_device_does(pools, corpus, tmp_path, model_type):
    source = folder_of(model_type, tmp_path / "source")
    config = config_of(corpus, tmp_path / "run", model=source, tokenizer="bytes", lr=1e-3, steps=3, seq_len=61)
    check_run(config, 2)
    pools(2).run(train, config)
    reader, _ = open_sequences(config)
    plain = AutoModelForCausalLM.from_pretrained(source).float()
    optimizer = torch.optim.AdamW(plain.parameters(), weight_decay=0.0)
    sequences, expected = reader.training(), []
    settings = config.optim
    for record in records(tmp_path / "run"):
        loss = one_device(plain, itertools.islice(sequences, config.sequences_per_step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), settings.clip)
        for group in optimizer.param_groups:
            group |= {"lr": record["lr"], "betas": (settings.beta1, settings.beta2), "eps": settings.eps}
        for p in plain.parameters():  # norms and biases don't decay
            p.data *= 1 - record["lr"] * settings.weight_decay * (p.ndim > 1)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=2e-6)
    for record in records(tmp_path / "run"):  # states that recurrent layers send are not among the attention's bytes
        more = record["bytes_sent"] - record["bytes_predicted"]
        assert more > 0 if model_type in HYBRIDS else more == 0
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").float()
    held_out = list(itertools.islice(reader.held_out(), 3))
    with torch.no_grad():
        found = one_device(again, held_out).item()
    assert found == pytest.approx(summary_of(tmp_path / "run")["held_out_loss"], abs=1e-5)


def test_what_can_not_be_trained_is_refused_before_the_start(corpus, tmp_path):
    def check(model_type: str, strategy: str = "auto", **changes: object) -> None:
        source = folder_of(model_type, tmp_path / f"{model_type}-{strategy}", **changes)
        settings = {"tokenizer": "bytes", "strategy": strategy, "seq_len": 64}
        check_run(config_of(corpus, tmp_path / "run", model=source, **settings), 1 if strategy == "single" else 2)

    for model_type, strategy, changes, why in (
        ("mixtral", "burst", {"output_router_logits": True}, "adds the router's loss"),
        ("hrm_text", "burst", {}, "HrmTextForCausalLM has 2 lists of decoder layers"),
        ("qwen3_next", "layout=striped", {}, "layout='striped' of the strategy separates"),
        ("gpt_oss", "single", {}, "--strategy single has no sinks, which the attention of a gpt_oss has"),
        ("gemma4_unified_text", "burst", {}, "does not state one size of the heads"),
        ("longcat_flash", "burst", {}, "zero_expert_num=256 of the configuration"),
        ("phi3", "tensor", {}, "--strategy tensor can't share the projections of a phi3"),
    ):
        with pytest.raises(ValueError, match=why):
            check(model_type, strategy, **changes)
