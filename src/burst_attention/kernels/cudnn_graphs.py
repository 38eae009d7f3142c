"""cuDNN's attention as graphs of its front end (package nvidia-cudnn-frontend), one for each shape and band.

torch's own operator, ``aten-cudnn``, takes no bands, and repeats the key-value heads of grouped queries. Such graphs
gave on one H100 (cuDNN 9.19, bf16, 16 heads of 128, 16,384 tokens), forward / backward in TFLOP/s: causal 621 / 500, a
window of 4,096 keys 577 / 481, and with 32 / 8 heads, causal, 574 / 513. This module ran with an emulation only.

Sums have no fixed order: a backward that has one needs memory in proportion to S^2.
"""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .contract import major_capability, on_device_of
from .stock import Ops, StockInputs, cudnn_gives_nan
from .windowed import CudaFlash, Window

MOST_GRAPHS = 512  # kept; each takes 0.05 to 1 s to build
TYPES = {torch.bfloat16: "BFLOAT16", torch.float16: "HALF", torch.float32: "FLOAT"}


@dataclass(frozen=True, eq=False)
class CudnnGraphs(Ops):
    """Graphs for :class:`~.windowed.Windowed`. ``other`` computes what cuDNN can't, or does wrong or slowly."""

    frontend: Any  # the module cudnn
    other: Ops
    built: OrderedDict[Any, tuple[Any, dict[str, Any], int]] = field(default_factory=OrderedDict)
    handles: dict[torch.device, list[Any]] = field(default_factory=dict)  # those that no thread is using
    name = "cudnn"
    widest = 128

    def widest_on(self, device: torch.device) -> int:
        """Return the largest head dimension: on an H100, 256 ran at 614 / 366 TFLOP/s."""
        return 256 if major_capability(device) == 9 else self.widest

    def takes(self, rows: int, columns: int, window: Window) -> bool:
        """Return whether cuDNN computes this launch. A window over a rectangle has a slow backward."""
        if cudnn_gives_nan(rows, columns, self.frontend.backend_version()):
            return False
        banded = window.right == 0 and (window.left is None or rows == columns)
        return banded or window == Window(None, None)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Window, scale: float) -> tuple[Tensor, Tensor]:
        if not self.takes(q.shape[1], k.shape[1], seen):
            return self.other.forward(q, k, v, seen, scale)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        stats = out.new_empty(q.shape[0], q.shape[2], q.shape[1], 1, dtype=torch.float32)
        given = {"q": q.transpose(1, 2), "k": k.transpose(1, 2), "v": v.transpose(1, 2)}
        self._run("sdpa", given, {"o": out.transpose(1, 2), "stats": stats}, seen, scale)
        return out, stats.squeeze(-1)

    def backward(self, x: StockInputs, seen: Window, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        if not self.takes(x.q.shape[1], x.k.shape[1], seen):
            return self.other.backward(x, seen, scale)
        dq, dk, dv = (torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in (x.q, x.k, x.v))
        named, results = {"q": x.q, "k": x.k, "v": x.v, "o": x.out, "dO": x.dout}, {"dQ": dq, "dK": dk, "dV": dv}
        given, made = ({name: each.transpose(1, 2) for name, each in some.items()} for some in (named, results))
        self._run("sdpa_backward", given | {"stats": x.lse.unsqueeze(-1)}, made, seen, scale)
        return dq, dk, dv

    def _run(
        self, name: str, given: Mapping[str, Tensor], made: Mapping[str, Tensor], window: Window, scale: float
    ) -> None:
        """Run a graph on the current stream, from ``given`` tensors [B, H, S, D] of any strides into ``made``."""
        tensors = {**given, **made}
        device = tensors["q"].device
        layout = tuple((x.dtype, x.shape, x.stride()) for x in tensors.values())
        key = name, device, layout, window, scale
        with on_device_of(tensors["q"]), self._handle(device) as handle:
            found = self.built.pop(key, None) or self._build(name, given, made, window, scale, handle)
            self.built[key] = graph, places, size = found  # the latest last
            while len(self.built) > MOST_GRAPHS:
                self.built.popitem(last=False)
            workspace = torch.empty(size, dtype=torch.uint8, device=device)
            graph.execute({places[each]: x for each, x in tensors.items()}, workspace, handle=handle)

    def _build(
        self,
        name: str,
        given: Mapping[str, Tensor],
        made: Mapping[str, Tensor],
        window: Window,
        scale: float,
        handle: Any,
    ) -> tuple[Any, dict[str, Any], int]:
        """Return the graph, its tensors by name, and the bytes of its workspace."""
        f, q = self.frontend, given["q"]
        io, wide = getattr(f.data_type, TYPES[q.dtype]), f.data_type.FLOAT
        graph = f.pygraph(io_data_type=io, intermediate_data_type=wide, compute_data_type=wide, handle=handle)
        places = {each: graph.tensor_like(x) for each, x in given.items()}
        options: dict[str, Any] = {"name": name, "attn_scale": scale}
        if name == "sdpa":
            options["generate_stats"] = True
        if window.right is not None:
            corner = "TOP_LEFT" if q.shape[2] == given["k"].shape[2] else "BOTTOM_RIGHT"  # the first is faster
            options["diagonal_alignment"] = getattr(f.diagonal_alignment, corner)
            options["diagonal_band_right_bound"] = 0
        if window.left is not None:
            options["diagonal_band_left_bound"] = window.left + 1  # counts the query's own position
        results = getattr(graph, name)(**places, **options)
        for (each, x), place in zip(made.items(), results, strict=True):
            place.set_output(True).set_dim(list(x.shape)).set_stride(list(x.stride()))
            if x.dtype == torch.float32:
                place.set_data_type(wide)
            places[each] = place
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([f.heur_mode.A, f.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        return graph, places, max(1, graph.get_workspace_size())

    @contextmanager
    def _handle(self, device: torch.device) -> Iterator[Any]:
        """Lend a handle of the current device, on its current stream. Two threads must not use one."""
        unused = self.handles.setdefault(device, [])
        handle = unused.pop() if unused else self.frontend.create_handle()
        try:
            self.frontend.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
            yield handle
        finally:
            unused.append(handle)


@cache
def cudnn_graphs() -> CudnnGraphs:
    """Import the front end. Raise ValueError if it is not installed, or finds no cuDNN."""
    try:
        frontend = importlib.import_module("cudnn")
        frontend.backend_version()
    except Exception as error:
        raise ValueError(
            f"kernel='cudnn' needs cuDNN's front end ({type(error).__name__}: {error}): pip install "
            "nvidia-cudnn-frontend, or use kernel='aten-cudnn'"
        ) from None
    return CudnnGraphs(frontend, CudaFlash())
