"""FlashAttention 2, 3 and 4 (arXiv 2307.08691, 2407.08608; package flash_attn), by their private forward and backward.

The public functions don't return the lse, or give it no gradient. The private functions change between versions, so
their signatures are checked at import. An unknown parameter without a default raises an error that names the version.
An lse of an unexpected shape also raises an error.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .contract import CAPPING, WIDEST, check_gpu, major_capability, on_device_of
from .prove import user_folder
from .stock import HeadDims, Ops, StockInputs
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
    oldest: str | None = None  # the first version that computes right
    few_dims: tuple[int, ...] = ()  # capabilities with programs for dims up to 128, (192, 128) and (256, 256) only


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
    # Versions without ``dlse`` had neither windows nor a fixed order in backwards on capability 9.x, and the first one
    # with it, b11, still computes windows wrong.
    4: Generation(
        "flash-attn-4",
        "flash_attn.cute.interface",
        "_flash_attn_fwd",
        "_flash_attn_bwd",
        range(9, 12),
        None,
        needed=frozenset({"dlse"}),
        oldest="4.0.0b12",
        few_dims=(10, 11),
    ),
}

_CACHE, _CACHE_FOLDER = (f"FLASH_ATTENTION_CUTE_DSL_CACHE_{name}" for name in ("ENABLED", "DIR"))


@dataclass(frozen=True)
class FlashOps(Ops):
    """One generation's functions. Backwards have a fixed order under ``torch.use_deterministic_algorithms(True)``."""

    source: Generation
    name: str
    run: Callable[..., Any]
    run_back: Callable[..., Any]
    dlse: bool  # the backward subtracts a gradient of the lse in fp32: with out = 0, it can be given -D
    softcap: float = 0.0  # 0 for plain scores
    widest = WIDEST

    def capped(self, softcap: float) -> FlashOps:
        if any("softcap" not in getattr(each, "takes", ()) for each in (self.run, self.run_back)):
            raise ValueError(f"{self.source.package} {version_of(self.source.package)} has no soft cap; {CAPPING}")
        return replace(self, softcap=softcap)

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        check_gpu(self.name, device, dtype, self.source.capabilities)

    def check_dims(self, head_dims: HeadDims, device: torch.device) -> None:
        super().check_dims(head_dims, device)
        if self.softcap and self._widest_alone(head_dims, device):
            raise ValueError(
                f"kernel={self.name!r} has no soft cap for head dims {head_dims[0]} and {head_dims[1]} on {device}; "
                f"{CAPPING}"
            )

    def fitted(self, head_dims: HeadDims, device: torch.device) -> HeadDims:
        if max(head_dims) <= 128 or major_capability(device) not in self.source.few_dims:
            return super().fitted(head_dims, device)
        return (WIDEST, WIDEST) if self._widest_alone(head_dims, device) else (192, 128)

    def takes_delta(self, head_dims: HeadDims, device: torch.device) -> bool:
        return self.dlse and not self._widest_alone(head_dims, device)

    def _widest_alone(self, head_dims: HeadDims, device: torch.device) -> bool:
        """Return whether only FlashAttention 4's kernel for 256 fits, which takes neither dlse nor a soft cap."""
        fits = head_dims[0] <= 192 and head_dims[1] <= 128
        return not fits and major_capability(device) in self.source.few_dims

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Window, scale: float) -> tuple[Tensor, Tensor]:
        with on_device_of(q):
            out, lse, *_ = self.run({"q": q, "k": k, "v": v, **self._settings(seen, scale)})
        return out, lse

    def backward(self, x: StockInputs, seen: Window, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in (x.q, x.k, x.v))
        rows = {"softmax_lse": x.lse, "lse": x.lse, "dlse": None if x.delta is None else x.delta.neg()}
        tensors = {**x._asdict(), **rows, "dq": dq, "dk": dk, "dv": dv}
        with on_device_of(x.q):
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
        with _programs_on_disk():
            module = importlib.import_module(source.module)
    except Exception as error:  # missing, or built for another CUDA version or incompatible dependencies
        raise ValueError(
            f"kernel='flash{generation}' needs {source.module} ({type(error).__name__}: {error}): pip install "
            f"{source.package}, or use kernel='triton'"
        ) from None
    if source.oldest is not None and _is_older(version_of(source.package), source.oldest):
        raise ValueError(
            f"kernel='flash{generation}' needs {source.package} {source.oldest} or newer, not "
            f"{version_of(source.package)}, whose windows are wrong: pip install --pre -U {source.package}, or use "
            "kernel='triton'"
        )
    forward = _called_by_name(source, getattr(module, source.forward, None), source.forward, FORWARD, {"return_lse"})
    backward = _called_by_name(
        source, getattr(module, source.backward, None), source.backward, BACKWARD | source.needed, LSE
    )
    return FlashOps(source, f"flash{generation}", forward, backward, "dlse" in backward.takes)


@contextmanager
def _programs_on_disk() -> Iterator[None]:
    """Let FlashAttention 4 keep its compiled programs in the user's cache folder, unless the environment decides.

    It reads these variables when it is imported. By default each process compiles again; its own default folder is
    in /tmp, where others can write.
    """
    settings = {} if _CACHE in os.environ else {_CACHE: "1"}
    try:
        folder = user_folder() / "flash-attention-4"
        if not os.access(next(each for each in (folder, *folder.parents) if each.exists()), os.W_OK):
            settings = {}
        elif settings and _CACHE_FOLDER not in os.environ:
            settings[_CACHE_FOLDER] = str(folder)
    except (OSError, RuntimeError):  # RuntimeError: no home folder
        settings = {}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in settings:
            os.environ.pop(name, None)


def _is_older(version: str, oldest: str) -> bool:
    """Return whether a version such as 4.0.0b12 is older; a version of another form is not."""
    forms = [re.match(r"(\d+)\.(\d+)\.(\d+)(?:b(\d+))?", each) for each in (version, oldest)]
    if forms[0] is None or forms[1] is None:
        return False
    mine, least = ([1000 if part is None else int(part) for part in form.groups()] for form in forms if form)
    return mine < least


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
