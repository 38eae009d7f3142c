"""Agreement by dissemination: few messages where all is well, every record where it is not, and a lost rank's name."""

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from burst_attention import DisagreementError, ExchangeError, PeerError, burst_attention, make_plan
from burst_attention.comm.agreement import NO_RANK, Agreement, CallSummary, rounds
from burst_attention.comm.local import LocalGroup, LocalTransport
from burst_attention.comm.transport import PACKED_BYTES, Operation, Receive, Send, Transport, pack
from burst_attention.testing import local_world

WORLDS = (1, 2, 3, 5, 8)
TIMEOUT = 3.0


class Counting(LocalTransport):
    """Writes down the bytes of each message that it starts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sizes: list[int] = []

    def _start(self, operations: Any, tag: int) -> list[Any]:
        self.sizes += [each.tensor.nbytes for each in operations if isinstance(each, Send)]
        return super()._start(operations, tag)


def counting(group: LocalGroup) -> Agreement:
    return Agreement(Counting(group if group.size() > 1 else None, TIMEOUT, 7, group.health))


def outcomes(world: int, call: Callable[[Agreement], Any]) -> list[Any]:
    """Return what ``call`` returned or raised on each rank; the group must still work afterwards."""

    def rank(group: LocalGroup) -> Any:
        agreement = counting(group)
        try:
            outcome = call(agreement)
        except Exception as error:
            outcome = error
        for _ in range(2):
            assert agreement.agree("afterwards", {}, agreement.transport.rank) == list(range(world))
        return outcome

    with local_world(world, timeout=TIMEOUT) as ranks:
        return ranks.run(rank)


@pytest.mark.parametrize("world", [1, 3])
def test_values_of_any_size_are_collected(world: int) -> None:
    """Each rank's value is longer than a record, and than the previous rank's."""

    def call(agreement: Agreement) -> list[Any]:
        return agreement.collect("a call", [[n, "é"] for n in range(600 * (agreement.transport.rank + 1))])

    wanted = [[[n, "é"] for n in range(600 * (rank + 1))] for rank in range(world)]
    assert outcomes(world, call) == [wanted] * world


def most(world: int) -> int:
    return math.ceil(math.log2(world))


@pytest.mark.parametrize("world", [*WORLDS, 33])
def test_an_agreed_call_takes_few_small_messages_and_as_many_again_with_own_values(world: int) -> None:
    def call(agreement: Agreement) -> tuple[Any, ...]:
        assert agreement.agree("a call", {"scale": 0.5, "mask": "m" * 1000}) == [None] * world
        sizes = list(agreement.transport.sizes)
        own = {"rank": agreement.transport.rank, "text": "x" * agreement.transport.rank, "third": 1 / 3}
        return sizes, agreement.agree("a call", {}, own), len(agreement.transport.sizes) - len(sizes)

    for sizes, values, messages in outcomes(world, call):
        assert len(sizes) == most(world) and sum(sizes) <= 64 * most(world)
        assert values == [{"rank": rank, "text": "x" * rank, "third": 1 / 3} for rank in range(world)]
        assert messages <= 2 * most(world)


@pytest.mark.parametrize("world", WORLDS[1:])
def test_one_odd_rank_is_named_by_all(world: int) -> None:
    for odd in {0, world // 2, world - 1}:
        for error in outcomes(world, lambda a, odd=odd: a.agree("a call", {"scale": 1 + (a.transport.rank == odd)})):
            assert type(error) is DisagreementError
            assert "the ranks disagree on scale: " in str(error) and f"rank {odd} has 2" in str(error)
        for error in outcomes(world, lambda a, odd=odd: a.agree(f"call {a.transport.rank == odd}", {})):
            assert type(error) is DisagreementError
            assert "the ranks are in different calls: " in str(error) and f"rank {odd} has call True" in str(error)


@pytest.mark.parametrize("world", WORLDS[1:])
def test_one_rank_that_refuses_or_fails_is_named_by_all(world: int) -> None:
    for n, raised in enumerate([TypeError("no type"), ValueError("no value"), MemoryError("no room")] * 2):
        refused, odd = not isinstance(raised, MemoryError), [0, world - 1, n % world][n // 2]

        def call(agreement: Agreement, odd: int = odd, raised: Exception = raised) -> None:
            with agreement.entering("a call"):
                if agreement.transport.rank == odd:
                    raise raised
            agreement.agree("a call", {}, agreement.transport.rank)

        for rank, error in enumerate(outcomes(world, call)):
            reported = f"rank {odd} refused the call" if refused else f"rank {odd} failed before the call"
            assert type(error) is (type(raised) if refused or rank == odd else PeerError)
            assert str(raised) in str(error) and (rank == odd or reported in str(error))


def test_a_call_is_agreed_on_once_for_its_fields() -> None:
    def call(agreement: Agreement) -> list[int]:
        counts = []
        for scale in (1.0, 1.0, 2.0, 1.0, 2.0):
            before = len(agreement.transport.sizes)
            agreement.agree("a call", {"scale": scale}, once=True)
            counts.append(len(agreement.transport.sizes) - before)
        return counts

    assert outcomes(3, call) == [[2, 0, 2, 0, 0]] * 3


def test_a_later_call_that_one_rank_refuses_is_its_own_error() -> None:
    """The other ranks don't listen for it, so it must not wait for them."""

    def call(agreement: Agreement) -> str:
        agreement.agree("a call", {}, once=True)
        started, heard = time.monotonic(), "went on"
        try:
            with agreement.entering("a call", once=True):
                if agreement.transport.rank == 1:
                    raise ValueError("no value")
        except ValueError as error:
            assert time.monotonic() - started < TIMEOUT / 2
            heard = str(error)
        agreement.agree("a call", {}, once=True)  # a rank that tries again makes the same calls as the others
        return heard

    assert outcomes(3, call) == ["went on", "no value", "went on"]


