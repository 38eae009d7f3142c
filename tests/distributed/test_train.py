"""The whole path: the same training whatever the ranks, and what a run leaves behind."""

import itertools
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, MistralConfig

from burst_attention import DisagreementError
from burst_attention.comm.agreement import Agreement
from burst_attention.launch.join import join
from burst_attention.testing import WorkerError
from burst_train.cli.train import parse
from burst_train.data.sequences import open_sequences
from burst_train.step.evaluate import evaluate
from burst_train.step.evaluation import EvalConfig
from burst_train.step.loop import Trainer, train
from burst_train.step.model import model_in
from tests.support.chat import chat_model, write_chat
from tests.support.training import config_of, events, losses, metrics, norms, records, saved_model, summary_of, weights

SMALL = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 256, "eos_token_id": 257}


@pytest.fixture(scope="module")
def mistral(tmp_path_factory):
    """A small model on disk whose layers see 13 keys."""
    config = MistralConfig(**SMALL, head_dim=8, sliding_window=13, initializer_range=0.2)
    return saved_model(config, tmp_path_factory.mktemp("mistral"), 3)


def relative(x, y):
    return ((x.double() - y.double()).norm() / y.double().norm()).item()


# The same numbers whatever the ranks


@pytest.mark.parametrize("pack", ["documents", pytest.param("none", marks=pytest.mark.slow)])
@pytest.mark.long
def test_groups_equal_accumulation_steps(pools, corpus, tmp_path, pack):
    shared = {"dtype": "float64", "pack": pack, "lr": 1e-3, "eps": 1e-5, "steps": 2}
    if pack == "none":
        shared |= {"batch": 2, "seq_len": 61}
    runs = {"one": (1, 1, 4), "both": (4, 2, 2)}
    for name, (world, groups, accumulate) in runs.items():
        config = config_of(corpus, tmp_path / name, data_parallel=groups, accumulate=accumulate, **shared)
        summaries = pools(world).run(train, config)
        assert all(summary == summaries[0] for summary in summaries)
    one, both = (tmp_path / name for name in runs)
    assert losses(both) == pytest.approx(losses(one), abs=1e-9)
    assert norms(both) == pytest.approx(norms(one), rel=1e-9)
    for key, value in weights(one).items():
        assert relative(weights(both)[key], value) < 1e-7, key
    assert summary_of(both)["held_out_loss"] == pytest.approx(summary_of(one)["held_out_loss"], abs=1e-7)


def gradients(config):
    """(loss, whole gradients by name, initial weights) of the first step."""
    parallel = config.parallel
    with join(device=parallel.device, timeout=parallel.timeout, data_parallel=parallel.data_parallel) as context:
        trainer = Trainer(config, context)
        before = {key: p.full_tensor().detach().clone() for key, p in model_in(trainer.model).named_parameters()}
        sequences = list(itertools.islice(trainer.reader.training(), config.sequences_per_step))
        loss, _ = trainer.backward(sequences)
        return loss, {key: p.grad.full_tensor() for key, p in model_in(trainer.model).named_parameters()}, before


def one_device(model, sequences):
    """The mean loss over all targets of all sequences, each document by itself, by transformers alone."""
    total, count = 0.0, 0
    for sequence in sequences:
        borders = sequence.cu_seqlens or (0, len(sequence.tokens))
        for start, stop in itertools.pairwise(borders):
            ids, labels = (torch.tensor(x[start:stop], dtype=torch.int64) for x in (sequence.ids, sequence.labels))
            if stop - start > 1:
                logits = model(ids[None], use_cache=False).logits[0, :-1]
                total = total + F.cross_entropy(logits, labels[1:], reduction="sum")
                count += (labels[1:] != -100).sum().item()
    return total / count


