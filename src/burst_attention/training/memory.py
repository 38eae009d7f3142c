"""What a run may do to need less memory: its flags, and which of them go together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .flags import Count, flag, require

RematName = Literal["none", "layer", "keep-attention"]
OffloadName = Literal["none", "activations"]
# Engines whose attention is the operator that a checkpoint can keep by name; those that compute in DTensors.
KEEPING, TENSOR = ("burst", "ring"), ("tensor", "tensor-sequence")


@dataclass(frozen=True)
class MemoryConfig:
    """What is computed again, or lies elsewhere, so that longer sequences fit. None of it changes the loss."""

    remat: RematName = "none"
    """What is recomputed in the backward. layer: every decoder layer, of which its input alone is kept.
    keep-attention: all of it but the attention, so that its exchanges are not repeated (burst and ring)."""
    offload: OffloadName = "none"
    """activations: the layers' inputs that --remat keeps lie in host memory meanwhile (GPUs; never run on one)."""
    mlp_chunks: Count = 1
    """Feed-forward layers take a rank's tokens in so many pieces, each recomputed in the backward."""
    optimizer_offload: bool = False
    """Weights, gradients and AdamW's moments lie in host memory, and AdamW runs there (GPUs; never run on one)."""
    compile: bool = False
    """Compile norms and feed-forward layers by torch.compile; not for tensor and tensor-sequence."""
    ignore_memory: bool = False
    """Start even if the memory that is foretold is more than the machine has."""

    def check(self, engine: str, device: str) -> None:
        """Raise ValueError naming the first flag that can't be with this engine, or on this type of device."""
        keeps = f"is for --engine {' and '.join(KEEPING)}; --engine {engine} has another attention: use --remat layer"
        require(self.remat != "keep-attention" or engine in KEEPING, "remat", self.remat, keeps)
        offload = "needs --remat layer or keep-attention: what it moves are the layers' inputs that those keep"
        require(self.offload == "none" or self.remat != "none", "offload", self.offload, offload)
        there = "is for GPUs: on --device cpu everything lies in host memory already; leave it out"
        require(self.offload == "none" or device != "cpu", "offload", self.offload, there)
        if self.optimizer_offload and device == "cpu":
            raise ValueError(f"{flag('optimizer_offload')} {there}")
        for name in ("optimizer_offload", "compile"):
            if getattr(self, name) and engine in TENSOR:
                raise ValueError(f"{flag(name)} is not for --engine {engine}; leave it out, or use --engine burst")