def test_ranks_that_ran_backwards_in_other_orders_disagree() -> None:
    """NCCL has no tags that keep them apart, so the next agreement tells."""

    def call(agreement: Agreement) -> None:
        for number in (1, 2) if agreement.transport.rank else (2, 1):
            agreement.transport.health.note_backward(number)
        agreement.agree("a call", {})

    def rank(group: LocalGroup) -> str:
        with pytest.raises(DisagreementError) as raised:
            call(counting(group))
        return str(raised.value)

    with local_world(2, timeout=TIMEOUT) as ranks:
        for text in ranks.run(rank):
            assert (
                "the ranks disagree on earlier calls and the order of their backwards" in text
                and "in one order" in text
            )


def test_ranks_that_all_refuse_alike_have_not_agreed() -> None:
    def call(agreement: Agreement) -> None:
        with agreement.entering("a call"):
            raise ValueError("no value")

    assert [type(error) for error in outcomes(4, call)] == [ValueError] * 4


def test_equal_values_in_other_words_agree_by_their_records() -> None:
    def call(agreement: Agreement) -> tuple[list[Any], int]:
        odd = agreement.transport.rank == 1
        fields = {"batch": 1, "scale": 2.0} if odd else {"scale": 2, "batch": True}
        return agreement.agree("a call", fields), len(agreement.transport.sizes)

    assert outcomes(3, call) == [([None] * 3, 4)] * 3


@pytest.mark.parametrize("world", range(1, 10))
def test_every_rank_learns_of_every_other(world: int) -> None:
    known = [{rank} for rank in range(world)]
    for n in range(most(world)):
        known = [known[rank] | known[rounds(rank, world)[n][1]] for rank in range(world)]
    assert known == [set(range(world))] * world
    for rank in range(world):
        assert len(rounds(rank, world)) == most(world)
        for n, (target, source) in enumerate(rounds(rank, world)):
            assert rounds(target, world)[n][1] == rank == rounds(source, world)[n][0]


def test_summaries_join_in_any_order_and_twice() -> None:
    one = CallSummary(b"a" * 16, b"a" * 16, 7)
    two = CallSummary(b"b" * 16, b"b" * 16, 5, lost=3, finder=4)
    both = CallSummary(b"a" * 16, b"b" * 16, 7, lost=3, finder=4)
    assert one.joined(two.pack()) == two.joined(one.pack()) == both == both.joined(one.pack())
    assert one.agreed and two.agreed and not both.agreed and one.lost == NO_RANK


def test_a_lost_rank_stays_with_its_finder() -> None:
    one, two = (CallSummary(b"a" * 16, b"a" * 16, 7, lost=lost, finder=finder) for lost, finder in ((3, 1), (2, 5)))
    assert one.joined(two.pack()) == two.joined(one.pack()) == one


def test_what_goes_to_one_peer_travels_as_one_message() -> None:
    small = [torch.randn(2, 3), torch.arange(5, dtype=torch.int16), torch.randn(4, dtype=torch.complex64)]
    operations: list[Operation] = [Receive(1, x.clone().zero_()) for x in small]
    operations += [*(Send(1, x) for x in small), Send(2, small[0]), *(Send(3, torch.zeros(PACKED_BYTES)) for _ in "ab")]
    messages, filled = pack(operations)
    assert [(type(each), each.peer) for each in messages] == [(Receive, 1), *((Send, n) for n in (1, 2, 3, 3))]
    assert messages[0].tensor is filled[0][0] and messages[2].tensor is small[0]
    assert messages[0].tensor.nbytes == messages[1].tensor.nbytes == sum(x.nbytes for x in small)


