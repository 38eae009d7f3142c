"""``burst eval``: every strategy gives one model the same perplexity, and what can't be asked is refused."""

import gzip
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pydantic import TypeAdapter
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from burst_attention import DisagreementError, Mask, Strategy, make_plan
from burst_attention.cli import main
from burst_attention.loss import next_token_loss, next_token_nll
from burst_attention.testing import WorkerError
from burst_train.cli.preflight import check_evaluation
from burst_train.data.sequences import open_sequences
from burst_train.step.evaluate import _Evaluator, evaluate
from burst_train.step.evaluation import EvalConfig, Evaluation
from burst_train.step.loop import train
from burst_train.strategies import STRATEGIES
from tests.support.hf_models import SMALL
from tests.support.training import config_of, summary_of

SEQ_LEN, SEQUENCES = 96, 3


@pytest.fixture(scope="module")
def run(pools, corpus, tmp_path_factory):
    """The folder of a small training run, whose model has 4 query and 2 key-value heads."""
    out = tmp_path_factory.mktemp("run")
    pools(1).run(train, config_of(corpus, out, steps=6))
    return out


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """A file as C4 comes: gzipped JSON lines of text, timestamp and url."""
    path = tmp_path_factory.mktemp("c4") / "c4-validation.00000-of-00001.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as lines:
        for index in range(9):
            text = "".join(f"{index * line % 13} of {line} made no sense.\n" for line in range(1 + index % 4))
            row = {"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": f"https://example.org/{index}"}
            lines.write(json.dumps(row) + "\n")
    return path


@pytest.fixture
def asked(run, documents):
    sizes = {"seq_len": SEQ_LEN, "sequences": SEQUENCES, "device": "cpu", "timeout": 60}
    return EvalConfig(model=str(run / "model"), data=str(documents), strategies=STRATEGIES, **sizes)


def by_transformers(config):
    """(mean loss, tokens) of the same sequences by transformers alone, one document at a time."""
    reader, _ = open_sequences(config.as_training)
    model = AutoModelForCausalLM.from_pretrained(config.model, attn_implementation="sdpa", dtype=torch.float32)
    total, count = 0.0, 0
    for sequence, _ in zip(reader.held_out(), range(config.sequences), strict=False):
        pieces = torch.from_numpy(sequence.tokens).long().tensor_split(sequence.cu_seqlens[1:-1])
        for ids in (piece for piece in pieces if len(piece) > 1):
            with torch.no_grad():
                logits = model(ids[None]).logits[0, :-1]
            total += F.cross_entropy(logits.double(), ids[1:], reduction="sum").item()
            count += len(ids) - 1
    return total / count, count


@pytest.mark.long
def test_every_strategy_gives_the_loss_of_plain_transformers(pools, asked):
    loss, tokens = by_transformers(asked)
    answers = pools(2).run(evaluate, asked)
    assert answers[0] == answers[1], "the same on every rank"
    results = {result.strategy: result for result in answers[0]}
    assert tuple(results) == STRATEGIES
    for name, result in results.items():
        assert result.refused is None
        assert (result.tokens, result.sequences, result.reference) == (tokens, SEQUENCES, "single")
        assert result.loss == pytest.approx(loss, abs=1e-5), name
        assert result.perplexity == pytest.approx(results["single"].perplexity, abs=1e-4), name
        assert result.greatest_difference < 1e-3
        assert result.seconds > 0
    assert results["single"].greatest_difference == 0
    assert results["burst"].greatest_difference > 0, "another order of sums"


def test_a_presets_weights_are_those_of_the_seed(pools, asked):
    one = replace(asked, model="tiny", strategies=("single",))
    zero, again, other = (pools(1).run(evaluate, replace(one, seed=seed))[0][0].loss for seed in (0, 0, 1))
    assert zero == again != other


def test_half_precision_shows_in_the_greatest_difference(pools, asked):
    burst, single = pools(2).run(evaluate, replace(asked, dtype="bfloat16", strategies=("burst", "single")))[0]
    assert 1e-3 < burst.greatest_difference < 0.3
    assert burst.loss == pytest.approx(single.loss, abs=1e-2)


class TwoRanks:
    """A context in which the other rank answers for sequence 1, in which it found a difference of 0.25."""

    def collect(self, value):
        return [value, ({1: 3.0}, 0.25, 5.0)]


