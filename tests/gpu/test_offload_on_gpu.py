"""Tensors of a GPU, kept in pinned host memory and in a file."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from burst_attention import make_plan
from burst_attention.memory.offload import offloading

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


def gradient(where: str | None) -> tuple[torch.Tensor, int]:
    """The gradient of 8 layers' input, and the most bytes that a step allocates."""
    offload = None if where is None else offloading(where, make_plan(8).agreement)
    torch.manual_seed(5)
    x = torch.randn(1 << 22, 8, device="cuda", requires_grad=True)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        x.grad, hidden = None, x * 1
        for _ in range(8):
            options = {"use_reentrant": False, "preserve_rng_state": False}
            if offload is None:
                hidden = checkpoint(torch.sin, hidden, **options)
            else:
                with offload.hooks(hidden):
                    hidden = checkpoint(torch.sin, hidden, **options)
        hidden.sum().backward()
    assert x.grad is not None
    return x.grad, torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_gradients_have_the_same_bits_in_less_memory(tmp_path, kind: str) -> None:
    expected, most = gradient(None)
    found, fewer = gradient(kind if kind == "host" else f"disk:{tmp_path}")
    assert torch.equal(found, expected)
    assert fewer < most - 2 * found.nbytes
