"""Compare trainers over contexts with stock trainers in one process."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Trainer

from burst_attention import Strategy
from burst_attention.plan.balance import most_tokens
from tests.support import trainer_cases, trainer_makers
from tests.support.conditioning import greatest, moved_copy, share_of_loss
from tests.support.trainer_cases import CASES, IN_CI, Case, Sides
from tests.support.trainer_makers import BATCH, HALF, STEPS

SPREAD = CASES["data 2 x context 2"]


@pytest.fixture(scope="module")
def sides(pools):
    made = Sides(pools)
    yield made
    made.alone.shutdown()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in IN_CI else pytest.mark.slow) for name in CASES]
)
def test_losses_norms_and_evaluations_are_the_stock_trainers(sides, name):
    found = sides.compare(CASES[name])
    assert CASES[name].holds(found), found


def histories(folder):
    """Return logged losses and final weights of a whole run, a run stopped half way, and its continuation."""
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
        assert (len(whole[0]), len(stopped[0])) == (STEPS, HALF)
        assert resumed[0] == whole[0]
        assert all(torch.equal(resumed[1][name], value) for name, value in whole[1].items())
    folder = tmp_path / "whole" / f"checkpoint-{STEPS}"
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert not any("burst" in path.read_text() for path in folder.glob("*.json"))
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.config._attn_implementation == "sdpa"
    assert all(torch.equal(whole[1][name], value) for name, value in loaded.state_dict().items())


def questions(folder):
    """Read, evaluate, predict and generate with a trainer before training."""
    with trainer_cases.as_started(SPREAD, ours=True):
        trainer = trainer_makers.make_padded(SPREAD, True, folder)
        accelerator, mine = trainer.accelerator, torch.tensor([dist.get_rank()])
        assert accelerator.contexts.shape == (2, 2, 1)
        ids = next(iter(trainer.get_train_dataloader()))["input_ids"].tolist()
        counted = accelerator.gather(mine).tolist(), accelerator.reduce(mine + 1, "sum").item()
        mean = accelerator.reduce(mine + 1.0, "mean").item()
        with pytest.raises(ValueError, match="pass tensors"):
            accelerator.gather_for_metrics([{"a": "text"}])
        before = trainer.evaluate()["eval_loss"]
        with pytest.raises(ValueError, match="prediction_loss_only=True"):
            trainer.predict(trainer.eval_dataset)
        trainer.args.prediction_loss_only = True
        predicted = trainer.predict(trainer.eval_dataset).metrics["test_loss"]
        generated = trainer.model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)
    return ids, (*counted, mean), before, predicted, generated.tolist()


@pytest.mark.long
def test_ranks_of_a_context_read_one_batch_count_once_evaluate_and_generate(pools, tmp_path):
    model = trainer_makers.make_model("llama", "sdpa", dtype=torch.float32)
    rows = trainer_makers.collate(trainer_makers.samples(23, 2))
    expected = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False).tolist()
    means = []
    for part in (model, moved_copy(model)):
        with torch.no_grad():
            losses = [part(**{k: v[i : i + 4] for k, v in rows.items()}).loss.item() for i in range(0, 23, 4)]
        means.append(sum(losses[:-1]) * 4 / 23 + losses[-1] * 3 / 23)
    answers = pools(4).run(questions, str(tmp_path))
    ids = [answer[0] for answer in answers]
    assert ids[0] == ids[1] != ids[2] == ids[3]
    for _, counted, before, predicted, generated in answers:
        assert counted == ([0, 2], (1 + 2 + 3 + 4) // 2, 2.5)
        assert share_of_loss(before, *means) <= 1
        assert predicted == before
        assert generated == expected


class OwnLoader(trainer_makers.over_contexts(Trainer)):
    def get_eval_dataloader(self, eval_dataset=None):
        data = trainer_makers.Stream(trainer_makers.samples(11, 2))
        return self.accelerator.prepare(DataLoader(data, batch_size=4, collate_fn=trainer_makers.collate))


def evaluations(folder):
    """Return losses of data that is dropped, or refusals of data that can't be counted."""
    found = []
    for kind, kept, settings in (
        (OwnLoader.__base__, trainer_makers.samples(11, 2), {"dataloader_drop_last": True}),
        (OwnLoader, trainer_makers.samples(11, 2), {}),
        (OwnLoader.__base__, trainer_makers.Stream(trainer_makers.samples(11, 2)), {"dataloader_num_workers": 1}),
    ):
        with trainer_cases.as_started(CASES["plain"], ours=True):
            args = trainer_makers.arguments_of(CASES["plain"], True, folder, **settings)
            model = trainer_makers.make_model("llama", "sdpa", dtype=torch.float32)
            given = {"args": args, "eval_dataset": kept, "data_collator": trainer_makers.collate, "context_size": 2}
            try:
                found.append(kind(model=model, **given).evaluate()["eval_loss"])
            except ValueError as error:
                found.append(str(error))
    return found


