"""Lightning's trainer over ranks, with nothing of ours but a parallelized model."""

from typing import Any

import lightning
import torch

from burst_attention.integrations import hf
from tests.support.hf_models import make_model
from tests.support.trainer_makers import ACCUMULATED, BATCH, COMMON, HALF, STEPS, collate, samples


class Fitted:
    """A run of Lightning's trainer, as the others tell of theirs."""

    def __init__(self, ours: bool, ranks: int, folder: str) -> None:
        self.ours, self.ranks, self.folder = ours, ranks, folder

    def history(self) -> list[dict[str, float]]:
        module = _lightning_module(self.ours)
        train, evaluated = (
            torch.utils.data.DataLoader(samples(count, seed), batch_size=BATCH, collate_fn=collate)
            for count, seed in ((80, 1), (23, 2))
        )
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=self.ranks if self.ours else 1,
            strategy="ddp" if self.ours else "auto",
            use_distributed_sampler=False,
            max_steps=STEPS,
            accumulate_grad_batches=ACCUMULATED,
            gradient_clip_val=0.2,
            val_check_interval=HALF * ACCUMULATED,
            default_root_dir=self.folder,
            **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
        )
        trainer.fit(module, train, evaluated)
        return module.reported


def _lightning_module(ours: bool) -> Any:
    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.reported, self.losses = make_model("llama", "sdpa", dtype=torch.float32), [], []

        def configure_model(self) -> None:
            if ours:
                hf.parallelize(self.model)

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            loss = self.model(**batch).loss
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
            self.log("eval_loss", self.model(**batch).loss, batch_size=len(batch["input_ids"]))

        def on_validation_epoch_end(self) -> None:
            if not self.trainer.sanity_checking:
                self.reported.append({"eval_loss": self.trainer.callback_metrics["eval_loss"].item()})

        def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, **_: Any) -> None:
            norm = torch.nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)
            self.reported.append({"loss": sum(self.losses) / len(self.losses), "grad_norm": norm.item()})
            self.losses.clear()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=COMMON["learning_rate"])

    return Module()
