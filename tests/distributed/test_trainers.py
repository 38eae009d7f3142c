"""Compare trainers over contexts with stock trainers in one process, like ``python tests/tools/trainers.py``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Trainer

from tests.support import trainer_cases, trainer_makers
from tests.support.trainer_cases import CASES
from tests.tools.trainers import Sides

EVERYDAY = (
    "data 2 x context 2",
    "iterable",
    "memory",
    "memory, fsdp2",
    "fsdp2, shard 2 x context 2",
    "own loss",
    "own loss, data 2 x context 2",
    "sft packed",
    "dpo",
    "grpo, data 2 x context 2",
)


@pytest.fixture(scope="module")
def sides(pools):
    made = Sides(pools)
    yield made
    made.alone.shutdown()


@pytest.mark.parametrize(
    "name", [name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
@pytest.mark.long
def test_losses_norms_and_evaluations_are_the_stock_trainers(sides, name):
    found = sides.compare(CASES[name])
    assert CASES[name].holds(found), found


def histories(folder):
    """Return logged losses and final weights of a whole run, a run stopped after 5 steps, and its continuation."""
    case, reported = CASES["resumed"], []
    with trainer_cases.as_started(case, ours=True):
        for name, stop in (("whole", False), ("parts", True), ("parts", False)):
            trainer = trainer_makers.make_padded(case, True, f"{folder}/{name}", stop=stop)
            trainer.train(resume_from_checkpoint=name == "parts" and not stop)
            losses = {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}
            reported.append((losses, {key: value.clone() for key, value in trainer.model.state_dict().items()}))
    return reported


@pytest.mark.long
def test_a_resumed_run_is_to_the_bit_one_that_was_not_stopped(pools, tmp_path):
    for whole, stopped, resumed in pools(4).run(histories, str(tmp_path)):
        assert len(whole[0]) == 10
        assert len(stopped[0]) == 5
        assert resumed[0] == whole[0]
        assert all(torch.equal(resumed[1][name], value) for name, value in whole[1].items())
    folder = tmp_path / "whole" / "checkpoint-10"
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert not any("burst" in path.read_text() for path in folder.glob("*.json"))
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.config._attn_implementation == "sdpa"
    assert all(torch.equal(whole[1][name], value) for name, value in loaded.state_dict().items())


def questions(folder):
    """Evaluate, predict and generate with a trainer before training."""
    case = CASES["data 2 x context 2"]
    with trainer_cases.as_started(case, ours=True):
        trainer = trainer_makers.make_padded(case, True, folder)
        before = trainer.evaluate()["eval_loss"]
        try:
            trainer.predict(trainer.eval_dataset)
        except ValueError as error:
            refused = str(error)
        trainer.args.prediction_loss_only = True
        predicted = trainer.predict(trainer.eval_dataset).metrics["test_loss"]
        generated = trainer.model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)
    return before, refused, predicted, generated.tolist()


def test_evaluating_before_training_predicting_and_generating(pools, tmp_path):
    model = trainer_makers.make_model("llama", "sdpa", dtype=torch.float32)
    rows = trainer_makers.collate(trainer_makers.samples(23, 2))
    expected = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False).tolist()
    with torch.no_grad():
        losses = [model(**{k: v[i : i + 4] for k, v in rows.items()}).loss.item() for i in range(0, 23, 4)]
    for before, refused, predicted, generated in pools(4).run(questions, str(tmp_path)):
        assert before == pytest.approx(sum(losses[:-1]) * 4 / 23 + losses[-1] * 3 / 23, abs=1e-6)
        assert predicted == before
        assert "prediction_loss_only=True" in refused
        assert generated == expected


PROBLEMS = ("single_label_classification", "multi_label_classification", "regression")


def evaluated_head(folder, problem):
    """Return the eval_loss of a classifier, or of a mixture of experts, over 23 samples."""
    return trained_head(folder, problem).evaluate()["eval_loss"]


def trained_head(folder, problem):
    case = CASES["data 2 x context 2"]
    with trainer_cases.as_started(case, ours=True):
        model, data, collated = head_of(problem)
        args = trainer_makers.arguments_of(case, True, folder)
        kind = trainer_makers.over_contexts(Trainer)
        return kind(model=model, args=args, eval_dataset=data, data_collator=collated, context_size=2)


def head_of(problem):
    if problem == "mixture":
        return trainer_makers.mixture(), trainer_makers.samples(23, 2), trainer_makers.collate
    return trainer_makers.classifier(problem), trainer_makers.graded(23, 2, problem), trainer_makers.collate_graded


def batches_of(data, size):
    return [data[i : i + size] for i in range(0, len(data), size)]


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.long
def test_a_classifier_is_evaluated_over_contexts_as_in_one_process(pools, tmp_path, problem):
    model, data, collated = head_of(problem)
    with torch.no_grad():
        expected = sum(len(b) * model.eval()(**collated(b)).loss.item() for b in batches_of(data, 4)) / len(data)
    for found in pools(4).run(evaluated_head, str(tmp_path), problem):
        assert found == pytest.approx(expected, abs=1e-6)


def test_a_routers_loss_is_in_an_evaluation_once(pools, tmp_path):
    model, data, collated = head_of("mixture")

    def parts(rows):
        with torch.no_grad():
            out = model.eval()(**collated(rows))
        aux = model.router_aux_loss_coef * out.aux_loss.item()
        tokens = (collated(rows)["labels"][:, 1:] != -100).sum().item()
        return out.loss.item() - aux, aux, tokens

    expected = one_process = 0.0
    for batch in batches_of(data, 4):
        plain, whole, tokens = parts(batch)
        routed = sum(aux * n for _, aux, n in map(parts, batches_of(batch, 2))) / tokens
        expected += len(batch) * (plain + routed) / len(data)
        one_process += len(batch) * (plain + whole) / len(data)
    for found in pools(4).run(evaluated_head, str(tmp_path), "mixture"):
        assert found == pytest.approx(expected, abs=1e-5)
        assert found == pytest.approx(one_process, rel=0.02)


def alone(folder, ours):
    """Train in one process; return logged losses, the accelerator's class and the number of predictions."""
    with trainer_cases.as_started(CASES["right-padded"], ours=False):
        kind = trainer_makers.over_contexts(Trainer) if ours else Trainer
        given = {"train_dataset": trainer_makers.samples(80, 1), "eval_dataset": trainer_makers.samples(23, 2)}
        args = trainer_makers.arguments_of(CASES["right-padded"], False, folder)
        model = trainer_makers.make_model("llama", "sdpa", dtype=torch.float32)
        trainer = kind(model=model, args=args, data_collator=trainer_makers.collate, **given)
        trainer.train()
        losses = [row.get("loss", row.get("eval_loss")) for row in trainer.state.log_history]
        return losses, type(trainer.accelerator).__name__, len(trainer.predict(trainer.eval_dataset).predictions)


