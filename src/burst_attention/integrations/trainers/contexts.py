"""An accelerator that counts each context of several ranks as one process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import IterableDatasetShard
from accelerate.utils import recursively_apply
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, IterableDataset


class ContextAccelerator(Accelerator):
    """An accelerator that counts the neighbouring ranks of a context as one process."""

    contexts: DeviceMesh  # ("data", "context", "tensor") over all ranks; :meth:`make_contexts` sets it

    def make_contexts(self, size: int, tensor: int) -> None:
        """Group each ``size`` times ``tensor`` neighbours into one context; the tensor axis is the inner one."""
        ranks = torch.arange(self.state.num_processes).view(-1, size, tensor)
        self.contexts = DeviceMesh(self.device.type, ranks, mesh_dim_names=("data", "context", "tensor"))
        # A dispatching data loader reads on one process and splits its batch by rank, not by context.
        self.dataloader_config.dispatch_batches = False

    @property
    def num_processes(self) -> int:
        """The number of contexts."""
        return self.contexts.shape[0]

    @property
    def process_index(self) -> int:
        """The index of this rank's context."""
        return self.state.process_index // self.shared

    @property
    def shared(self) -> int:
        """How many ranks read the same batches."""
        return self.contexts.size() // self.contexts.shape[0]

    def _prepare_device_mesh(self) -> None:
        """Return no mesh, so that data loaders distribute batches by ``num_processes`` and ``process_index``."""

    def _prepare_tp(self, *args: Any) -> tuple[Any, ...]:
        """Return what is to be prepared: the model is cut already."""
        return args

    def gather(self, tensor: Any) -> Any:
        """Gather like :class:`Accelerator`, but once per context."""
        return recursively_apply(self.once, super().gather(tensor))

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather tensors like :class:`Accelerator`, but once per context; drop the last batch's repeated samples."""
        try:
            recursively_apply(lambda x: x, input_data, error_on_other_type=True)
        except TypeError:
            use_gather_object = True
        if use_gather_object:
            raise ValueError("gather_for_metrics can gather only tensors over contexts; pass tensors")
        return super().gather_for_metrics(input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce like :class:`Accelerator`, but count each context once."""
        reduced = super().reduce(tensor, reduction, scale)
        if reduction != "sum":
            return reduced
        shared = self.shared
        return recursively_apply(lambda x: x / shared if x.is_floating_point() else x // shared, reduced)

    def once(self, gathered: torch.Tensor) -> torch.Tensor:
        """Select the entries of each context's first rank: [ranks * n, ...] to [contexts * n, ...]."""
        return gathered.unflatten(0, (self.num_processes, self.shared, -1))[:, 0].flatten(0, 1)

    def once_of(self, gathered: Iterable[Any]) -> list[Any]:
        """Select the items of each context's first rank from a list with equally many items per rank."""
        items = list(gathered)
        rows = len(items) // self.contexts.size()
        return [
            items[context * self.shared * rows + row] for context in range(self.num_processes) for row in range(rows)
        ]


class Counted(IterableDataset):
    """An iterable dataset that counts its samples as they are read, because it has no length."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.samples = dataset, 0

    def __iter__(self) -> Iterator[Any]:
        self.samples = 0
        for sample in self.dataset:
            self.samples += 1
            yield sample

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # not set yet
            raise AttributeError(name)
        return getattr(self.dataset, name)


def samples_of(loader: DataLoader) -> int | None:
    """Return how many samples the loader's :class:`Counted` dataset has yielded on this rank; None if it has none."""
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDatasetShard):  # accelerate's, of a context
        dataset = dataset.dataset
    return dataset.samples if isinstance(dataset, Counted) else None
