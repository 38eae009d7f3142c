"""Support for trainers that generate their training data (GRPO): one generation and one reward per context."""

from __future__ import annotations

from collections import defaultdict, deque
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import set_seed

# TRL's logs of the last completions. The first three are gathered from all ranks; advantages come from the rewards.
_GATHERED = ("prompt", "completion", "images")
_LOGS = (*_GATHERED, "advantages", "rewards", "extra")


class OneGeneration:
    """The part of BurstMixin for trainers that generate; other trainers never call it."""

    _context_size: int | None

    def _generate_by_context(self) -> None:
        """Set the trainer's batch sizes and seeds per context instead of per rank, after checks."""
        trainer: Any = self
        args, accelerator = trainer.args, trainer.accelerator
        contexts, size = accelerator.num_processes, accelerator.shared
        if not set(_LOGS) <= set(getattr(trainer, "_logs", ())):
            raise RuntimeError(
                f"{type(trainer).__name__}._logs lacks one of {', '.join(_LOGS)} in trl {version('trl')}, a version "
                "that is not supported; in the checkout, run pip install -c constraints.txt -e '.[trainer]'"
            )
        args.generation_batch_size //= size
        trainer._logs.update({name: deque(maxlen=args.generation_batch_size) for name in (*_GATHERED, "advantages")})
        batches = {
            "per_device_train_batch_size * steps_per_generation": (args.generation_batch_size, "num_generations"),
            "per_device_eval_batch_size": (args.per_device_eval_batch_size * contexts, "num_generations_eval"),
        }
        for what, (completions, name) in batches.items():
            if completions % getattr(trainer, name):
                raise ValueError(
                    f"{what} gives {completions} completions over contexts={contexts}; make it a multiple of "
                    f"{name}={getattr(trainer, name)}"
                )
        set_seed(args.seed + accelerator.process_index)

    def _generate(self, prompts: list) -> Any:
        if self._context_size == 1:
            return super()._generate(prompts)  # type: ignore[misc]
        self._align_generators()
        generated = self._from_first(super()._generate(prompts))  # type: ignore[misc]
        self._align_generators()
        return generated

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        """Return the rewards of each context's first rank, [contexts * n, functions]: functions may be random."""
        rewards = super()._calculate_rewards(*args, **kwargs)  # type: ignore[misc]
        if self._context_size == 1:
            return rewards
        self._align_generators()
        return self.accelerator.once(rewards)  # type: ignore[attr-defined]

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        """Score completions, and log those of each context once, so that logs match the number of rewards."""
        trainer: Any = self
        if self._context_size == 1:
            return super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        kept = {name: trainer._logs[name] for name in (*_GATHERED, "extra")}
        new: dict[str, Any] = {name: deque() for name in _GATHERED} | {"extra": defaultdict(deque)}
        trainer._logs.update(new)
        try:
            scored = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        finally:
            trainer._logs.update(kept)
        columns = new.pop("extra")
        for name, items in new.items():
            kept[name].extend(trainer.accelerator.once_of(items))
        for name, items in columns.items():
            kept["extra"][name].extend(trainer.accelerator.once_of(items))
        return scored

    def _align_generators(self) -> None:
        """Copy the context's first rank's random state: shards of other lengths draw other amounts of numbers."""
        accelerator: Any = self.accelerator  # type: ignore[attr-defined]
        cuda = accelerator.device.type == "cuda"
        state, device_state = self._from_first((torch.get_rng_state(), torch.cuda.get_rng_state() if cuda else None))
        torch.set_rng_state(state)
        if cuda:
            torch.cuda.set_rng_state(device_state)

    def _from_first(self, value: Any) -> Any:
        """Broadcast a value from the context's first rank."""
        group = self.accelerator.contexts["context"].get_group()  # type: ignore[attr-defined]
        box = [value]
        dist.broadcast_object_list(box, group=group, group_src=0)
        return box[0]
