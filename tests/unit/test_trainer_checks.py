"""Test that BurstMixin refuses package versions that lack a method, and settings that it does not support."""

from types import SimpleNamespace

import accelerate
import pytest
import torch
import transformers
from accelerate import Accelerator
from transformers import Trainer, TrainingArguments

from burst_attention.integrations import hf
from burst_attention.integrations.trainers import BurstMixin
from burst_attention.integrations.trainers import checks as trainer_checks
from tests.support.hf_models import make_model


class Mine(BurstMixin, Trainer):
    pass


HOOKS = [(Trainer, transformers, name) for name in trainer_checks._OF_TRAINER]
HOOKS += [(Accelerator, accelerate, name) for name in trainer_checks._OF_ACCELERATOR]
# The first parameter that each must have, where it must have one.
FIRST = {"get_total_train_batch_size": "args", "floating_point_ops": "inputs", "compute_loss": "model"}
FIRST |= {"prediction_step": "model", "_get_dataloader": "dataset"}
FIRST |= {"gather": "tensor", "gather_for_metrics": "input_data", "reduce": "tensor"}


@pytest.mark.parametrize(("holder", "package", "name"), HOOKS)
def test_a_hook_that_is_gone_or_takes_other_arguments_is_named(monkeypatch, holder, package, name):
    if name in FIRST:
        monkeypatch.setattr(holder, name, lambda self, other: other)
        with pytest.raises(RuntimeError, match=f"{holder.__name__}.{name} lacks {FIRST[name]} in"):
            Mine()
        monkeypatch.undo()
    monkeypatch.delattr(holder, name)
    found = f"{package.__name__} {package.__version__}"
    with pytest.raises(RuntimeError, match=f"{holder.__name__}.{name} is gone in {found}"):
        Mine()


def test_what_only_an_online_trainer_has_is_asked_of_those(monkeypatch):
    class Online(Trainer):
        def _generate(self, prompts):
            raise NotImplementedError

    kind = type("Mine", (BurstMixin, Online), {})
    with pytest.raises(RuntimeError, match=r"Online\._calculate_rewards is gone in trl"):
        kind()


def test_the_installed_packages_have_every_hook():
    assert len(HOOKS) == 13
    trainer_checks.check_hooks(Mine, BurstMixin)


def test_a_trainer_before_the_mixin_is_refused_when_the_class_is_made():
    with pytest.raises(TypeError, match=r"write class Wrong\(BurstMixin, Trainer\)"):

        class Wrong(Trainer, BurstMixin):
            pass

    class Right(Mine):
        pass

    class Own(Trainer):
        pass

    class AlsoRight(BurstMixin, Own):
        pass

    with pytest.raises(TypeError, match=r"write class Below\(BurstMixin, Own\)"):

        class Below(Own, Mine):
            pass


def test_metrics_that_are_assigned_later_are_refused_before_training(tmp_path):
    args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    trainer = Mine(model=make_model("llama", "sdpa"), args=args, train_dataset=[{}])
    for name in ("compute_metrics", "preprocess_logits_for_metrics"):
        setattr(trainer, name, lambda *given: {})
        with pytest.raises(ValueError, match=f"{name}=.* needs whole logits"):
            trainer.train()
        setattr(trainer, name, None)


def test_memory_without_effect_is_refused(tmp_path):
    def made(size, memory, **settings):
        args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, **settings)
        return Mine(make_model("llama", "sdpa"), args, context_size=size, memory=memory)

    with pytest.raises(ValueError, match="needs contexts of more than one rank"):
        made(1, hf.Memory(recompute="layer"))
    with pytest.raises(ValueError, match="set gradient_checkpointing=False"):
        arguments = TrainingArguments(str(tmp_path), gradient_checkpointing=True, use_cpu=True)
        trainer_checks.check_memory(hf.Memory(recompute="layer"), SimpleNamespace(args=arguments), 2)


def test_losses_are_weighted_by_the_labels_that_they_average():
    def counted(labels, kind=None):
        config = SimpleNamespace(problem_type=kind)
        return trainer_checks.counted(SimpleNamespace(_burst=SimpleNamespace(form=None), config=config), labels)

    assert counted(torch.tensor([[1, -100, 2, 0], [3, -100, -100, -100]])) == 4  # of tokens
    assert counted(torch.tensor([1, -100, 2]), "single_label_classification") == 2
    assert counted(torch.ones(3, 5), "multi_label_classification") == counted(torch.ones(3), "regression") == 3


def test_recomputation_that_a_trainer_would_switch_off_is_refused():
    trainer = SimpleNamespace(args=SimpleNamespace(gradient_checkpointing=False))
    trainer_checks.check_memory(hf.Memory(recompute="layer"), trainer, 2)
    trainer.ref_model = None
    with pytest.raises(ValueError, match="leave recompute out, and set gradient_checkpointing=True"):
        trainer_checks.check_memory(hf.Memory(recompute="layer"), trainer, 2)
    trainer_checks.check_memory(hf.Memory(mlp_chunks=2), trainer, 2)
