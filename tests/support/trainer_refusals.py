"""The refused trainers that ``python tests/tools/refusals.py`` runs; see also tests/support/refusal_cases.py."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from tests.support.hf_models import make_model

TRAINERS: list[tuple[str, str]] = [
    ("trainer(context_size=2)", "all contexts must have the same size, and there is one process"),
    ("trainer(context_size='all')", "a context size must be a number"),
    ("trainer(compute_metrics=accuracy)", "it needs the logits of every token"),
    ("trainer(preprocess_logits_for_metrics=accuracy)", "it needs the logits of every token"),
    ("trainer(compute_loss_func=own_loss)", "it needs the logits of every token"),
    ("trainer(label_smoothing_factor=0.1)", "smoothing needs the logits of the whole vocabulary"),
    ("trainer(model=None, model_init=lambda: model)", "training would start with a model that is not parallelized"),
    ("trainer(model=dropping)", "ranks of a context would draw equal values for different tokens"),
    ("trainer(neftune_noise_alpha=5.0)", "each rank would draw different noise than one device"),
    ("trainer(torch_compile=True)", "communication between ranks can't be compiled into the model's graph"),
    ("trainer(accelerator_config={'dispatch_batches': True})", "all ranks of a context must read the same batch"),
    ("trainer(accelerator_config={'split_batches': True})", "all ranks of a context must read the same batch"),
    ("trainer(eval_use_gather_object=True)", "each sample would count once per rank"),
    ("trainer(train_sampling_strategy='batch_rebalance')", "all ranks of a context must read the same batch"),
    (
        "trainer(parallelism_config=ParallelismConfig(tp_size=2))",
        "tensor parallelism and contexts would both split the attention",
    ),
    ("trainer(context_size=4, parallelism_config=ParallelismConfig(cp_size=2))", "the two sizes contradict each other"),
    ("type('Mine', (Trainer, BurstMixin), {})", "the trainer's methods would run instead of the mixin's"),
    ("spread(dict)", "the class is not a Trainer"),
    ("spread(trl.RLOOTrainer)", "it gathers by rank, without the accelerator"),
    ("spread(trl.DistillationTrainer)", "a teacher's distribution needs whole logits"),
]


def trainer_names(_: Any) -> dict[str, Any]:
    """Return names: ``trainer(...)`` builds a Trainer with the mixin, ``spread(kind)`` mixes it into another class."""

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
