"""Rates of a machine's links and kernels, from which the planner predicts times."""

from __future__ import annotations

import json
import os
import tomllib
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link between two ranks."""

    latency: float  # seconds per message, in addition to the time of its bytes
    bytes_per_second: float  # of a port, in each direction
    shared: bool = False  # all ranks of a node share one port; otherwise each rank has a port


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Attention kernels' FLOP/s in one dtype, counting unmasked pairs."""

    forward: float
    backward: float


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """Costs of computing that are not FLOPs."""

    launch_forward: float  # seconds per tile of any size
    launch_backward: float
    visit: float  # seconds per visit
    fold: float  # bytes per second of partial results that are merged or added, including a kernel's time per row
    block: float  # rows and columns that a kernel computes together; at a mask's border half of them are wasted
    call: float  # exposed seconds of a pass: checks, agreement, rounding
    at_once: float = 0.0  # how many ranks can compute at the same time if they share cores; 0: they don't


@dataclass(frozen=True, kw_only=True)
class MeasuredOn:
    """The machine that ``burst calibrate`` measured."""

    device: str  # torch's name of the GPU, or ``cpu``
    torch: str  # version
    ranks: int

    def misfit(self, other: MeasuredOn) -> str | None:
        """Return why these rates don't hold for another machine; None if they do."""
        pairs = ((name, getattr(self, name), getattr(other, name)) for name in asdict(self))
        return next((f"{name} {old}, and this run has {name} {new}" for name, old, new in pairs if old != new), None)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The rates of one kind of cluster."""

    name: str
    source: str  # of the figures; if it contains ``estimated``, this library never measured them
    inside: Link  # between ranks of one node
    across: Link  # between ranks of two nodes
    half: Speed  # of kernels, for inputs of 2 bytes per element
    single: Speed  # 4 bytes
    double: Speed  # 8 bytes
    overhead: Overhead
    measured_on: MeasuredOn | None = None  # None: not by ``burst calibrate``, or by one before 0.3

    def slowed(self, part: float) -> Rates:
        """Return these rates with the network's bytes per second times ``part``; links inside a node vary little."""
        return replace(self, across=replace(self.across, bytes_per_second=part * self.across.bytes_per_second))

    def speed(self, itemsize: int) -> Speed:
        """Return the kernel rates for inputs of this many bytes per element."""
        return {2: self.half, 4: self.single, 8: self.double}[itemsize]

    def as_dict(self, *, most: int | None = None) -> dict[str, Any]:
        """Return a dict of plain values for :meth:`from_dict`; ``most``: the longest text, in characters."""
        found = asdict(self) | {"name": self.name[:most], "source": self.source[:most]}
        return {name: value for name, value in found.items() if value is not None}

    @classmethod
    def from_dict(cls, values: Any) -> Rates:
        """Return values as rates. Raise ValueError if one is missing, unknown, out of range, or a text not in UTF-8."""
        given = values.get("measured_on") if isinstance(values, Mapping) else None
        _check_names({**values, "measured_on": given} if isinstance(values, Mapping) else values, cls, "the rates")
        parts = {name: _part(kind, values[name], name) for name, kind in _PARTS.items()}
        for name in ("name", "source"):
            if not isinstance(values[name], str):
                raise ValueError(f"{name}={values[name]!r:.{MOST_SHOWN}} must be a text")
            if any("\ud800" <= character <= "\udfff" for character in values[name]):
                raise ValueError(f"{name}={values[name]!r:.{MOST_SHOWN}} has a lone surrogate, which UTF-8 can't hold")
        return cls(name=values["name"], source=values["source"], measured_on=_machine(given), **parts)


_PARTS = {name: kind for name, kind in get_type_hints(Rates).items() if is_dataclass(kind)}
MOST_SHOWN = 40  # longest bad value in an error message, in characters

# Within these ranges a prediction of any sequence neither overflows nor vanishes.
_PER_SECOND, _SECONDS = (1.0, 1e30), (0.0, 1e9)
_RANGES: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(("bytes_per_second", "forward", "backward", "fold"), _PER_SECOND),
    **dict.fromkeys(("latency", "launch_forward", "launch_backward", "visit", "call"), _SECONDS),
    **dict.fromkeys(("block", "at_once"), (0.0, 1e9)),
}


def _check_names(values: Any, kind: Any, what: str) -> None:
    if not isinstance(values, Mapping):
        raise ValueError(f"{what} must be a table of {', '.join(f.name for f in fields(kind))}, not {values!r}")
    names = {field.name for field in fields(kind)}
    for fault, odd in (("is missing", names - {*values}), ("is unknown", {*values} - names)):
        if odd:
            raise ValueError(f"{min(odd)} {fault} in {what}; the names are {', '.join(sorted(names))}")


def _machine(values: Any) -> MeasuredOn | None:
    if values is None:
        return None
    _check_names(values, MeasuredOn, "[measured_on]")
    device, version, ranks = (values[name] for name in ("device", "torch", "ranks"))
    whole = isinstance(ranks, (int, float)) and not isinstance(ranks, bool) and ranks == int(ranks) >= 1
    if not (isinstance(device, str) and isinstance(version, str) and whole):
        raise ValueError(f"measured_on={dict(values)!r:.{MOST_SHOWN}} must hold two texts and a number of ranks")
    return MeasuredOn(device=device, torch=version, ranks=int(ranks))


def _part(kind: Any, values: Any, name: str) -> Any:
    _check_names(values, kind, f"[{name}]")
    for key, value in values.items():
        if key == "shared":
            if not isinstance(value, bool):
                raise ValueError(f"{name}.shared={value!r:.{MOST_SHOWN}} must be true or false")
            continue
        least, most = _RANGES[key]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
            raise ValueError(f"{name}.{key}={value!r:.{MOST_SHOWN}} must be a number from {least:g} to {most:g}")
    return kind(**{key: value if key == "shared" else float(value) for key, value in values.items()})


def user_file() -> Path:
    """Return the file that ``burst calibrate`` writes and that plans read."""
    given = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".config") / "burst-attention" / "rates.toml"


def measured_file(name: str) -> Path:
    """Return the file in which :func:`~burst_attention.make_plan` keeps what it measured for groups of this name."""
    return user_file().with_name("measured") / f"{name}.toml"


def read_rates(path: Path | str) -> Rates:
    """Read rates from a TOML file. Raise ValueError, which names the file, if it can't be read or holds no rates."""
    try:
        return Rates.from_dict(tomllib.loads(Path(path).read_text("utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"can't read rates of {path}: {error}; write them again with burst calibrate, or remove the file"
        ) from error


def write_rates(rates: Rates, path: Path) -> None:
    """Write rates to a TOML file and make its folder. Raise ValueError if :func:`read_rates` would reject them."""
    lines = []
    for name, value in Rates.from_dict(rates.as_dict()).as_dict().items():
        if isinstance(value, dict):
            lines += ["", f"[{name}]", *(f"{key} = {_toml(x)}" for key, x in value.items())]
        else:
            lines.append(f"{name} = {_toml(value)}")
    path = path.resolve()  # a link stays one
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}")  # readers never see half a file
    try:
        unfinished.write_text("\n".join(lines) + "\n", "utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _toml(value: Any) -> str:
    if isinstance(value, str):
        # TOML has the escapes of JSON, but json.dumps doesn't escape DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value if isinstance(value, int) else float(value))