def test_a_result_is_of_all_tokens_and_its_greatest_difference_of_one():
    evaluator = object.__new__(_Evaluator)
    evaluator.context, evaluator.sequences, evaluator.tokens = TwoRanks(), [None] * 2, 8
    evaluator.reference = {0: torch.tensor([1.0, 1.0, 1.0, 0.0])}
    result = evaluator._result("burst", {0: torch.tensor([1.0, 0.5, 1.25, 0.0])}, 4.0)
    assert result.greatest_difference == 0.5
    assert result.loss == (2.75 + 3.0) / 8
    assert result.seconds == 5.0


@pytest.mark.long
def test_a_strategy_that_cannot_share_reports_why_and_the_others_run(pools, asked):
    names = ("single", "burst", "ring", "tensor", "tensor-sequence")
    results = {result.strategy: result for result in pools(4).run(evaluate, replace(asked, strategies=names))[0]}
    for name in names[3:]:
        assert f"--strategy {name}" in results[name].refused
        assert "2 key-value heads" in results[name].refused
        assert results[name].loss is None
        assert results[name].perplexity is None
    # Fewer sequences than ranks: one rank of ``single`` has no sequence.
    alone = pools(1).run(evaluate, replace(asked, strategies=("single",)))[0][0]
    for name in names[:3]:
        assert results[name].refused is None
        assert results[name].loss == pytest.approx(alone.loss, abs=1e-5)


def test_a_share_of_the_documents_is_the_one_that_training_held_out(pools, run, corpus):
    summary = summary_of(run)
    trained = config_of(corpus, run)
    config = EvalConfig(
        model=str(run / "model"),
        data=corpus,
        strategies=("ring", "burst"),
        seq_len=trained.data.seq_len,
        sequences=trained.data.held_out_sequences,
        held_out=trained.data.held_out,
        device="cpu",
    )
    for result in pools(2).run(evaluate, config)[0]:
        assert result.reference == "ring", "the first, where single is not asked for"
        assert result.tokens == summary["held_out_tokens"]
        assert result.loss == pytest.approx(summary["held_out_loss"], abs=1e-5)


@pytest.mark.parametrize("kind", ["tiny", "qwen2"])
def test_training_and_evaluation_read_special_tokens_in_a_text_alike(pools, tmp_path, kind):
    for index in range(12):
        text = f"<s>{index} opens</s><|endoftext|> and cafe\u0301 closes.</s>\n" * (1 + index % 5)
        (tmp_path / f"{index}.txt").write_text(text)
    model = kind
    if kind == "qwen2":
        shape = SMALL | {"vocab_size": 258}
        model = str(tmp_path / ".qwen2")
        Qwen2ForCausalLM(Qwen2Config(**shape, initializer_range=0.2)).save_pretrained(model)
    tokenizer = "bytes" if kind == "qwen2" else None
    config = config_of(str(tmp_path), tmp_path / ".run", model=model, tokenizer=tokenizer, steps=2, held_out=0.4)
    trained = pools(1).run(train, config)[0]
    asked = EvalConfig(
        model=str(tmp_path / ".run" / "model"),
        data=str(tmp_path),
        strategies=("single",),
        seq_len=config.data.seq_len,
        sequences=config.data.held_out_sequences,
        held_out=config.data.held_out,
        device="cpu",
    )
    check_evaluation(asked, 1)
    evaluated = pools(1).run(evaluate, asked)[0][0]
    assert evaluated.tokens == trained.held_out_tokens > 100
    assert evaluated.loss == pytest.approx(trained.held_out_loss, abs=1e-6)
    assert evaluated.perplexity == pytest.approx(trained.perplexity, rel=1e-6)


def evaluate_other_tokens(config):
    return evaluate(replace(config, seq_len=config.seq_len, data=config.data if dist.get_rank() else "stdlib"))


def test_ranks_that_read_other_tokens_are_reported(pools, asked):
    with pytest.raises(WorkerError) as refused:
        pools(2).run(evaluate_other_tokens, asked)
    assert all(isinstance(error, DisagreementError) for error in refused.value.errors.values())
    assert "the sequences to evaluate" in str(refused.value)


def likelihoods(chunk_tokens):
    """(the whole sequence's, their sum over the loss times its tokens, torch's own) in fp64."""
    plan = make_plan(41, mask=Mask(cu_seqlens=[0, 7, 7, 40, 41]), strategy=Strategy(layout="zigzag"))
    make = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=make, dtype=torch.float64) for shape in ((2, 41, 8), (23, 8)))
    ids = torch.randint(23, (2, 41), generator=make)
    shard, labels = plan.shard(hidden, 1), plan.shard_labels(ids)
    nll = next_token_nll(shard, weight, labels, plan, chunk_tokens=chunk_tokens)
    assert not nll.requires_grad
    loss = next_token_loss(shard, weight, labels, plan, num_valid=1.0, chunk_tokens=chunk_tokens)
    targets = torch.full_like(ids, -100)
    targets[:, :-1] = ids[:, 1:]
    targets[:, [6, 39]] = -100
    right = F.cross_entropy(F.linear(hidden, weight).transpose(1, 2), targets, reduction="none")
    return plan.unshard(nll, 1), loss.item(), right


