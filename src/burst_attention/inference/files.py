"""A cache in a folder: one file of tensors per rank, and a manifest that names them and their digests.

    cache.json                  what the cache belongs to, and each file's size and digest
    rank-00000.safetensors      keys and values of each layer that rank 0 held, and their slots; states of all tokens
                                (and the keys of indexers; those of pools, and the last tokens' states)

The ranks that load a folder may be fewer or more than those that wrote it. They deal all pages among them again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .layer import SHARED, IndexedLayer, ShardedLayer, StateLayer
from .slots import PAGE

MANIFEST, VERSION = "cache.json", 2
_AGAIN = "save the cache again, or copy the whole folder again"


def write_rank(folder: Path, rank: int, layers: Sequence[Any]) -> dict[str, Any]:
    """Write this rank's file; return its entry of the manifest."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    slots: list[list[list[int]]] = []
    for number, layer in enumerate(layers):
        held = layer.held.ranges if isinstance(layer, ShardedLayer) else []
        slots.append([[each.start, each.stop, each.step] for each in held])
        if isinstance(layer, StateLayer) and rank == 0:  # equal on all ranks
            tensors |= {f"{number}.{name}": x.contiguous() for name, x in layer.tensors().items()}
        if isinstance(layer, ShardedLayer) and layer.is_initialized:
            key, value = layer.tokens()
            tensors |= {f"{number}.keys": key.contiguous(), f"{number}.values": value.contiguous()}
        if isinstance(layer, IndexedLayer) and layer.index is not None:
            tensors[f"{number}.index"] = layer.indexed().contiguous()
        if isinstance(layer, IndexedLayer) and rank == 0:
            tensors |= {f"{number}.{name}": x.contiguous() for name, x in layer.shared().items()}
    path = folder / f"rank-{rank:05}.safetensors"
    save_file(tensors, path, metadata={"slots": json.dumps(slots)})
    return {"name": path.name, "bytes": path.stat().st_size, "digest": digest_of_file(path)}


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Write the manifest under another name first, so that it is whole or missing."""
    whole = {**content, "version": VERSION}
    part = folder / f"{MANIFEST}.part"
    part.write_text(json.dumps({**whole, "digest": _digest_of_content(whole)}, indent=1))
    os.replace(part, folder / MANIFEST)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a folder."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"folder={str(folder)!r} has no {MANIFEST}: no cache was saved there, or saving did not end")
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        digest = content.pop("digest")
        altered = digest != _digest_of_content(content)
    except (ValueError, KeyError, AttributeError):
        altered = True
    if altered:
        raise ValueError(f"{path} was altered or is cut off; {_AGAIN}")
    if content["version"] != VERSION:
        raise ValueError(f"{path} has version {content['version']}, this program reads {VERSION}; {_AGAIN}")
    return content


def check_files(folder: Path, files: Sequence[dict[str, Any]]) -> None:
    """Compare files with their entries in the manifest; raise ValueError for one that is missing or altered."""
    for entry in files:
        path = folder / entry["name"]
        size = path.stat().st_size if path.is_file() else None
        if size != entry["bytes"]:
            what = "is missing" if size is None else f"has {size} bytes, not {entry['bytes']}"
            raise ValueError(f"{path} {what}; {_AGAIN}")
        if digest_of_file(path) != entry["digest"]:
            raise ValueError(f"{path} was altered: its digest is not the one of {MANIFEST}; {_AGAIN}")


def read_layers(folder: Path, files: Sequence[dict[str, Any]], layers: Sequence[Any], *, rank: int, world: int) -> None:
    """Fill layers with those pages that this rank holds among ``world`` ranks, and with all states."""
    from safetensors import safe_open

    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(folder / each["name"], "pt")) for each in files]
        slots = [json.loads(file.metadata()["slots"]) for file in opened]
        for number, layer in enumerate(layers):
            names = {f"{number}.keys", f"{number}.index"}
            held = [n for n, file in enumerate(opened) if names & {*file.keys()}]
            if isinstance(layer, StateLayer):
                columns = opened[0].get_tensor(f"{number}.columns")
                layer.update_conv_state(columns, conv_kernel_size=columns.shape[2])
                if f"{number}.state" in opened[0].keys():  # noqa: SIM118
                    layer.update_recurrent_state(opened[0].get_tensor(f"{number}.state"))
            elif held:
                for name in SHARED if isinstance(layer, IndexedLayer) and layer.pool else ():
                    if f"{number}.{name}" in opened[0].keys():  # noqa: SIM118
                        setattr(layer, name, opened[0].get_tensor(f"{number}.{name}"))
                _read_pages(layer, number, [(opened[n], slots[n][number]) for n in held], rank, world)


def _read_pages(layer: ShardedLayer, number: int, files: list[tuple[Any, Any]], rank: int, world: int) -> None:
    """Fill a layer with this rank's pages of files, given with the ranges of slots that they hold."""
    names = [name for name in ("keys", "values", "index") if f"{number}.{name}" in files[0][0].keys()]  # noqa: SIM118
    parts: list[list[Tensor]] = [[] for _ in names]
    own = []
    for file, ranges in files:
        slots = np.concatenate([np.empty(0, np.int64), *(np.arange(*each) for each in ranges)])
        mine = np.flatnonzero(slots // PAGE % world == rank)
        for name, each in zip(names, parts, strict=True):
            each.append(file.get_tensor(f"{number}.{name}").index_select(2, torch.from_numpy(mine)))
        own.append(slots[mine])
    every = np.concatenate(own)
    order = np.argsort(every, kind="stable")
    whole = (torch.cat(each, 2).index_select(2, torch.from_numpy(order)) for each in parts)
    tensors = dict(zip(names, whole, strict=True))
    if "keys" in tensors:  # else an earlier layer has them
        layer.store(tensors["keys"], tensors["values"], every[order])
    if "index" in tensors:
        layer.add_index(tensors["index"])  # type: ignore[attr-defined]  # only an IndexedLayer has one


def digest_of_file(path: Path) -> str:
    """Return a digest of a file's bytes."""
    digest = blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _digest_of_content(content: dict[str, Any]) -> str:
    return blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()
