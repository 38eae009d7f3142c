"""What a trainer asks how many processes there are, and which one it is in, when several ranks are one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch.distributed.device_mesh import DeviceMesh


class ContextAccelerator(Accelerator):
    """An accelerator to which the neighbouring ranks of a context are one process: one reads, counts and is counted.

    Attributes:
        contexts: mesh ("data", "context") over all ranks; set by :meth:`make_contexts`.
    """

    contexts: DeviceMesh

    def make_contexts(self, size: int) -> None:
        """Take each ``size`` neighbours for one context."""
        ranks = torch.arange(self.state.num_processes).view(-1, size)
        self.contexts = DeviceMesh(self.device.type, ranks, mesh_dim_names=("data", "context"))
        # A dispatcher reads on one process and cuts its batch by ranks, not by contexts.
        self.dataloader_config.dispatch_batches = False

    @property
    def num_processes(self) -> int:
        """Of contexts."""
        return self.contexts.shape[0]

    @property
    def process_index(self) -> int:
        """Of the context that this rank is in."""
        return self.state.process_index // self.contexts.shape[1]

    def _prepare_device_mesh(self) -> None:
        """What a data loader asks: no axis of a mesh tells more of who reads what than the two numbers above."""

    def gather(self, tensor: Any) -> Any:
        """As :class:`Accelerator` does it, from each context once."""
        return recursively_apply(self.once, super().gather(tensor))

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As :class:`Accelerator` does it, from each context once, and cutting the last batch by what is left then."""
        try:
            recursively_apply(lambda x: x, input_data, error_on_other_type=True)
        except TypeError:
            use_gather_object = True
        if use_gather_object:
            raise ValueError("gather_for_metrics gathers tensors only over contexts; pass tensors")
        return super().gather_for_metrics(input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """As :class:`Accelerator` does it, counting each context once."""
        reduced = super().reduce(tensor, reduction, scale)
        if reduction != "sum":
            return reduced
        size = self.contexts.shape[1]
        return recursively_apply(lambda x: x / size if x.is_floating_point() else x // size, reduced)

    def once(self, gathered: torch.Tensor) -> torch.Tensor:
        """Of each context's first rank, from [ranks * n, ...]."""
        return gathered.unflatten(0, (*self.contexts.shape, -1))[:, 0].flatten(0, 1)

    def once_of(self, gathered: Iterable[Any]) -> list[Any]:
        """Of a list that all ranks gave as many items to, what each context's first one did."""
        items, (contexts, size) = list(gathered), self.contexts.shape
        rows = len(items) // (contexts * size)
        return [items[context * size * rows + row] for context in range(contexts) for row in range(rows)]
