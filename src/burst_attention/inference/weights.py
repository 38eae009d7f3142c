"""Shard a model's weights over the ranks, for models that no single rank can hold."""

from __future__ import annotations

import dis
import functools
import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

from burst_attention.attention.batch import digest_text, weight_samples
from burst_attention.attention.plan import Plan
from burst_attention.comm.agreement import Agreement
from burst_attention.integrations.hf.call.heads import base_of
from burst_attention.integrations.hf.layers.indexed import Indexer
from burst_attention.integrations.hf.reading import known
from burst_attention.integrations.hf.reading.attached import hooks_of
from burst_attention.integrations.hf.reading.parts import language_model_of
from burst_attention.integrations.hf.tensor import axis

from .columns import Shared, cut_weight, rows_of, transport_for
from .experts import adds_up, are_experts, weights_of
from .in_place import Room, open_rooms

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
# If all matrices that no rank can compute by rows are at most this part of a model, each rank keeps them whole. It is
# the most by which a rank then holds more than 1/W, and a step gathers nothing.
_SMALL = 1 / 64
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def shard_weights(model: Any, mesh: DeviceMesh) -> None:
    """Shard a parallelized model's weights over its ranks in place, to generate. Every rank must call it.

    A rank then holds 1/W of every matrix, and of a mixture's experts 1/W of them whole. Linear layers, embeddings, the
    head and experts compute a step of few tokens by what the rank holds, so no weight is gathered. For more tokens a
    rank gathers a layer at a time, and holds two. Of other matrices (routers, convolutions, quantized layers, layers
    with adapters) each rank keeps all if they are at most 1/64 of the model's bytes. Else FSDP2 shards them, and
    gathers them in each step. An allocator may keep the memory of gathered weights afterwards.

    Args:
        model: the result of ``hf.parallelize``, on a CPU or on the mesh's device; equal on all ranks.
        mesh: a mesh of one axis, over the ranks of ``hf.parallelize``.

    Raises:
        TypeError, ValueError: the model is not parallelized over the mesh's ranks, is a vision-language model, has no
            decoder layers, or layers share weights, or ranks have other weights.
    """
    layers = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
    layers = [each for each in layers if not any(each in other.modules() for other in layers if other is not each)]
    kind, base = type(model).__name__, base_of(model)
    if not layers:
        raise ValueError(f"{kind} has no decoder layers to shard; generate with whole weights")
    if language_model_of(base) is not None:
        raise ValueError(f"{kind} is a vision-language model, which can't be sharded yet; generate with whole weights")
    if twice := _in_two_layers(model, layers):
        raise ValueError(f"layers of {kind} share {twice}, which can't be sharded; generate with whole weights")
    state = getattr(base, "_burst", None)
    if state is None:
        raise ValueError(f"{kind} is not parallelized; call hf.parallelize(model) before shard_weights")
    with state.meeting.entering("shard_weights"):
        if state.shared is not None:
            raise ValueError(f"the weights of {kind} are sharded already; call shard_weights once")
        _check_ranks(state.plans.base, mesh)
        alone = mesh.size() == 1 or axis.cut_of(base) is not None
        modules = {} if alone else _sharable(base, layers, mesh.size())
        samples = weight_samples(base.named_parameters())
        names, values = digest_text(dict.fromkeys(modules)), digest_text(samples)
    remedy = "Load the same weights on every rank, and change the model alike"
    state.meeting.agree("shard_weights", {"names": names, "values": values}, remedy=remedy)
    state.shared = Shared(transport_for(state.plans.base.transport), [[] for _ in layers])
    numbers = {id(part): n for n, layer in enumerate(layers) for part in layer.modules()}
    rooms, rank = _rooms(modules.values(), mesh, state.plans.base.agreement), mesh.get_local_rank()
    size = sum(x.nbytes for x in model.parameters())
    cut: dict[int, tuple[nn.Parameter, list[Tensor] | None]] = {}  # tied weights stay tied
    for name, module in modules.items():
        weights = _cut_weights(module)
        for weight in weights.values():
            if id(weight) not in cut:
                parts = None
                if rooms is not None:
                    rows = zip(rooms, rows_of(len(weight), mesh.size()), strict=True)
                    parts = [room.take((len(each), *weight.shape[1:]), weight.dtype) for room, each in rows]
                cut[id(weight)] = cut_weight(weight, mesh, None if parts is None else parts[rank]), parts
        of_module = {own: cut[id(weight)] for own, weight in weights.items()}
        state.shared.share(module, name, numbers.get(id(module)), of_module)
    state.shared.keep(base, samples)
    ours = {weight for weight, _ in cut.values()}
    left = sum(x.nbytes for x in model.parameters() if x not in ours and x.dim() > 1)
    if mesh.size() == 1 or left <= _SMALL * size:
        model.to(mesh.device_type)
        return
    for module in (*layers, base):  # PEFT's model calls its base by another method than forward
        fully_shard(module, mesh=mesh, ignored_params=ours)


def step_bytes(model: Any, *, batch: int = 1, logits: bool = False) -> int:
    """Return the bytes that this rank sends in a step of one token a row because ranks share weights by rows.

    Attention sends :func:`burst_attention.attention.dealt.dealt_bytes` a layer beside them. FSDP2's are not counted.
    ``logits``: whether all ranks get the logits, as in sampling; not in greedy search.
    """
    shared = base_of(model)._burst.shared
    return 0 if shared is None else int(shared.step_bytes(batch, logits=logits))