def test_small_messages_arrive_whole_whatever_their_dtype(pools) -> None:
    for count in (1, 2, 5):
        assert all(pools(3).run(exchanged, count))


def exchanged(count: int) -> bool:
    """``count`` tensors go round; True if those of the rank before arrived, and the bytes were counted."""
    transport = make_plan(16).transport
    dtypes = (torch.bfloat16, torch.float64, torch.bool, torch.complex64, torch.uint8)

    def made(rank: int) -> list[torch.Tensor]:
        return [(torch.arange(3 + n) + rank).to(dtype) for n, dtype in enumerate(dtypes[:count])]

    ahead, behind = (transport.rank + 1) % transport.world, (transport.rank - 1) % transport.world
    arriving, sent = [torch.empty_like(x) for x in made(behind)], transport.sent
    sends, receives = [Send(ahead, x) for x in made(transport.rank)], [Receive(behind, x) for x in arriving]
    transport.wait(transport.post(sends, receives, label="a test"))
    same = all(torch.equal(x, y) for x, y in zip(arriving, made(behind), strict=True))
    return same and transport.sent - sent == sum(x.nbytes for x in made(0))


def test_who_gives_up_tells_whom_it_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 can't reach rank 1 and reports it at once: no rank waits for the deadline, and all name rank 1."""
    real = LocalTransport.wait

    def rank(group: LocalGroup) -> tuple[str, float]:
        agreement = Agreement(LocalTransport(group, 20.0, 7, group.health))
        if group.rank() == 1:
            return "", 0.0
        started = time.monotonic()
        with pytest.raises(ExchangeError) as raised:
            agreement.agree("a call", {})
        return str(raised.value), time.monotonic() - started

    def wait(self: Any, pending: Any) -> None:
        if any(each.peer == 1 for each in pending.operations):
            raise self.failed("could not receive from rank 1", "a test", 1)
        real(self, pending)

    monkeypatch.setattr(LocalTransport, "wait", wait)
    with local_world(5, timeout=20) as ranks:
        texts = ranks.run(rank)
    for number in (0, 2, 3, 4):
        assert "rank 1" in texts[number][0] and texts[number][1] < 5
    assert "rank 4 could not finish the agreement on a call: rank 2 can't reach rank 1" in texts[4][0]


def swapped(group: Any) -> list[str]:
    """Two calls that all ranks know; at last rank 1 makes the other one."""
    plan, reports = make_plan(16, group=group, timeout=2), []
    q, k, v = (torch.randn(1, 2, plan.length, 8) for _ in range(3))
    for scale in (0.25, 0.75, 0.25 if plan.rank else 0.75):
        try:
            burst_attention(q, k, v, plan, scale=scale)
        except Exception as error:
            reports.append(type(error).__name__)
    return reports


def test_ranks_that_swap_two_known_calls_never_mix_them() -> None:
    with local_world(2) as ranks:
        assert ranks.run(swapped) == [["ExchangeError"]] * 2


class Untagged(Transport):
    """Messages that match in the order of posting, as NCCL's do."""

    def _has_tags(self, operations: Any) -> bool:
        return False

    def _start_one(self, each: Any, tag: int) -> Any:
        return super()._start_one(each, tag & 0xFF)


def swapped_without_tags(default: str) -> list[str]:
    """Two calls that both ranks know, forward and backward; then rank 1 makes them in the other order.

    ``default``: torch's default device, which is not that of numbers sent beside tensors.
    """
    plan, reports = make_plan(16, group=dist.new_group(), timeout=5), []  # its failure is no other test's
    old = plan.transport
    vars(plan).update(transport=Untagged(old.group, old.timeout, old.tag, old.health))
    q, k, v = (torch.randn(1, 2, plan.length, 8, requires_grad=True) for _ in range(3))
    for scale in (0.25, 0.75, 0.25, 0.75, *((0.25, 0.75) if plan.rank else (0.75, 0.25))):
        try:
            with torch.device(default):
                out = burst_attention(q, k, v, plan, scale=scale)
                out.backward(torch.ones_like(out))
            reports.append("")
        except Exception as error:
            reports.append(f"{type(error).__name__}: {error}")
    return reports


@pytest.mark.parametrize("default", ["cpu", "meta"])
def test_ranks_that_swap_two_known_calls_without_tags_are_named(pools: Any, default: str) -> None:
    for rank, reports in enumerate(pools(2).run(swapped_without_tags, default)):
        assert reports[:4] == [""] * 4
        heard = [report for report in reports[4:] if report]
        assert heard and f"ExchangeError: rank {rank}: rank {1 - rank} made another call" in heard[0]