def test_in_one_process_it_is_the_trainer_that_it_was(sides, tmp_path):
    stock, ours = (sides.alone.submit(alone, str(tmp_path / str(ours)), ours).result() for ours in (False, True))
    assert ours == stock
    assert ours[1] == "Accelerator"
    assert ours[2] == 23


def rounded(folder):
    """Count the logged losses that are exact bf16 values."""
    log = trainer_cases.run_case("fsdp2 in bf16", folder, True)
    losses = torch.tensor([row["loss"] for row in log if "loss" in row])
    return (losses == losses.bfloat16()).sum().item()


@pytest.mark.long
def test_losses_of_mixed_precision_are_logged_unrounded(pools, tmp_path):
    assert all(equal <= 1 for equal in pools(2).run(rounded, str(tmp_path)))


def reading(folder, contexts_of):
    """Return this rank's first batch, and gathered and reduced values, for contexts of ``contexts_of`` ranks."""
    case = CASES["data 2 x context 2"]
    with trainer_cases.as_started(case, ours=True):
        trainer = trainer_makers.make_padded(case, True, folder)
        assert trainer.accelerator.contexts.shape == (dist.get_world_size() // contexts_of, contexts_of)
        batch = next(iter(trainer.get_train_dataloader()))
        accelerator = trainer.accelerator
        mine = torch.tensor([dist.get_rank()])
        counted = accelerator.gather(mine).tolist(), accelerator.reduce(mine + 1, "sum").item()
        mean = accelerator.reduce(mine + 1.0, "mean").item()
        try:
            accelerator.gather_for_metrics([{"a": "text"}])
        except ValueError as error:
            refused = str(error)
        return batch["input_ids"].tolist(), counted, mean, refused


def test_ranks_of_a_context_read_one_batch_and_count_once(pools, tmp_path):
    answers = pools(4).run(reading, str(tmp_path), 2)
    ids = [answer[0] for answer in answers]
    assert ids[0] == ids[1]
    assert ids[2] == ids[3]
    assert ids[0] != ids[2]
    for _, counted, mean, refused in answers:
        assert counted == ([0, 2], (1 + 2 + 3 + 4) // 2)
        assert mean == 2.5
        assert "pass tensors" in refused


def groups(folder, **changes):
    """Return the error for batches that don't hold whole groups of completions."""
    from dataclasses import replace

    Path(folder).parent.mkdir(exist_ok=True)
    case = replace(CASES["grpo, data 2 x context 2"], options=changes)
    if dist.get_rank() == 0:
        trainer_cases.save_model(f"{Path(folder).parent}/model")
    dist.barrier()
    with trainer_cases.as_started(case, ours=True), pytest.raises(ValueError) as error:
        trainer_makers.make_grpo(case, True, folder)
    return str(error.value)


def test_a_context_holds_whole_groups_of_completions(pools, tmp_path):
    for reported in pools(4).run(groups_of_eight, str(tmp_path / "run")):
        assert "multiple of num_generations_eval=8" in reported


def groups_of_eight(folder):
    return groups(folder, num_generations_eval=8)
