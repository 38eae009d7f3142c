"""The (data, context) mesh of a job: data-parallel groups times the ranks that share each sequence."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DATA, CONTEXT = "data", "context"


def make_mesh(device_type: str, *, data_parallel: int = 1) -> DeviceMesh:
    """Make the (``data``, ``context``) mesh of all ranks; consecutive ranks share a sequence. Every rank calls it."""
    world = dist.get_world_size()
    if data_parallel < 1 or world % data_parallel:
        raise ValueError(f"data_parallel={data_parallel} must divide the number of ranks, {world}")
    return init_device_mesh(device_type, (data_parallel, world // data_parallel), mesh_dim_names=(DATA, CONTEXT))
