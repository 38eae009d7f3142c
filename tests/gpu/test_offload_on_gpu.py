"""Tensors of a GPU, kept in pinned host memory and in a file."""

import contextlib

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from burst_attention.memory.offload import offloading

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


LAYERS, ROWS = 16, 1 << 20


def gradient(where: str | None) -> tuple[torch.Tensor, int]:
    """The gradient of the layers' input, and the most bytes that a step allocates. The host runs far ahead."""
    offload = None if where is None else offloading(where)
    torch.manual_seed(5)
    x = torch.randn(ROWS, 8, device="cuda", requires_grad=True)
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        x.grad, hidden = None, x * 1
        for _ in range(LAYERS):
            options = {"use_reentrant": False, "preserve_rng_state": False}
            with contextlib.nullcontext() if offload is None else offload.hooks(hidden):
                hidden = checkpoint(torch.sin, hidden, **options)
        hidden.sum().backward()
    assert x.grad is not None
    return x.grad, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_gradients_have_the_same_bits_and_three_inputs_are_on_the_device(tmp_path, kind: str) -> None:
    expected, most = gradient(None)
    found, fewer = gradient(kind if kind == "host" else f"disk:{tmp_path}")
    assert torch.equal(found, expected)
    assert most - fewer >= (LAYERS - 3) * found.nbytes