@pytest.mark.parametrize(
    ("world", "changes"),
    [
        (1, {"accumulate": 3}),
        (2, {"accumulate": 2}),
        (4, {"data_parallel": 2, "accumulate": 2}),
        (4, {"packing": "balanced", "batch": 2, "accumulate": 2}),
        (4, {"packing": "balanced", "batch": 3, "pack": "none"}),
    ],
)
def test_gradients_are_those_of_one_device(pools, corpus, tmp_path, world, changes):
    config = config_of(corpus, tmp_path, dtype="float64", **changes)
    results = pools(world).run(gradients, config)
    loss, _, before = results[0]
    from burst_train.step.model import model_config

    reader, tokenizer = open_sequences(config)
    plain = AutoModelForCausalLM.from_config(model_config("tiny", tokenizer, 97), dtype=torch.float64)
    plain.load_state_dict(before)
    expected = one_device(plain, itertools.islice(reader.training(), config.sequences_per_step))
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-10)
    for _, grads, _ in results:
        for key, parameter in plain.named_parameters():
            assert relative(grads[key], parameter.grad) < 1e-9, key


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """(conversations in a file, the folder of a model with a chat template)."""
    folder = tmp_path_factory.mktemp("chat")
    return write_chat(folder / "chat.jsonl"), chat_model(folder / "model")


@pytest.mark.parametrize(
    ("world", "changes"),
    [(2, {"accumulate": 2}), (4, {"packing": "balanced", "batch": 2}), (2, {"strategy": "tensor", "seq_len": 96})],
)
def test_gradients_of_conversations_are_those_of_one_device(pools, chat, tmp_path, world, changes):
    """The loss is that of the assistant's turns: transformers gets -100 for all other tokens."""
    data, model = chat
    config = config_of(data, tmp_path, model=model, dtype="float64", **changes)
    results = pools(world).run(gradients, config)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    sequences = list(itertools.islice(open_sequences(config)[0].training(), config.sequences_per_step))
    assert 0 < sum(each.valid_tokens for each in sequences) < 0.8 * sum(len(each.tokens) for each in sequences)
    expected = one_device(plain, sequences)
    expected.backward()
    for loss, grads, _ in results:
        assert loss == pytest.approx(expected.item(), rel=1e-10)
        for key, parameter in plain.named_parameters():
            assert relative(grads[key], parameter.grad) < 1e-9, key


def test_conversations_are_evaluated_and_resumed_as_they_are_trained(pools, chat, tmp_path):
    data, model = chat
    config = config_of(data, tmp_path / "whole", model=model, steps=3, held_out=0.3)
    summary = pools(2).run(train, config)[0]
    reader, _ = open_sequences(config)
    held_out = list(itertools.islice(reader.held_out(), 3))
    assert summary.held_out_tokens == sum(each.valid_tokens for each in held_out)
    trained = str(tmp_path / "whole" / "model")
    with torch.no_grad():
        expected = one_device(AutoModelForCausalLM.from_pretrained(trained), held_out).item()
    assert summary.held_out_loss == pytest.approx(expected, abs=1e-5)
    asked = {"data": data, "seq_len": 97, "held_out": 0.3, "sequences": 3, "device": "cpu"}
    (evaluated,) = pools(2).run(evaluate, EvalConfig(model=trained, **asked))[0]
    assert evaluated.tokens == summary.held_out_tokens
    assert evaluated.loss == pytest.approx(expected, abs=1e-5)
    (every,) = pools(2).run(evaluate, EvalConfig(model=trained, **asked, chat_loss="all"))[0]
    assert every.tokens > 1.3 * evaluated.tokens
    early = replace(config, run=replace(config.run, out=str(tmp_path / "early"), steps=2))
    early = replace(early, optim=replace(early.optim, decay_steps=3))
    pools(2).run(train, early)
    pools(2).run(train, replace(early, run=replace(early.run, steps=3, resume="newest")))
    assert losses(tmp_path / "early") == losses(tmp_path / "whole")


