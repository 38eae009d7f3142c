"""yunchang's LongContextAttention against dense fp64 attention."""

import pytest
import torch

from burst_attention import Mask
from burst_attention.compat.yunchang import LAYOUTS, LongContextAttention
from burst_attention.testing import attend, local_world
from burst_attention.testing.check import relative_l2
from tests.distributed.test_compat_ring_flash_attn import places

ORIGINAL = {"basic": "ring", "zigzag": "zigzag", "strip": "stripe"}


@pytest.mark.parametrize(
    ("kind", "causal", "softcap"), [*((kind, True, 0.9) for kind in LAYOUTS), ("zigzag", False, 0.0)]
)
def test_equals_dense_attention(kind: str, causal: bool, softcap: float) -> None:
    q, k, v, dout = (torch.randn(2, 24, heads, 8, dtype=torch.float64) for heads in (4, 2, 2, 4))
    right = attend(
        *(x.transpose(1, 2) for x in (q, k, v)), Mask(causal=causal), dout=dout.transpose(1, 2), softcap=softcap or None
    )

    def rank(group):
        where = places(ORIGINAL[kind], [0, 24], group.rank(), 4)
        leaves = [x[:, where].requires_grad_() for x in (q, k, v)]
        attention = LongContextAttention(ring_impl_type=kind, ulysses_degree=1, group=group)
        out = attention(*leaves, causal=causal, softcap=softcap, return_attn_probs=True)
        out.backward(dout[:, where])
        found = [out, *(x.grad for x in leaves)]
        wanted = [x.transpose(1, 2)[:, where] for x in (right.out, right.dq, right.dk, right.dv)]
        return max(map(relative_l2, found, wanted))

    with local_world(4, timeout=20) as ranks:
        assert max(ranks.run(rank)) <= 1e-12
