"""Join a job as one rank: choose the device, set the thread count, create the process group and its mesh."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DATA, CONTEXT, TENSOR = "data", "context", "tp"
SHARDS = "shards"  # the axes of data and context as one, over which weights are sharded beside tensor parallelism


def make_mesh(device_type: str, *, data_parallel: int = 1, tensor_parallel: int = 1) -> DeviceMesh:
    """Make the (``data``, ``context``) mesh of all ranks; consecutive ranks share a sequence. Every rank calls it.

    With ``tensor_parallel`` above 1 it has a third axis, ``tp``, of consecutive ranks, which share their tokens.
    """
    world, share = dist.get_world_size(), data_parallel * tensor_parallel
    if data_parallel < 1 or tensor_parallel < 1 or world % share:
        product = f"data_parallel={data_parallel}" + f" x tensor_parallel={tensor_parallel}" * (tensor_parallel > 1)
        raise ValueError(f"{product} must divide the number of ranks, {world}")
    sizes = {DATA: data_parallel, CONTEXT: world // share, TENSOR: tensor_parallel}
    if tensor_parallel == 1:
        del sizes[TENSOR]
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_ranks(device: str) -> int:
    """Return the number of local workers for ``--device``: one per GPU, or one per core without GPUs."""
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    return gpus or cores()


def pick_device(device: str, local_ranks: int) -> Literal["cpu", "cuda"]:
    """Resolve ``--device`` to ``cpu`` or ``cuda``; raise ValueError for ``cuda`` with fewer GPUs than local ranks."""
    gpus = torch.cuda.device_count()
    if device == "cuda" and gpus < local_ranks:
        raise ValueError(f"--device cuda: {local_ranks} ranks need as many GPUs, this machine has {gpus}")
    return "cuda" if device != "cpu" and gpus >= local_ranks else "cpu"


@dataclass(frozen=True)
class RankContext:
    """One rank of a job."""

    device: torch.device
    mesh: DeviceMesh  # (data, context) or (data, context, tp), over all ranks
    everyone: DeviceMesh  # 1-D, over the same ranks

    @property
    def rank(self) -> int:
        return self.everyone.get_rank()

    @property
    def world(self) -> int:
        return self.everyone.size()

    @property
    def group_index(self) -> int:
        """This rank's index on the data axis. Ranks with the same index share their sequences."""
        return self.mesh.get_local_rank(DATA)

    @property
    def context_mesh(self) -> DeviceMesh:
        """The mesh of the ranks that share this rank's sequences."""
        return self.mesh[CONTEXT]

    @property
    def tensor_mesh(self) -> DeviceMesh | None:
        """The mesh of the ranks that share this rank's tokens by tensor parallelism; None without it."""
        return self.mesh[TENSOR] if TENSOR in (self.mesh.mesh_dim_names or ()) else None

    @property
    def is_first_of_tensor(self) -> bool:
        """Whether this rank counts for those that share its tokens."""
        return self.tensor_mesh is None or self.tensor_mesh.get_local_rank() == 0

    def sum_over_groups(self, value: float) -> float:
        """Sum one value per data-parallel group, in fp64. All ranks get the same result."""
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=self.mesh.get_group(DATA))
        return total.item()

    def greatest(self, *values: int) -> list[int]:
        """Return the maximum of each value over all ranks, with one small all-reduce between CPUs."""
        numbers = torch.tensor(values)
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        return numbers.tolist()

    def collect(self, value: object) -> list:
        """Gather ``value`` from all ranks, in rank order."""
        values = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def peak_memory(self) -> int:
        """Return this rank's peak memory in bytes: allocated on its GPU, or resident on the CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        status = Path("/proc/self/status")
        if status.exists():
            # On Linux, getrusage also counts the memory that the launcher held when it started this process.
            lines = status.read_text().splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@contextmanager
def join(*, device: str, timeout: float, data_parallel: int = 1, tensor_parallel: int = 1) -> Iterator[RankContext]:
    """Join the job of torchrun's environment, or use the existing process group; yield this rank's context.

    ``device``: ``auto`` uses GPUs if there is one for each local rank. ``timeout``: of the group, in seconds.
    """
    joined = dist.is_initialized()
    local_rank, local_ranks = (int(os.environ.get(name, "0")) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    device_type = pick_device(device, max(local_ranks, 1))
    own_device = torch.device(device_type, local_rank) if device_type == "cuda" else torch.device("cpu")
    if not joined:
        torch.set_num_threads(max(1, cores() // max(local_ranks, 1)))
        if device_type == "cuda":
            torch.cuda.set_device(own_device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
            timeout=timedelta(seconds=timeout),
            device_id=own_device if device_type == "cuda" else None,
            **_meeting_again(os.environ),
        )
    mesh = make_mesh(device_type, data_parallel=data_parallel, tensor_parallel=tensor_parallel)
    everyone = init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("ranks",))
    axes = [mesh[name] for name in mesh.mesh_dim_names or ()]
    if tensor_parallel > 1:
        axes.append(mesh[DATA, CONTEXT]._flatten(SHARDS))
    # The public function came with torch 2.15, which deprecates the other one.
    set_timeout: Any = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    for axis in axes:  # a mesh's groups have torch's default, 30 minutes
        set_timeout(timedelta(seconds=timeout), axis.get_group())
    yield RankContext(own_device, mesh, everyone)
    # Not in a finally block: after an error, destroying the group could block on ranks that still wait.
    if not joined:
        dist.destroy_process_group()


def _meeting_again(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return arguments for ``init_process_group`` after torchrun restarted the ranks on one machine; else ``{}``.

    There torchrun's store keeps the addresses of the dead ranks, so each restart gets a separate key prefix.
    """
    count, agents = environment.get("TORCHELASTIC_RESTART_COUNT", "0"), environment.get("GROUP_WORLD_SIZE", "1")
    if count == "0" or agents != "1" or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    store = dist.TCPStore(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), is_master=False)
    own = {"rank": int(environment["RANK"]), "world_size": int(environment["WORLD_SIZE"])}
    return {"store": dist.PrefixStore(f"start {count}", store), **own}
