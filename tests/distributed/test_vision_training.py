"""Train vision-language models on their processors' batches, over ranks and in one process: the same losses."""

import copy

import pytest
import torch
import torch.distributed as dist
from transformers import Trainer

from burst_attention.integrations import hf
from burst_attention.integrations.hf.call import vision
from tests.support import trainer_cases, trainer_makers
from tests.support.trainer_cases import Sides
from tests.support.vision_models import build
from tests.support.vision_processors import collator, samples

STEPS, BATCH = 6, 3
FAMILIES = ("qwen2_5_vl", "gemma3")


@pytest.fixture(scope="module")
def sides(pools):
    made = Sides(pools)
    yield made
    made.alone.shutdown()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_argument_of_a_processors_batch_has_a_place(family):
    model = build(family, torch.float32)
    batch = collator(family)(samples(3, family))
    kept = vision.whole_arguments(model)
    assert {
        "pixel_values",
        *(("image_grid_thw", "mm_token_type_ids") if "qwen" in family else ("token_type_ids",)),
    } <= kept
    assert batch.keys() - kept == {"input_ids", "attention_mask", "labels"}


def looped(family):
    """Return the losses of a plain loop over ranks, and of one process."""
    alone, collate = build(family, torch.float32, "sdpa"), collator(family)
    model = hf.parallelize(copy.deepcopy(alone), timeout=60)
    both = [(each, torch.optim.AdamW(each.parameters(), lr=1e-3)) for each in (model, alone)]
    data, found = samples(STEPS * BATCH, family), []
    for step in range(STEPS):
        batch = collate(data[step * BATCH : (step + 1) * BATCH])
        losses = []
        for each, optimizer in both:
            loss = each(**batch, use_cache=False).loss
            loss.backward()
            for parameter in each.parameters() if each is model else ():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append(losses)
    return found


@pytest.mark.long
def test_a_loop(pools):
    for ours, alone in pools(2).run(looped, "gemma3")[0]:
        assert ours == pytest.approx(alone, abs=2e-6)
        assert ours > 1


def trained(family, folder, ours, contexts):
    """Return the losses that Trainer logs, and the last evaluation's.

    These models refuse num_items_in_batch, so that a step's loss is the mean of its parts' means. One process
    accumulates the contexts' parts.
    """
    with trainer_cases.as_started(trainer_cases.CASES["right-padded"], ours):
        given = {"max_steps": STEPS, "eval_steps": STEPS, "remove_unused_columns": False}
        given |= {"per_device_train_batch_size": 4 // contexts, "gradient_accumulation_steps": 1 if ours else contexts}
        given |= {"per_device_eval_batch_size": 4 // contexts if ours else 4}
        args = trainer_makers.TrainingArguments(**trainer_makers.COMMON | given, output_dir=folder)
        trainer = (trainer_makers.over_contexts(Trainer) if ours else Trainer)(
            model=build(family, torch.float32, "sdpa"),
            args=args,
            train_dataset=samples(80, family),
            eval_dataset=samples(7, family, seed=1),
            data_collator=collator(family),
            **({"context_size": dist.get_world_size() // contexts} if ours else {}),
        )
        trainer.train()
        return [row[name] for row in trainer.state.log_history for name in ("loss", "eval_loss") if name in row]


@pytest.mark.long
@pytest.mark.parametrize(("family", "contexts"), [pytest.param("gemma3", 1, marks=pytest.mark.slow), ("qwen2_5_vl", 2)])
def test_trainer(sides, pools, tmp_path, family, contexts):
    expected = sides.alone.submit(trained, family, str(tmp_path / "alone"), False, contexts).result()
    assert len(expected) == STEPS + 1
    for found in pools(2 * contexts).run(trained, family, str(tmp_path / "ours"), True, contexts):
        assert found == pytest.approx(expected, abs=2e-6)