def test_a_scaled_rope_trains_evaluates_and_is_saved_as_transformers_has_it(pools, corpus, tmp_path):
    """--rope-scaling yarn:2 on a model of 48 positions, in sequences of 96."""
    sizes = {**SMALL, "max_position_embeddings": 48, "initializer_range": 0.2}
    source = saved_model(MistralConfig(**sizes, head_dim=8, sliding_window=None), tmp_path / "short", 3)
    shared = {"model": source, "tokenizer": "bytes", "seq_len": 96, "rope_scaling": "yarn:2"}
    config = config_of(corpus, tmp_path / "run", **shared, dtype="float64", save_dtype="float64", lr=1e-30, steps=1)
    loss, grads, _ = pools(2).run(gradients, config)[0]
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 48, "rope_theta": 10_000.0}
    plain = AutoModelForCausalLM.from_pretrained(
        source, rope_parameters=yarn, max_position_embeddings=96, dtype=torch.float64
    )
    reader, _ = open_sequences(config)
    expected = one_device(plain, itertools.islice(reader.training(), 1))
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-10)
    assert all(relative(grads[key], p.grad) < 1e-9 for key, p in plain.named_parameters())
    summary = pools(2).run(train, config)[0]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", dtype=torch.float64)
    assert saved.config.rope_parameters == plain.config.rope_parameters
    assert saved.config.max_position_embeddings == 96
    held_out = list(itertools.islice(reader.held_out(), 3))
    with torch.no_grad():
        of_yarn = one_device(saved, held_out).item()
        unscaled = one_device(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64), held_out).item()
    assert summary.held_out_loss == pytest.approx(of_yarn, abs=1e-10) and abs(of_yarn - unscaled) > 1e-4
    asked = {"data": corpus, "seq_len": 96, "held_out": 0.2, "sequences": 3, "device": "cpu", "dtype": "float64"}
    asked |= {"model": source, "tokenizer": "bytes", "rope_scaling": "yarn:2"}
    (evaluated,) = pools(1).run(evaluate, EvalConfig(**asked))[0]
    assert evaluated.loss == pytest.approx(of_yarn, abs=1e-10)


# What is loaded and what is left behind


def test_a_run_leaves_everything_behind(pools, corpus, tmp_path):
    config = config_of(corpus, tmp_path / "run", seed=5)
    summary = pools(2).run(train, config)[0]
    folder = tmp_path / "run"
    assert parse(["--config", str(folder / "config.toml")]) == config
    assert metrics(folder, "step") == [1, 2, 3, 4]
    assert metrics(folder, "tokens") == [97, 194, 291, 388]
    assert all(record["bytes_sent"] == record["bytes_predicted"] > 0 for record in records(folder))
    assert (summary.first_loss, summary.last_loss) == (losses(folder)[0], losses(folder)[-1])
    assert summary.bytes_sent == summary.bytes_predicted
    assert len(summary.bytes_sent) == len(summary.peak_memory) == 2
    assert min(summary.peak_memory) > 50e6
    assert summary_of(folder)["perplexity"] == pytest.approx(math.exp(summary.held_out_loss))
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [event.value for event in events(folder, "loss")] == pytest.approx(losses(folder), rel=1e-6)
    assert all(events(folder, name) for name in ("lr", "grad_norm", "tokens_per_second", "held_out_loss"))


