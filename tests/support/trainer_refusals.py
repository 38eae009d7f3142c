"""What ``python tests/tools/refusals.py`` asks of trainers, as tests/support/refusal_cases.py has it for all else."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from tests.support.hf_models import make_model

TRAINERS: list[tuple[str, str]] = [
    ("trainer(context_size=2)", "contexts are of one size; here is one process"),
    ("trainer(context_size='all')", "it is a number"),
    ("trainer(compute_metrics=accuracy)", "it is called with the logits of every token"),
    ("trainer(preprocess_logits_for_metrics=accuracy)", "it is called with the logits of every token"),
    ("trainer(compute_loss_func=own_loss)", "it is called with the logits of every token"),
    ("trainer(label_smoothing_factor=0.1)", "smoothing needs the logits of the whole vocabulary"),
    ("trainer(model=None, model_init=lambda: model)", "the model that training would begin with is not spread"),
    ("trainer(model=dropping)", "ranks of a context would draw the same for different tokens"),
    ("trainer(neftune_noise_alpha=5.0)", "each rank would draw other noise than one device"),
    ("trainer(torch_compile=True)", "the ranks' agreements are no graph"),
    ("trainer(accelerator_config={'dispatch_batches': True})", "ranks of a context read one batch"),
    ("trainer(accelerator_config={'split_batches': True})", "ranks of a context read one batch"),
    ("trainer(eval_use_gather_object=True)", "each sample would count once for each rank"),
    ("trainer(train_sampling_strategy='batch_rebalance')", "ranks of a context read one batch"),
    ("trainer(parallelism_config=ParallelismConfig(tp_size=2))", "both would cut the same heads' work"),
    ("trainer(context_size=4, parallelism_config=ParallelismConfig(cp_size=2))", "they say different things"),
    ("type('Mine', (Trainer, BurstMixin), {})", "the trainer's own methods would run, and train without contexts"),
    ("spread(dict)", "there would be nothing to mix into"),
    ("spread(trl.RLOOTrainer)", "it gathers by rank, past the accelerator"),
    ("spread(trl.DistillationTrainer)", "a teacher's distribution needs whole logits"),
]


def trainer_names(_: Any) -> dict[str, Any]:
    """``trainer(...)`` makes one of transformers with the mixin; ``spread(kind)`` puts the mixin before another."""

    import trl
    from accelerate import ParallelismConfig

    from burst_attention.integrations.trainers import BurstMixin

    class Mine(BurstMixin, Trainer):
        pass

    def spread(kind: type) -> Any:
        return type("Mine", (BurstMixin, kind), {})()

    own = (
        "compute_metrics",
        "compute_loss_func",
        "preprocess_logits_for_metrics",
        "context_size",
        "model",
        "model_init",
    )

    def trainer(**given: Any) -> Any:
        given = {"report_to": [], "use_cpu": True} | given
        arguments = TrainingArguments("out", **{name: value for name, value in given.items() if name not in own})
        return Mine(args=arguments, **{"model": model} | {name: given[name] for name in own if name in given})

    model, dropping = make_model("llama", "sdpa"), make_model("llama", "sdpa")
    dropping.model.layers[0].mlp.down_proj = torch.nn.Sequential(torch.nn.Dropout(0.1), torch.nn.Linear(48, 32))

    def own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return outputs.logits.sum()

    def accuracy(prediction: Any) -> dict[str, float]:
        return {}

    return {"trl": trl, "Trainer": Trainer, "ParallelismConfig": ParallelismConfig} | locals()
