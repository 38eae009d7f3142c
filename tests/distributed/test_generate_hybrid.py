"""Generate over ranks with recurrent layers: the tokens and logits of one process with transformers' own cache."""

from __future__ import annotations

import pytest
import torch

from burst_attention.inference import ShardedCache
from tests.distributed.test_generate import tokens_at_once
from tests.support.generating import alone, check_equal, generate, ids_of, over_ranks

NEW = 12
# One of each mechanism that a cache holds.
KINDS = ("qwen3_5", "bamba", "kimi_linear", "lfm2")


def _long(name):
    return pytest.param(name, marks=[] if name in ("qwen3_5", "bamba") else pytest.mark.long)


@pytest.mark.parametrize("count", [1, 7, 1_000])
@pytest.mark.parametrize("name", [_long(name) for name in KINDS])
def test_tokens_and_logits_equal_one_process(name, count):
    ids = ids_of(count)
    expected = alone(name, ids, max_new_tokens=NEW)
    for world in (1, 2, 3, 4):
        check_equal(over_ranks(name, world, lambda *both: generate(*both, ids, max_new_tokens=NEW)), expected)