@pytest.mark.long
def test_evaluations_drop_the_last_batch_and_refuse_what_they_can_not_count(pools, tmp_path):
    model = trainer_makers.make_model("llama", "sdpa", dtype=torch.float32)
    rows = trainer_makers.collate(trainer_makers.samples(11, 2)[:8])
    with torch.no_grad():
        losses = [model(**{k: v[i : i + 4] for k, v in rows.items()}).loss.item() for i in (0, 4)]
    for dropped, uncounted, workers in pools(2).run(evaluations, str(tmp_path)):
        assert dropped == pytest.approx(sum(losses) / 2, abs=1e-6)
        assert "reads a dataset without a length, whose samples are not counted" in uncounted
        assert "dataloader_num_workers=1: samples of an evaluation dataset without a length (Stream)" in workers


def evaluated_head(folder, problem):
    """Return the eval_loss of a classifier, or of a mixture of experts, over 23 samples."""
    with trainer_cases.as_started(SPREAD, ours=True):
        model, data, collated = head_of(problem)
        args = trainer_makers.arguments_of(SPREAD, True, folder)
        kind = trainer_makers.over_contexts(Trainer)
        return kind(model=model, args=args, eval_dataset=data, data_collator=collated, context_size=2).evaluate()[
            "eval_loss"
        ]


def head_of(problem):
    if problem == "mixture":
        return trainer_makers.mixture(), trainer_makers.samples(23, 2), trainer_makers.collate
    return trainer_makers.classifier(problem), trainer_makers.graded(23, 2, problem), trainer_makers.collate_graded


def batches_of(data, size):
    return [data[i : i + size] for i in range(0, len(data), size)]


@pytest.mark.parametrize(
    "problem",
    [
        pytest.param("single_label_classification", marks=pytest.mark.long),
        pytest.param("multi_label_classification", marks=pytest.mark.slow),
        pytest.param("regression", marks=pytest.mark.slow),
    ],
)
def test_a_classifier_is_evaluated_over_contexts_as_in_one_process(pools, tmp_path, problem):
    model, data, collated = head_of(problem)
    with torch.no_grad():
        expected = sum(len(b) * model.eval()(**collated(b)).loss.item() for b in batches_of(data, 4)) / len(data)
    for found in pools(4).run(evaluated_head, str(tmp_path), problem):
        assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.long
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


@pytest.mark.long
def test_in_one_process_it_is_the_trainer_that_it_was(sides, tmp_path):
    stock, ours = (sides.alone.submit(alone, str(tmp_path / str(ours)), ours).result() for ours in (False, True))
    assert ours == stock
    assert ours[1:] == ("Accelerator", 23)


def rounded(folder):
    """Count the logged losses, each of one batch, that are exact bf16 values."""
    case = CASES["fsdp2 in bf16"]
    case = replace(case, options=case.options | {"gradient_accumulation_steps": 1})
    with trainer_cases.as_started(case, ours=True):
        trainer = trainer_makers.make_fsdp2(case, True, folder)
        trainer.train()
    losses = torch.tensor([row["loss"] for row in trainer.state.log_history if "loss" in row])
    return (losses == losses.bfloat16()).sum().item()


@pytest.mark.long
def test_losses_of_mixed_precision_are_logged_unrounded(pools, tmp_path):
    assert all(equal <= 1 for equal in pools(2).run(rounded, str(tmp_path)))


def over_a_mesh(folder):
    """Return the whole weights after training over a mesh, and the errors for set-ups that are not supported."""
    case, refused = CASES["fsdp2, tp 2 x cp 2"], []
    if dist.get_rank() == 0:
        trainer_cases.save_model(f"{Path(folder).parent}/model")
    dist.barrier()
    for kind, options in (
        ("fsdp2", {"fsdp_config": {"cpu_ram_efficient_loading": True}}),
        ("dpo", {"fsdp": True}),
        ("padded", {}),
    ):
        other = replace(case, kind=kind, options=case.options | options)
        with trainer_cases.as_started(other, ours=True), pytest.raises(ValueError) as error:
            getattr(trainer_makers, f"make_{kind}")(other, True, folder)
        refused.append(str(error.value))
    with trainer_cases.as_started(case, ours=True):
        trainer = trainer_makers.make_fsdp2(case, True, folder)
        trainer.train()
        state = get_model_state_dict(trainer.model)
    return {name: value.full_tensor() for name, value in state.items()}, refused


