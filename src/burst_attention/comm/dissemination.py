"""Exchange a summary of all ranks' records, or the records themselves, in ceil(log2 W) small messages per rank.

In round k, rank r sends to rank r + 2^k and receives from rank r - 2^k, modulo W. Each sender sends all that it knows:
its own part and those of the 2^k - 1 ranks before it. With summaries this is the dissemination barrier of Hensgen,
Finkel and Manber; with blocks of records it is Bruck's all-gather. Every part reaches every rank. Some parts arrive
twice, which does not change a minimum or maximum.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

import torch

from .transport import ExchangeError, Receive, Send, Transport

NO_RANK = -1
FORM = struct.Struct("<16s16sIii")
DIGEST_BYTES = 16
NOTHING = bytes(DIGEST_BYTES)


@dataclass(frozen=True)
class Summary:
    """A summary of several ranks' records: the message of one round. A digest has DIGEST_BYTES."""

    least: bytes  # least digest of the records; NOTHING is the digest of a rank that could not make the call
    greatest: bytes  # equal to ``least`` if all records are equal
    size: int  # bytes of the longest record
    lost: int = NO_RANK  # a rank, any of them, that could not be reached
    finder: int = NO_RANK  # the rank that tried to reach it

    @property
    def agreed(self) -> bool:
        """Whether all ranks gave the same value."""
        return self.least == self.greatest

    def pack(self) -> torch.Tensor:
        """Return the summary as a uint8 tensor to send."""
        fields = self.least, self.greatest, self.size, self.lost, self.finder
        return torch.frombuffer(bytearray(FORM.pack(*fields)), dtype=torch.uint8)

    def joined(self, packed: torch.Tensor) -> Summary:
        """Return the summary of these ranks and of those in ``packed``."""
        least, greatest, size, lost, finder = FORM.unpack(packed.numpy().data)
        return Summary(
            min(self.least, least),
            max(self.greatest, greatest),
            max(self.size, size),
            *max((self.lost, self.finder), (lost, finder)),
        )


def rounds(rank: int, world: int) -> list[tuple[int, int]]:
    """Return (rank to send to, rank to receive from) for each round. No two rounds have the same pair."""
    hops = [1 << k for k in range((world - 1).bit_length())]
    return [((rank + hop) % world, (rank - hop) % world) for hop in hops]


def disseminate(transport: Transport, own: Summary, label: str) -> Summary:
    """Return the summary of all ranks. A rank that gives up sends a report in place of its message."""
    peers = rounds(transport.rank, transport.world)
    buffers = [torch.empty(FORM.size, dtype=torch.uint8, device="cpu") for _ in peers]
    done = 0  # rounds
    try:
        # Post all receives before any send. A rank that has sent something then takes messages without a wait.
        arriving = [
            transport.post([], [Receive(source, buffer)], label=_label(label, source, 1 << n, transport.world))
            for n, ((_, source), buffer) in enumerate(zip(peers, buffers, strict=True))
        ]
        leaving = []
        for (target, _), pending, buffer in zip(peers, arriving, buffers, strict=True):
            leaving.append(transport.post([Send(target, own.pack())], [], label=label))
            transport.wait(pending)
            own = own.joined(buffer)
            done += 1
            if own.lost != NO_RANK:
                why = f"rank {own.finder} can't reach rank {own.lost}"
                raise transport.failed(f"could not finish {label}: {why}", f"{label}: {why}", own.lost)
        for pending in leaving:
            transport.wait(pending)
    except ExchangeError as error:
        if own.lost == NO_RANK and error.peer is not None:
            own = replace(own, lost=error.peer, finder=transport.rank)
        if own.lost != NO_RANK:
            heirs = [target for target, _ in peers[done:] if target != own.lost]
            transport.send_last([Send(target, own.pack()) for target in heirs])
        raise
    return own


def gather(transport: Transport, own: bytes, size: int, label: str) -> list[bytes]:
    """Return every rank's record by rank, padded with spaces to ``size`` bytes. All must call it with one ``size``."""
    world, rank = transport.world, transport.rank
    blocks = torch.empty(world, size, dtype=torch.uint8, device="cpu")  # row n holds the record of rank - n
    blocks[0] = torch.frombuffer(bytearray(own.ljust(size)), dtype=torch.uint8)
    held = 1
    for target, source in rounds(rank, world):
        count = min(held, world - held)
        arriving = Receive(source, blocks[held : held + count])
        transport.wait(transport.post([Send(target, blocks[:count])], [arriving], label=label))
        held += count
    return [blocks[(rank - n) % world].numpy().tobytes() for n in range(world)]


def _label(label: str, source: int, hop: int, world: int) -> str:
    """Return the label of the wait for ``source``; it names the other ranks whose parts ``source`` forwards."""
    news = min(hop, world - hop)
    if news == 1:
        return label
    first, last = (source - news + 1) % world, (source - 1) % world
    others = f"rank {first}" if first == last else f"ranks {first} to {last}"
    return f"{label} (rank {source} also forwards messages of {others})"
