"""What all ranks know after ceil(log2 W) small messages each: a digest of what everybody brought, or all of it.

In round k rank r sends to rank r + 2^k and receives from rank r - 2^k, modulo W, what the sender knows by then: of
itself and of the 2^k - 1 ranks before it (Hensgen, Finkel and Manber's dissemination barrier; with blocks in place of a
summary it is Bruck's all-gather). What each brings reaches all, some of it twice, which least and greatest don't mind.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

import torch

from .transport import ExchangeError, Receive, Send, Transport

NOBODY = -1
FORM = struct.Struct("<16s16sIii")
DIGEST_BYTES = 16
NOTHING = bytes(DIGEST_BYTES)


@dataclass(frozen=True)
class Summary:
    """Of some ranks, what a round's message carries.

    Attributes:
        least, greatest: digest of what they bring, DIGEST_BYTES; equal if all bring the same. NOTHING: of a rank that
            was kept from the call.
        size: bytes of the longest record among theirs.
        lost, finder: a rank that could not be reached, and the one that tried; NOBODY, or any such two.
    """

    least: bytes
    greatest: bytes
    size: int
    lost: int = NOBODY
    finder: int = NOBODY

    @property
    def agreed(self) -> bool:
        return self.least == self.greatest

    def pack(self) -> torch.Tensor:
        """uint8, as it travels."""
        fields = self.least, self.greatest, self.size, self.lost, self.finder
        return torch.frombuffer(bytearray(FORM.pack(*fields)), dtype=torch.uint8)

    def joined(self, packed: torch.Tensor) -> Summary:
        """Of these ranks and of those that ``packed`` tells of."""
        least, greatest, size, lost, finder = FORM.unpack(packed.numpy().data)
        return Summary(
            min(self.least, least),
            max(self.greatest, greatest),
            max(self.size, size),
            *max((self.lost, self.finder), (lost, finder)),
        )


def rounds(rank: int, world: int) -> list[tuple[int, int]]:
    """(whom ``rank`` sends to, from whom it receives) in each round; no two rounds have the same."""
    hops = [1 << k for k in range((world - 1).bit_length())]
    return [((rank + hop) % world, (rank - hop) % world) for hop in hops]


def disseminate(transport: Transport, own: Summary, label: str) -> Summary:
    """The summary of all ranks. All must call it.

    Raises:
        ExchangeError: a rank could not be reached, by this one or by another, which then said so in place of its
            message: nobody waits for those who gave up.
    """
    peers = rounds(transport.rank, transport.world)
    buffers = [torch.empty(FORM.size, dtype=torch.uint8) for _ in peers]
    done = 0  # rounds
    try:
        # Posted ahead of all sends: whoever is heard from at all can be sent to without waiting.
        arriving = [
            transport.post([], [Receive(source, buffer)], label=_told(label, source, 1 << n, transport.world))
            for n, ((_, source), buffer) in enumerate(zip(peers, buffers, strict=True))
        ]
        leaving = []
        for (target, _), pending, buffer in zip(peers, arriving, buffers, strict=True):
            leaving.append(transport.post([Send(target, own.pack())], [], label=label))
            transport.wait(pending)
            own = own.joined(buffer)
            done += 1
            if own.lost != NOBODY:
                why = f"rank {own.finder} can't reach rank {own.lost}"
                raise transport.failed(f"could not finish {label}: {why}", f"{label}: {why}", own.lost)
        for pending in leaving:
            transport.wait(pending)
    except ExchangeError as error:
        if own.lost == NOBODY and error.peer is not None:
            own = replace(own, lost=error.peer, finder=transport.rank)
        if own.lost != NOBODY:
            heirs = [target for target, _ in peers[done:] if target != own.lost]
            transport.send_last([Send(target, own.pack()) for target in heirs])
        raise
    return own


def gather(transport: Transport, own: bytes, size: int, label: str) -> list[bytes]:
    """Every rank's record, padded with spaces to ``size`` bytes, by rank. All must call it, with one ``size``.

    Raises:
        ExchangeError: a rank could not be reached.
    """
    world, rank = transport.world, transport.rank
    blocks = torch.empty(world, size, dtype=torch.uint8)  # of rank - n at n
    blocks[0] = torch.frombuffer(bytearray(own.ljust(size)), dtype=torch.uint8)
    held = 1
    for target, source in rounds(rank, world):
        count = min(held, world - held)
        arriving = Receive(source, blocks[held : held + count])
        transport.wait(transport.post([Send(target, blocks[:count])], [arriving], label=label))
        held += count
    return [blocks[(rank - n) % world].numpy().tobytes() for n in range(world)]


def _told(label: str, source: int, hop: int, world: int) -> str:
    """The label of the wait for ``source``, from which a round that goes ``hop`` ranks far brings word of so many."""
    news = min(hop, world - hop)
    if news == 1:
        return label
    first, last = (source - news + 1) % world, (source - 1) % world
    others = f"rank {first}" if first == last else f"ranks {first} to {last}"
    return f"{label}, where rank {source} has word of {others} too,"
