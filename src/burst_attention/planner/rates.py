"""Rates of a machine's links and kernels, from which the planner predicts times."""

from __future__ import annotations

import json
import os
import tomllib
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link between two ranks."""

    latency: float  # seconds per message, in addition to the time of its bytes
    bytes_per_second: float  # of a port, in each direction
    shared: bool = False  # all ranks of a node share one port; otherwise each rank has a port
    busy: float = 0.0  # seconds per small message between products, when all ranks compute; 0: not measured


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
    read: float = 0.0  # bytes per second of weights that a product with one row reads; 0: not measured


@dataclass(frozen=True, kw_only=True)
class ChosenKernels:
    """The kernels of indexed attention (``kernels/chosen.py``)."""

    score: float  # FLOP/s of an indexer's scores, of one head
    keep: float  # scores per second of which the best keys are kept
    pool: float  # scores per second of which a block's greatest is kept
    look: float  # chosen keys per second that are looked up in a shard
    gather_forward: float  # bytes per second of rows that are gathered, in fp32
    gather_backward: float  # the same, with the sums of their gradients
    rows_forward: float  # FLOP/s with gathered rows
    rows_backward: float
    dense_forward: float  # FLOP/s with all keys of a small shard
    dense_backward: float


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
    chosen: ChosenKernels | None = None  # None: not measured

    def slowed(self, part: float) -> Rates:
        """Return these rates with the network's bytes per second times ``part``; links inside a node vary little."""
        return replace(self, across=replace(self.across, bytes_per_second=part * self.across.bytes_per_second))

    def speed(self, itemsize: int) -> Speed:
        """Return the kernel rates for inputs of this many bytes per element."""
        return {2: self.half, 4: self.single, 8: self.double}[itemsize]

    def as_dict(self, *, most: int | None = None) -> dict[str, Any]:
        """Return a dict of plain values for :meth:`from_dict`; ``most``: the longest text, in characters."""
        values = asdict(self) | {"name": self.name[:most], "source": self.source[:most]}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_dict(cls, values: Any) -> Rates:
        """Return values as rates. Raise ValueError if one is missing, unknown, out of range, or a text not in UTF-8."""
        if isinstance(values, Mapping):
            values = {"measured_on": None, "chosen": None, **values}
            for table, name in (("overhead", "read"), ("inside", "busy"), ("across", "busy")):  # older files have none
                if isinstance(values.get(table), Mapping):
                    values[table] = {name: 0.0, **values[table]}
        return cls(**_checked(values, cls, "the rates"))


MOST_SHOWN = 40  # longest bad value in an error message, in characters

# Within these ranges a prediction of any sequence neither overflows nor vanishes.
_PER_SECOND, _SECONDS = (1.0, 1e30), (0.0, 1e9)
_RANGES: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(("bytes_per_second", "forward", "backward", "fold"), _PER_SECOND),
    **dict.fromkeys(("score", "keep", "pool", "look"), _PER_SECOND),
    **{f"{what}_{way}": _PER_SECOND for what in ("gather", "rows", "dense") for way in ("forward", "backward")},
    **dict.fromkeys(("latency", "busy", "launch_forward", "launch_backward", "visit", "call"), _SECONDS),
    **dict.fromkeys(("block", "at_once"), (0.0, 1e9)),
    "read": (0.0, 1e30),
    "ranks": (1, 2**31),
}

_OPTIONAL: Mapping[str, type[MeasuredOn | ChosenKernels]] = {"measured_on": MeasuredOn, "chosen": ChosenKernels}


def _checked(values: Any, kind: Any, what: str, prefix: str = "") -> dict[str, Any]:
    """Return a table's values, nested tables as dataclasses; ValueError unless they are those of ``kind``."""
    kinds = get_type_hints(kind)
    if not isinstance(values, Mapping):
        raise ValueError(f"{what} must be a table of {', '.join(kinds)}, not {values!r}")
    for fault, odd in (("is missing", {*kinds} - {*values}), ("is unknown", {*values} - {*kinds})):
        if odd:
            raise ValueError(f"{min(odd)} {fault} in {what}; the names are {', '.join(sorted(kinds))}")
    result = dict(values)
    for key, field_type in kinds.items():
        value, shown = values[key], f"{prefix}{key}={values[key]!r:.{MOST_SHOWN}}"
        if key in _OPTIONAL:
            kind_of_table = _OPTIONAL[key]
            table = value if value is None else _checked(value, kind_of_table, f"[{key}]", f"{key}.")
            result[key] = table if table is None else kind_of_table(**table)
        elif is_dataclass(field_type):
            result[key] = field_type(**_checked(value, field_type, f"[{key}]", f"{key}."))  # type: ignore[operator]
        elif field_type is bool:
            if not isinstance(value, bool):
                raise ValueError(f"{shown} must be true or false")
        elif field_type is str:
            if not isinstance(value, str):
                raise ValueError(f"{shown} must be a text")
            if any("\ud800" <= character <= "\udfff" for character in value):
                raise ValueError(f"{shown} has a lone surrogate, which UTF-8 can't hold")
        else:
            (least, most), whole = _RANGES[key], field_type is int
            number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
            if not number or not least <= value <= most:
                raise ValueError(f"{shown} must be a {'whole ' * whole}number from {least:g} to {most:g}")
            result[key] = field_type(value)
    return result


def user_file() -> Path:
    """Return the file that ``burst calibrate`` writes and that plans read."""
    folder = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    return (folder if folder.is_absolute() else Path.home() / ".config") / "burst-attention" / "rates.toml"


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