def weights_alone(folder):
    case = CASES["fsdp2, tp 2 x cp 2"]
    with trainer_cases.as_started(case, ours=False):
        trainer = trainer_makers.make_fsdp2(case, False, folder)
        trainer.train()
    return trainer.model.state_dict()


@pytest.mark.long
def test_a_trainer_over_a_mesh_ends_with_the_stock_trainers_weights(pools, sides, tmp_path):
    wanted = sides.alone.submit(weights_alone, str(tmp_path / "stock")).result()
    for weights, refused in pools(4).run(over_a_mesh, str(tmp_path / "ours")):
        assert weights.keys() == wanted.keys()
        assert greatest((weights[name] - x).abs().max().item() for name, x in wanted.items()) < 2e-5
        loading, trainer, whole = refused
        assert "cpu_ram_efficient_loading']=True loads weights on one rank, but tp_size=2 cuts whole" in loading
        assert trainer == "tp_size=2 is not supported by DPOTrainer; leave it out, or use Trainer or SFTTrainer"
        assert whole.startswith("tp_size=2 needs FSDP2 over the other ranks; set fsdp=True")


def groups_of_eight(folder):
    """Return the error for batches that don't hold whole groups of completions."""
    Path(folder).parent.mkdir(exist_ok=True)
    case = replace(CASES["grpo, data 2 x context 2"], options={"num_generations_eval": 8})
    if dist.get_rank() == 0:
        trainer_cases.save_model(f"{Path(folder).parent}/model")
    dist.barrier()
    with trainer_cases.as_started(case, ours=True), pytest.raises(ValueError) as error:
        trainer_makers.make_grpo(case, True, folder)
    return str(error.value)


@pytest.mark.long
def test_a_context_holds_whole_groups_of_completions(pools, tmp_path):
    for reported in pools(4).run(groups_of_eight, str(tmp_path / "run")):
        assert "multiple of num_generations_eval=8" in reported


# Plain gradient descent: AdamW would magnify the rounding of small gradients, as the stock loss is computed in fp32.
BALANCED = {"strategy": Strategy(layout="balanced"), "long_tail": True, "dtype": torch.float64}
BALANCED |= {"optim": "sgd", "learning_rate": 1.0}
PACKED = {"packing": True, "max_length": 128, "samples": 600}
BALANCED_CASES = {
    "rows": Case("rows", "rows"),
    "padded": Case("padded", "padded"),
    "padding-free": Case("padding-free", "packed"),
    "window": Case("window", "packed", options={"family": "gemma2"}),
    "sft packed": Case("sft packed", "sft", options=PACKED),
    "sft wrapped": Case("sft wrapped", "sft", options=PACKED | {"packing_strategy": "wrapped", "max_length": 64}),
    "sft padding-free": Case("sft padding-free", "sft", options={"padding_free": True, "max_length": None}),
}


def balanced(name, ranks, folder, ours):
    """Return the logged losses and evaluations, the final weights, and (tokens, documents, layout, longest) by plan."""
    case = replace(BALANCED_CASES[name], ranks=ranks, context=ranks)
    case = replace(case, options=case.options | BALANCED)
    with trainer_cases.as_started(case, ours):
        trainer = getattr(trainer_makers, f"make_{case.kind}")(case, ours, folder)
        trainer.train()
    log = [row.get("loss", row.get("eval_loss")) for row in trainer.state.log_history]
    weights = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    plans = trainer.model._burst.plans._plans.items() if ours else ()
    used = [
        (seqlen, len(borders or ()) - 1, plans.one.layout, max(plans.one.schedule.layout.lengths))
        for (seqlen, borders, *_), plans in plans
    ]
    return [loss for loss in log if loss is not None], weights, used


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param(name, ranks, marks=pytest.mark.long if name in ("rows", "sft packed") else pytest.mark.slow)
        for name, ranks in zip(BALANCED_CASES, (4, 2, 4, 2, 2, 4, 2), strict=True)
    ],
)
def test_ranks_share_the_rows_of_a_batch_and_weights_are_those_of_one_process(pools, sides, tmp_path, name, ranks):
    losses, weights, _ = sides.alone.submit(balanced, name, 1, str(tmp_path / "stock"), False).result()
    assert len(losses) == STEPS + 2
    for mine, ours, used in pools(ranks).run(balanced, name, ranks, str(tmp_path / "ours"), True, timeout=300):
        assert mine == pytest.approx(losses, abs=2e-6)
        assert ours.keys() == weights.keys()
        assert greatest((ours[key] - value).abs().max().item() for key, value in weights.items()) < 2e-6
        assert all(kind == "balanced" and longest <= most_tokens(n, ranks) for n, _, kind, longest in used)
        assert max(documents for _, documents, *_ in used) >= BATCH, "the rows of a batch are documents of one row"
