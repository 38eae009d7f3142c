"""FlashAttention 2, 3 and 4 (arXiv 2307.08691, 2407.08608; package flash_attn), by their private forward and backward.

The public functions don't return the lse, or give it no gradient. The private functions change between versions, so
their signatures are checked at import. An unknown parameter without a default raises an error that names the version.
An lse of an unexpected shape also raises an error.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .contract import CAPPING, WIDEST, check_gpu
from .stock import Ops, StockInputs
from .windowed import Window


@dataclass(frozen=True)
class Generation:
    """Where one FlashAttention generation is installed, and which GPUs it supports."""

    package: str  # the distribution, named in errors
    module: str
    forward: str
    backward: str
    capabilities: range  # compute capability, major
    unlimited: int | None  # value for an unlimited side of the window
    needed: frozenset[str] = frozenset()  # parameters of the backward that its versions must have


GENERATIONS = {
    2: Generation(
        "flash-attn",
        "flash_attn.flash_attn_interface",
        "_flash_attn_forward",
        "_flash_attn_backward",
        range(8, 13),
        -1,
    ),
    3: Generation(
        "flash-attn-3", "flash_attn_interface", "_flash_attn_forward", "_flash_attn_backward", range(9, 10), -1
    ),
    # Versions without ``dlse`` had neither windows nor a fixed order in backwards on capability 9.x. On 10.x the
    # package itself refuses most head dimensions above 128.
    4: Generation(
        "flash-attn-4",
        "flash_attn.cute.interface",
        "_flash_attn_fwd",
        "_flash_attn_bwd",
        range(9, 12),
        None,
        needed=frozenset({"dlse"}),
    ),
}


@dataclass(frozen=True)
class FlashOps(Ops):
    """One generation's functions. Backwards have a fixed order under ``torch.use_deterministic_algorithms(True)``."""

    source: Generation
    name: str
    run: Callable[..., Any]
    run_back: Callable[..., Any]
    takes_delta: bool  # the backward subtracts a gradient of the lse in fp32: with out = 0, it can be given -D
    softcap: float = 0.0  # 0 for plain scores
    widest = WIDEST

    def capped(self, softcap: float) -> FlashOps:
        if any("softcap" not in getattr(each, "takes", ()) for each in (self.run, self.run_back)):
            raise ValueError(f"{self.source.package} {version_of(self.source.package)} has no soft cap; {CAPPING}")
        return replace(self, softcap=softcap)

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        check_gpu(self.name, device, dtype, self.source.capabilities)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Window, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self.run({"q": q, "k": k, "v": v, **self._settings(seen, scale)})
        return out, lse

    def backward(self, x: StockInputs, seen: Window, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in (x.q, x.k, x.v))
        rows = {"softmax_lse": x.lse, "lse": x.lse, "dlse": None if x.delta is None else x.delta.neg()}
        tensors = {**x._asdict(), **rows, "dq": dq, "dk": dk, "dv": dv}
        self.run_back({**tensors, **self._settings(seen, scale)})
        return dq, dk, dv

    def _settings(self, window: Window, scale: float) -> dict[str, Any]:
        """Return every setting under each name that some version uses."""
        left, right = (self.source.unlimited if side is None else side for side in window)
        return SETTINGS | {
            "softcap": self.softcap,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "softmax_scale": scale,
            "window_size": (left, right),
            "window_size_left": left,
            "window_size_right": right,
        }


# We never pass causal=True: a causal mask is a window with 0 keys to the right, which the kernels detect.
SETTINGS: dict[str, Any] = {
    "dropout_p": 0.0,
    "causal": False,
    "is_causal": False,
    "softcap": 0.0,
    "alibi_slopes": None,
    "return_softmax": False,
    "return_lse": True,
    "rng_state": None,
}
WINDOWS = {"window_size", "window_size_left", "window_size_right"}
LSE = {"softmax_lse", "lse"}
FORWARD = {"q", "k", "v", "softmax_scale"}
BACKWARD = FORWARD | {"dout", "out", "dq", "dk", "dv", "deterministic"}


@cache
def flash_ops(generation: int) -> FlashOps:
    """Import one generation's functions and check their signatures; raise ValueError if they can't be used."""
    source = GENERATIONS[generation]
    try:
        module = importlib.import_module(source.module)
    except Exception as error:  # missing, or built for another CUDA version or incompatible dependencies
        raise ValueError(
            f"kernel='flash{generation}' needs {source.module} ({type(error).__name__}: {error}): pip install "
            f"{source.package}, or use kernel='triton'"
        ) from None
    forward = _called_by_name(source, getattr(module, source.forward, None), source.forward, FORWARD, {"return_lse"})
    backward = _called_by_name(
        source, getattr(module, source.backward, None), source.backward, BACKWARD | source.needed, LSE
    )
    return FlashOps(source, f"flash{generation}", forward, backward, "dlse" in backward.takes)


def version_of(package: str) -> str:
    """Return the installed version, or ``unknown``."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _called_by_name(source: Generation, function: Any, name: str, needed: set[str], others: set[str]) -> _ByName:
    """Wrap ``function`` to take arguments by name; refuse it without ``needed``, or with unknown required ones."""
    version = f"{source.package} {version_of(source.package)}"
    if function is None:
        raise ValueError(
            f"{version}: {source.module} has no {name}; install a version that has it, or use kernel='triton'"
        )
    takes = _parameters(function)
    lacking = needed - set(takes)
    strange = {n for n, optional in takes.items() if not optional} - needed - others - WINDOWS - set(SETTINGS)
    if lacking or strange or not WINDOWS & set(takes):
        raise ValueError(
            f"{version}: {name}({', '.join(takes)}) has an unsupported signature; install another version, "
            "or use kernel='triton'"
        )

    return _ByName(function, tuple(takes))


@dataclass(frozen=True)
class _ByName:
    """A function that takes its arguments from a mapping."""

    function: Callable[..., Any]
    takes: tuple[str, ...]

    def __call__(self, values: Mapping[str, Any]) -> Any:
        return self.function(**{name: values[name] for name in self.takes if name in values})


def _parameters(function: Any) -> dict[str, bool]:
    """Map each parameter's name to whether it has a default: of a torch operator's schema, or a signature."""
    overload = getattr(function, "_opoverload", None)
    if overload is not None:
        return {argument.name: argument.has_default_value() for argument in overload._schema.arguments}
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default is not p.empty for p in parameters}
