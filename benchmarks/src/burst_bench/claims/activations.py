"""Print what a training step's activations are at its peak, tensor by tensor, as options that save memory are added.

The unit is one hidden vector for each of a rank's tokens. The model's layers have the given sizes and no data
(burst_train.forecast.footprint), so any length can be counted. Few layers are counted; with more, only the inputs of
recomputed layers grow in number, and with offload not even those.

    burst bench activations [--layers 3] [--tokens 4194304] [--ranks 8] [--all-layers 32]"""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from burst_train.engines.sequence import burst
from burst_train.forecast.footprint import LiveStep, live_step
from burst_train.memory import MemoryConfig
from rich.console import Console
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig

from ..tables import terminal

# The first of these that the stack names, from the inside: (file, functions or all, what its tensors are).
PLACES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("offload.py", (), "layer inputs"),
    ("loss/tokens.py", (), "loss"),
    ("head_chunks.py", ("add",), "fp32 sum of the gradient of attention's input"),
    ("head_chunks.py", ("forward",), "out and lse"),
    ("head_chunks.py", (), "q, k, v and gradients of a chunk of heads"),
    ("token_chunks.py", (), "norms and feed-forward layers, in chunks"),
    ("modeling_llama.py", ("apply_rotary_pos_emb", "rotate_half"), "q, k and rotary copies"),
    ("transformers/activations.py", (), "feed-forward layer"),
    ("hf/attention.py", (), "out and lse"),
)
LEAST = 0.05  # smaller figures are not shown, but are in the sum
OF_MODULES = {
    "LlamaRMSNorm": "norms, in fp32",
    "LlamaMLP": "feed-forward layer",
    "LlamaAttention": "q, k, v, out and lse",
    "LlamaDecoderLayer": "layer inputs",
    "LlamaModel": "layer inputs",
    "Embedding": "layer inputs",
}
POLICIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--remat layer", {}),
    ("+ --mlp-chunks 32", {"mlp_chunks": 32}),
    ("+ --attention-chunks 8", {"attention_chunks": 8}),
    ("+ --offload host", {"offload": "host"}),
)


@dataclass(frozen=True, kw_only=True)
class ActivationArguments:
    """Sizes of Llama-3-8B's layers, and of the sequence."""

    tokens: int = 2**22
    """Tokens of the sequence."""
    ranks: int = 8
    layers: int = 3
    """Layers to count."""
    all_layers: int = 32
    """Layers of the model whose total is printed."""
    svg: Path | None = None
    """Also draw the figures to this file."""


class NamedStep(LiveStep):
    """Counts live tensors by their place in the model, at the peak."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._names: dict[int, str] = {}
        self.at_peak: Counter[str] = Counter()
        super().__init__(*arguments, **options)

    def _see(self, tensors: Any) -> None:
        if self._phase:
            new = [x for x in tree_leaves(tensors) if isinstance(x, torch.Tensor)]
            for key in {x.untyped_storage()._cdata for x in new} - set(self._live):
                self._names[key] = _place()
        super()._see(tensors)

    def expect(self, more: int, *, attention: bool = False) -> None:
        """Record a peak, and what is alive."""
        before = self.peak.bytes
        super().expect(more, attention=attention)
        if self.peak.bytes > before:
            self.at_peak = Counter({"buffers of the attention call": more} if attention else {})
            for key, (ref, size) in self._live.items():
                if not ref.expired():
                    self.at_peak[self._names.get(key, "other")] += size


def _place() -> str:
    for frame, _ in traceback.walk_stack(None):  # from the inside
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        for name, functions, what in PLACES:
            if file.endswith(f"/{name}") and (not functions or function in functions):
                return what
        owner = type(frame.f_locals.get("self")).__name__
        if function == "forward" and owner in OF_MODULES:
            return OF_MODULES[owner]
    return "gradients between a layer's parts"


def counted(a: ActivationArguments, options: dict[str, Any]) -> dict[str, float]:
    """Return the hidden vectors per token at the peak, by place, for all layers."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=a.layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=a.tokens,
    )
    memory = MemoryConfig(remat="layer", **options)
    sizes: dict[str, Any] = {"seq_len": a.tokens, "world": a.ranks, "dtype": torch.bfloat16, "memory": memory}
    step = live_step(config, engine=burst(), **sizes, kind=NamedStep)
    assert isinstance(step, NamedStep)
    unit = 2 * config.hidden_size * -(-a.tokens // a.ranks)
    vectors = {name: size / unit for name, size in step.at_peak.items()}
    if memory.offload == "none":
        vectors["layer inputs"] += a.all_layers - a.layers
    return vectors


def main(arguments: list[str]) -> None:
    a = tyro.cli(ActivationArguments, prog="burst bench activations", description=__doc__, args=arguments)
    options: dict[str, Any] = {}
    columns = {name: counted(a, options := options | more) for name, more in POLICIES}
    first = columns[POLICIES[0][0]]
    names = sorted({name for found in columns.values() for name in found}, key=lambda name: -first.get(name, 0.0))
    shown = [name for name in names if max(found.get(name, 0.0) for found in columns.values()) >= LEAST]
    lines = [_line(name, {flags: found.get(name, 0.0) for flags, found in columns.items()}) for name in shown]
    lines.append(_line("sum", {flags: sum(found.values()) for flags, found in columns.items()}))
    title = f"Llama-3-8B, {a.all_layers} layers, {a.tokens:,} tokens, {a.ranks} ranks"
    Console().print(terminal(lines, title=title))
    if a.svg is not None:
        _draw(title, shown, columns, a.svg)


def _line(name: str, cells: dict[str, float]) -> dict[str, str]:
    return {"hidden vectors per token": name} | {flags: f"{number:.1f}" for flags, number in cells.items()}


def _draw(title: str, names: list[str], columns: dict[str, dict[str, float]], file: Path) -> None:
    """Draw one stacked bar for each policy."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "activations", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 4.4), layout="constrained")
        axes = figure.subplots()
        left = dict.fromkeys(columns, 0.0)
        colors = mpl.colormaps["tab20"].colors  # type: ignore[attr-defined]
        for name, color in zip(names, colors, strict=False):
            widths = [found.get(name, 0.0) for found in columns.values()]
            axes.barh([*columns], widths, left=[*left.values()], label=name, color=color)
            left = {flags: left[flags] + width for flags, width in zip(columns, widths, strict=True)}
        for n, total in enumerate(left.values()):
            axes.text(total + 0.5, n, f"{total:.1f}", va="center")
        axes.invert_yaxis()
        axes.set_xlabel("hidden vectors per local token at the peak of a step")
        axes.set_title(title, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
        figure.savefig(file, metadata={"Date": None})