def _check_ranks(plan: Plan, mesh: Any) -> None:
    """Refuse a mesh over other ranks than those that share the tokens."""
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise TypeError(f'mesh={mesh!r} must be a DeviceMesh of one axis: init_device_mesh("cpu", (ranks,))')
    group = plan.transport.group
    ranks = [dist.get_rank()] if plan.world == 1 else []
    if isinstance(group, dist.ProcessGroup):
        ranks = dist.get_process_group_ranks(group)
    if mesh.mesh.tolist() != ranks:
        raise ValueError(f"mesh has the ranks {mesh.mesh.tolist()}, hf.parallelize {ranks}; pass a mesh over the same")


def _rooms(modules: Iterable[Any], mesh: DeviceMesh, agreement: Agreement) -> list[Room] | None:
    """Return memory of all ranks for their rows of the modules' weights; None where they can't read each other's."""
    weights = {id(weight): weight for module in modules for weight in _cut_weights(module).values()}
    if not weights or mesh.device_type != "cpu":
        return None
    rank, ranks = mesh.get_local_rank(), mesh.size()
    rows = [(len(rows_of(len(x), ranks)[rank]), x) for x in weights.values()]
    return open_rooms(agreement, [count * x[0].nbytes for count, x in rows])


def _cut_weights(module: Any) -> dict[str, nn.Parameter]:
    """Return the parameters of a module that ranks share by rows, by their own names. Biases of columns stay whole."""
    own = weights_of(module)
    return {"weight": own["weight"]} if isinstance(module, (nn.Linear, nn.Embedding)) else own


def _sharable(model: Any, layers: list[Any], ranks: int) -> dict[str, Any]:
    """Return the modules, by name, that can compute by the rows of their weights that a rank holds."""
    users, found = defaultdict[int, set[str]](set), dict[str, Any]()
    for name, module in model.named_modules(remove_duplicate=False):
        for weight in module._parameters.values():
            users[id(weight)].add(name)
    inside = dict[int, list[Any]]()  # for each part of a layer, the modules around it
    for layer in layers:
        for owner in layer.modules():
            for part in owner.modules():
                inside.setdefault(id(part), []).append(owner)
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        around = inside.get(id(module), [])
        linear = type(module) is nn.Linear and (module is head or (around and not _is_used_apart(name, around)))
        alone = not around and not name.endswith(".base_layer")  # of an adapter, which may read its weight
        if linear or (alone and _is_embedding(module)):
            able = _is_plain(module) and bool(rows_of(len(module.weight), ranks)[-1])
        else:
            experts = bool(around) and are_experts(module) and not _is_used_apart(name, around)
            able = experts and _is_plain(module) and adds_up(module, rows_of(module.num_experts, ranks))
        if able:
            found[name] = module
    weights = {name: _cut_weights(module).values() for name, module in found.items()}
    return {name: found[name] for name, own in weights.items() if all(users[id(x)] <= found.keys() for x in own)}


def _is_embedding(module: Any) -> bool:
    """Return whether a module looks up rows, and scales them at most."""
    kind = type(module)
    scales = kind.__name__.endswith("ScaledWordEmbedding") and kind.__module__.startswith("transformers.models.")
    return (kind is nn.Embedding or (scales and isinstance(module, nn.Embedding))) and module.max_norm is None


def _is_plain(module: Any) -> bool:
    """Return whether nothing is attached to a module, and its weights are plain numbers."""
    attached = "forward" in vars(module) or any(True for _ in hooks_of(module))
    return not attached and all(
        type(x) is nn.Parameter and type(x.data) is Tensor and x.dtype in _DTYPES and not x.is_meta
        for x in _cut_weights(module).values()
    )


def _is_used_apart(name: str, around: list[Any]) -> bool:
    """Return whether modules around a linear layer may read its weight, or give it what a rank holds of the cache."""
    if any(isinstance(owner, Indexer) for owner in around):  # it runs between a layer's keys and its attention
        return True
    own = name.rpartition(".")[2]
    kinds: set[Any] = {type(owner) for owner in around}
    return any(known.within(kind.__module__, ["peft"]) or own in _used_apart(kind) for kind in kinds)


@functools.cache
def _used_apart(kind: Any) -> frozenset[str]:
    """Return the names X of ``X.weight`` in the code of a class, and those called on keys that a cache returned."""
    bases = (base for base in kind.__mro__ if base not in nn.Module.__mro__)
    members = {name: inspect.unwrap(x) for base in bases for name, x in vars(base).items() if callable(x)}
    codes = {name: x.__code__ for name, x in members.items() if isinstance(getattr(x, "__code__", None), CodeType)}
    found = {name for code in codes.values() for name in _weights_in(code)}
    for code in codes.values():
        names = [str(each.argval) for each in dis.get_instructions(code)]
        if "update" in names:  # latent attention expands all latents of the cache
            after = names[names.index("update") :]
            after = after[: after.index(_INTERFACE)] if _INTERFACE in after else after
            found.update(after, *(codes[name].co_names for name in after if name in codes))
    return frozenset(found)


def _weights_in(code: CodeType) -> Iterator[str]:
    for first, second in pairwise(dis.get_instructions(code)):
        if second.opname.startswith("LOAD_ATTR") and second.argval == "weight":
            yield str(first.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _weights_in(inner)


def _in_two_layers(model: nn.Module, layers: list[Any]) -> str | None:
    """Return the name of a weight that two layers, or a layer and another part, share; None without such a weight."""
    owner_of: dict[int, nn.Module | None] = {}
    owners = {id(part): layer for layer in layers for part in layer.modules()}
    for name, module in model.named_modules(remove_duplicate=False):
        for own, weight in module.named_parameters(recurse=False, remove_duplicate=False):
            if owner_of.setdefault(id(weight), owners.get(id(module))) is not owners.get(id(module)):
                return f"{name}.{own}"
    return None
