"""Ranks that torchrun restarts form a new group, separate from the old one."""

import pytest
import torch.distributed as dist

from burst_attention.launch.join import _meeting_again

RESTARTED = {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": "1"}
RESTARTED |= {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


def test_restarted_ranks_do_not_read_what_those_before_left():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set("0", "an address without a listener")
    where = _meeting_again(RESTARTED | {"MASTER_PORT": str(server.port)})
    assert (where["rank"], where["world_size"]) == (1, 2)
    assert not where["store"].check(["0"])
    where["store"].set("0", "that of now")
    again = _meeting_again(RESTARTED | {"MASTER_PORT": str(server.port), "RANK": "0"})["store"]
    assert again.get("0") == b"that of now"
    assert server.get("0") == b"an address without a listener"


@pytest.mark.parametrize(
    "other",
    [
        {"TORCHELASTIC_RESTART_COUNT": "0"},
        {"TORCHELASTIC_USE_AGENT_STORE": "False"},
        {"GROUP_WORLD_SIZE": "2"},  # machines count their starts each for itself
    ],
)
def test_others_meet_where_torch_has_them_meet(other):
    assert _meeting_again(RESTARTED | other) == {}
    assert _meeting_again({}) == {}