@pytest.mark.parametrize("chunk_tokens", [None, 3])
def test_likelihoods_are_what_the_loss_sums(pools, chunk_tokens):
    for nll, loss, right in pools(2).run(likelihoods, chunk_tokens):
        assert (nll - right).abs().max() < 1e-12
        assert (nll[:, [6, 39, 40]] == 0).all()
        assert nll.sum().item() == pytest.approx(loss, abs=1e-11)


def wrong_likelihoods(plan_is):
    plan = make_plan(16)
    labels = torch.full((1, plan.length), 5 if plan.rank else 99)
    arguments = torch.zeros(1, plan.length, 4), torch.zeros(8, 4), labels
    if plan_is == "mapping":
        next_token_nll(*arguments, {None: plan})
    plan.unshard(next_token_nll(*arguments, plan), 1)


@pytest.mark.parametrize(
    ("plan_is", "error", "reported"), [("mapping", TypeError, "any one plan"), ("", ValueError, "99")]
)
def test_bad_labels_are_refused_on_every_rank(pools, plan_is, error, reported):
    with pytest.raises(WorkerError, match=reported) as refused:
        pools(2).run(wrong_likelihoods, plan_is)
    assert [type(e) for e in refused.value.errors.values()] == [error, error]


# The command


def flags(config, *more):
    shared = {"--model": config.model, "--data": config.data, "--seq-len": str(config.seq_len), "--device": "cpu"}
    return ["eval", *(word for pair in shared.items() for word in pair), "--sequences", str(SEQUENCES), *more]


def start(*words):
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    done = subprocess.run([sys.executable, *words], env=inherited, text=True, capture_output=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_the_command_shows_every_strategy_and_writes_json(pools, asked, tmp_path):
    script, path = str(Path(sys.executable).with_name("burst")), tmp_path / "eval.json"
    status, reported, wrong = start(
        script, *flags(asked, "--ranks", "2", "--json", str(path), "--strategies", *STRATEGIES)
    )
    assert status == 0, wrong
    expected = {result.strategy: result for result in pools(2).run(evaluate, asked)[0]}
    rows = {line.split()[0]: line for line in reported.split("───\n")[-1].splitlines()[: len(STRATEGIES)]}
    assert tuple(rows) == STRATEGIES, reported
    for name, row in rows.items():
        assert f"{expected[name].perplexity:,.4f}"[:-1] in row
    assert "reference" in rows["single"]
    assert "Warning" not in reported + wrong
    written = TypeAdapter(Evaluation).validate_json(path.read_bytes(), strict=True)
    assert [result.strategy for result in written.results] == list(STRATEGIES)
    assert all(
        result.loss == pytest.approx(expected[result.strategy].loss, abs=1e-6)
        and result.tokens == expected[result.strategy].tokens
        for result in written.results
    )
    assert written.setting["ranks"] == 2
    assert json.loads(path.read_text())["results"][0]["perplexity"] == written.results[0].perplexity


@pytest.mark.slow
def test_torchrun_evaluates_and_tells_what_is_refused(asked):
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "3", "-m", "burst_attention.cli"]
    status, reported, wrong = start(*torchrun, *flags(asked, "--strategies", "burst", "ulysses"))
    assert status == 0, wrong
    assert reported.count("greatest difference:") == 1, "one rank speaks"
    assert "ulysses is left out: " in reported and "4 query heads" in reported


@pytest.mark.parametrize(
    ("change", "more", "reported"),
    [
        ({"model": "/nowhere/model"}, (), "--model '/nowhere/model': there is no such folder"),
        ({"data": "/nowhere/c4.jsonl.gz"}, (), "--data '/nowhere/c4.jsonl.gz': no such file or directory"),
        ({"seq_len": 5000}, ("--pack", "none"), "leaves no token to evaluate"),
        ({}, ("--strategies", "ulysses", "tensor", "--ranks", "3"), "none of --strategies ulysses tensor can run"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_a_line(asked, capsys, change, more, reported):
    assert main(flags(replace(asked, **change), *more)) == 2
    output = capsys.readouterr()
    assert output.err.startswith("burst eval: ")
    assert reported in output.err
    assert output.err.count("\n") == 1
    assert not output.out
