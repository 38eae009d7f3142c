"""The refused trainers of tests/support/refusal_cases.py."""

from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from tests.support.hf_models import make_model

TRAINERS: list[tuple[str, str]] = [
    ("trainer(context_size=2)", "ValueError: context_size=2 is not a divisor of the number of processes, 1; change"),
    ("trainer(context_size='all')", "ValueError: context_size='all' is not a divisor of the number of processes, 1;"),
    ("trainer(compute_metrics=accuracy)", "ValueError: compute_metrics=<function trainer_names.<locals>.accuracy at"),
    ("trainer(preprocess_logits_for_metrics=accuracy)", "ValueError: preprocess_logits_for_metrics=<function"),
    ("trainer(compute_loss_func=own_loss)", "ValueError: compute_loss_func=<function"),
    ("trainer(label_smoothing_factor=0.1)", "ValueError: label_smoothing_factor=0.1 needs whole logits, which are"),
    ("trainer(model=None, model_init=lambda: model)", "ValueError: model_init=<function <lambda> at 0x"),
    ("trainer(model=dropping)", "ValueError: model.layers.0.mlp.down_proj.0 has dropout p=0.1, which is not"),
    ("trainer(neftune_noise_alpha=5.0)", "ValueError: neftune_noise_alpha=5.0 scales noise by the length of a"),
    ("trainer(torch_compile=True)", "ValueError: torch_compile=True would compile the communication between ranks;"),
    ("trainer(accelerator_config={'dispatch_batches': True})", "ValueError: dispatch_batches=True splits batches by"),
    ("trainer(accelerator_config={'split_batches': True})", "ValueError: split_batches=True splits batches by rank;"),
    ("trainer(eval_use_gather_object=True)", "ValueError: eval_use_gather_object=True gathers from each rank; leave"),
    ("trainer(train_sampling_strategy='batch_rebalance')", "ValueError: train_sampling_strategy='batch_rebalance'"),
    (
        "trainer(parallelism_config=ParallelismConfig(sp_size=2))",
        "ValueError: parallelism_config has sp_size=2, which is not supported; set cp_size in its place",
    ),
    (
        "trainer(context_size=4, parallelism_config=ParallelismConfig(cp_size=2))",
        "ValueError: context_size=4 is not the cp_size=2 of parallelism_config; set only one of",
    ),
    ("type('Mine', (Trainer, BurstMixin), {})", "TypeError: Mine has Trainer before BurstMixin, so it would not"),
    ("spread(dict)", "TypeError: Mine is not a Trainer; write class Mine(BurstMixin, Trainer)"),
    ("spread(trl.RLOOTrainer)", "TypeError: RLOOTrainer is not supported with BurstMixin; choose one of Trainer,"),
    ("spread(trl.DistillationTrainer)", "TypeError: DistillationTrainer is not supported with BurstMixin; choose"),
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
