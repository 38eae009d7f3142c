"""Messages among some ranks of a group over the group's transport, without a new process group.

Separate torch process groups for each axis of a mesh would each need connections, deadlines and failure handling.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from burst_attention.comm.transport import Pending, Receive, Send, Transport


class Subgroup(Transport):
    """The transport among some ``ranks`` of ``whole``, renumbered in their order; this process is one of them.

    ``whole`` counts the bytes, too. Errors name the ranks of ``whole``.
    """

    def __init__(self, whole: Transport, ranks: Sequence[int]) -> None:
        super().__init__(whole.group, whole.timeout, whole.tag, whole.health)
        self.whole, self.ranks = whole, tuple(ranks)
        self.rank, self.world = self.ranks.index(whole.rank), len(self.ranks)

    def post(self, sends: Sequence[Send], receives: Sequence[Receive], *, label: str, call: int = 0) -> Pending:
        """Post messages as :meth:`Transport.post` does, with ranks of this subgroup."""
        leaving = [Send(self.ranks[each.peer], each.tensor) for each in sends]
        arriving = [Receive(self.ranks[each.peer], each.tensor) for each in receives]
        self.sent += sum(each.tensor.nbytes for each in sends)
        self.received += sum(each.tensor.nbytes for each in receives)
        return self.whole.post(leaving, arriving, label=label, call=call)

    def wait(self, pending: Pending) -> None:
        """Wait for messages as :meth:`Transport.wait` does."""
        self.whole.wait(pending)

    def check_device(self, device: torch.device) -> None:
        """Check a device as :meth:`Transport.check_device` does."""
        self.whole.check_device(device)
