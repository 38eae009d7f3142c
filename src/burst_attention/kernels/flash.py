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
from typing import Any, ClassVar

import torch
from torch import Tensor

from .contract import CAPPING, check_gpu
from .windowed import MULTIPLE, Window


@dataclass(frozen=True)
class Generation:
    """Where one FlashAttention generation is installed, and which GPUs it supports."""

    package: str  # the distribution, named in errors
    module: str
    forward: str
    backward: str
    capabilities: range  # compute capability, major
    unlimited: int | None  # value for an unlimited side of the window
    widest: int = 256  # head dim
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
class FlashOps:
    """One generation's functions. Backwards have a fixed order under ``torch.use_deterministic_algorithms(True)``."""

    generation: int
    run: Callable[..., Any]
    run_back: Callable[..., Any]
    softcap: float = 0.0  # 0 for plain scores
    multiple: ClassVar[int] = MULTIPLE

    @property
    def name(self) -> str:
        return f"flash{self.generation}"

    @property
    def widest(self) -> int:
        return GENERATIONS[self.generation].widest

    @property
    def takes_delta(self) -> bool:
        """Return whether the backward subtracts a gradient of the lse in fp32: with out = 0, it can be given -D."""
        return "dlse" in getattr(self.run_back, "takes", ())

    def capped(self, softcap: float) -> FlashOps:
        source = GENERATIONS[self.generation]
        if any("softcap" not in getattr(each, "takes", ()) for each in (self.run, self.run_back)):
            raise ValueError(f"{source.package} {version_of(source.package)} has no soft cap; {CAPPING}")
        return replace(self, softcap=softcap)

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        check_gpu(self.name, device, dtype, GENERATIONS[self.generation].capabilities)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, window: Window, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self.run({"q": q, "k": k, "v": v, **self._settings(window, scale)})
        return out, lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        window: Window,
        scale: float,
        delta: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        tensors = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "dq": dq, "dk": dk, "dv": dv}
        rows = {"softmax_lse": lse, "lse": lse, "dlse": None if delta is None else delta.neg()}
        self.run_back({**tensors, **rows, **self._settings(window, scale)})
        return dq, dk, dv

    def _settings(self, window: Window, scale: float) -> dict[str, Any]:
        """Return every setting under each name that some version uses."""
        unlimited = GENERATIONS[self.generation].unlimited
        left, right = (unlimited if side is None else side for side in window)
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
    return FlashOps(generation, forward, backward)


def version_of(package: str) -> str:
    """Return the installed version, or ``unknown``."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _called_by_name(
    source: Generation, function: Any, name: str, needed: set[str], others: set[str]
) -> Callable[[Mapping[str, Any]], Any]:
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
