"""Some ranks of a group by themselves: messages among them over the group's own transport, and no group of their own.

A process group of torch for each axis of a mesh would have each its connections, its deadlines and its failures.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from burst_attention.comm.transport import Pending, Receive, Send, Transport


class Subgroup(Transport):
    """The transport of these ``ranks`` of ``whole``, this process's among them, numbered in their order.

    What it moves is counted by ``whole``, too, and errors name the ranks of that.
    """

    def __init__(self, whole: Transport, ranks: Sequence[int]) -> None:
        super().__init__(whole.group, whole.timeout, whole.tag, whole.health)
        self.whole, self.ranks = whole, tuple(ranks)
        self.rank, self.world = self.ranks.index(whole.rank), len(self.ranks)

    def post(self, sends: Sequence[Send], receives: Sequence[Receive], *, label: str) -> Pending:
        """As :meth:`Transport.post`, of ranks of this subgroup."""
        leaving = [Send(self.ranks[each.peer], each.tensor) for each in sends]
        arriving = [Receive(self.ranks[each.peer], each.tensor) for each in receives]
        self.sent += sum(each.tensor.nbytes for each in sends)
        self.received += sum(each.tensor.nbytes for each in receives)
        return self.whole.post(leaving, arriving, label=label)

    def wait(self, pending: Pending) -> None:
        """As :meth:`Transport.wait`."""
        self.whole.wait(pending)

    def check_device(self, device: torch.device) -> None:
        """As :meth:`Transport.check_device`."""
        self.whole.check_device(device)