def test_the_checkpoint_gives_the_same_held_out_loss_elsewhere(pools, corpus, tmp_path):
    """Packed documents: test_train_families.py."""
    config = config_of(corpus, tmp_path, pack="none", seq_len=61)
    summary = pools(2).run(train, config)[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config._attn_implementation != "burst"
    reader, tokenizer = open_sequences(config)
    held_out = list(itertools.islice(reader.held_out(), 3))
    assert len(held_out) == 3
    assert summary.held_out_tokens == sum(sequence.valid_tokens for sequence in held_out)
    with torch.no_grad():
        assert one_device(model, held_out).item() == pytest.approx(summary.held_out_loss, abs=1e-5)
    text = "def f(x):\n\treturn x  # é"
    assert AutoTokenizer.from_pretrained(tmp_path / "model")(text)["input_ids"] == tokenizer.encode(text).tolist()[:-1]


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_is_loaded_from_a_folder_and_trained_with_its_window(pools, corpus, tmp_path, mistral, tied):
    source = mistral
    if tied:
        config = MistralConfig(**SMALL, head_dim=8, sliding_window=13, initializer_range=0.2, tie_word_embeddings=True)
        source = saved_model(config, tmp_path / "tied", 4)
    # A learning rate that changes nothing: what is saved and evaluated is what was loaded.
    config = config_of(corpus, tmp_path / "run", model=source, tokenizer="bytes", lr=1e-30, steps=2)
    config = replace(config, model=replace(config.model, max_positions=500_000))
    summary = pools(2).run(train, config)[0]
    reader, tokenizer = open_sequences(config)
    assert tokenizer.vocab_size == 258
    plain = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        expected = one_device(plain, itertools.islice(reader.held_out(), 3)).item()
    assert summary.held_out_loss == pytest.approx(expected, abs=1e-5)
    before, after = load_file(Path(source) / "model.safetensors"), weights(tmp_path / "run")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert (again.config.sliding_window, again.config.tie_word_embeddings) == (13, tied)
    assert again.config.max_position_embeddings == 500_000


def test_a_folder_that_lacks_weights_is_refused(pools, corpus, tmp_path, mistral):
    shutil.copytree(mistral, tmp_path / "damaged")
    file = tmp_path / "damaged" / "model.safetensors"
    kept = {key: value for key, value in load_file(file).items() if key != "model.layers.1.mlp.up_proj.weight"}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(
        WorkerError, match=r"no weights for model\.layers\.1\.mlp\.up_proj\.weight; they would be random"
    ):
        pools(1).run(train, config_of(corpus, tmp_path / "run", model=str(tmp_path / "damaged"), tokenizer="bytes"))


def test_bf16_computes_in_bf16_and_keeps_fp32_weights(pools, corpus, tmp_path):
    pools(2).run(train, config_of(corpus, tmp_path / "half", dtype="bfloat16"))
    pools(2).run(train, config_of(corpus, tmp_path / "full"))
    assert {value.dtype for value in weights(tmp_path / "half").values()} == {torch.float32}
    half, full = losses(tmp_path / "half"), losses(tmp_path / "full")
    assert half == pytest.approx(full, abs=0.05)
    assert half != full
    assert all(record["bytes_sent"] == record["bytes_predicted"] > 0 for record in records(tmp_path / "half"))


def train_on_other_files(config):
    """Rank 1 reads in another order, as if its copy of the corpus were another."""
    seed = config.run.seed + int(os.environ["RANK"])
    train(replace(config, run=replace(config.run, seed=seed)))


@pytest.mark.parametrize("groups", [1, 2])
def test_ranks_that_read_other_tokens_are_reported(pools, corpus, tmp_path, groups):
    _, errors, lost = pools(2).gather(train_on_other_files, config_of(corpus, tmp_path, data_parallel=groups))
    assert not lost and len(errors) == 2
    for error in errors.values():
        assert isinstance(error, DisagreementError) and "digest of tokens" in str(error)


def agreements_of_a_step(config):
    """Return what the ranks compared in one step: call and fields of each agreement."""
    with join(device="cpu", timeout=60.0) as context:
        trainer = Trainer(config, context)
        sequences = list(itertools.islice(trainer.sequences, config.sequences_per_step))
        with mock.patch.object(Agreement, "agree", autospec=True, side_effect=Agreement.agree) as agreed:
            trainer.backward(sequences)
        return [(call.args[1], sorted(call.args[2])) for call in agreed.call_args_list]


@pytest.mark.parametrize("strategy", ["burst", "tensor"])
def test_the_sequences_of_a_step_are_compared_once(pools, corpus, tmp_path, strategy):
    config = config_of(corpus, tmp_path, strategy=strategy, seq_len=96, accumulate=3)
    for agreed in pools(2).run(agreements_of_a_step, config):
        compared = [call for call, fields in agreed if any("digest" in name or name == "documents" for name in fields)]
        # A call of a parallelized model compares its own batch, too.
        assert compared == ["the sequences to train on", *["the model"] * (3 if strategy == "burst" else 0)]
