"""The plan's integers against dense masks, over random layouts, masks, worlds, routes and assignments."""

import dataclasses
from collections import Counter, defaultdict, deque
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burst_attention.plan.assignment import CIRCULATIONS, Cube, HeadsFirst, blocks, columns, nearest, rows
from burst_attention.plan.chunks import Chunks
from burst_attention.plan.cost import Shape
from burst_attention.plan.groups import WHOLE, Groups
from burst_attention.plan.layout import BALANCED, LAYOUTS, PER_DOCUMENT, Layout
from burst_attention.plan.mask import BlockPattern, Mask
from burst_attention.plan.program import Drop, Move, Post, Visit, Wait
from burst_attention.plan.route import ROUTES
from burst_attention.plan.rows import Direction, Payload, Rows, Side
from burst_attention.plan.schedule import Schedule
from burst_attention.plan.slices import Slice
from burst_attention.plan.strategy import Strategy
from burst_attention.plan.tile import Tile
from burst_attention.planner.planner import Planner
from burst_attention.planner.presets import preset
from burst_attention.planner.traffic import TrafficModel
from tests.support.pairwise import covering_array
from tests.support.schedules import assigned, bytes_moved, make_schedule, pair_tiles


@st.composite
def masks(draw, seqlen: int) -> Mask:
    kinds = ["full", "causal", "window", "documents", "prefix", "window in documents"]
    mask = draw(masks_of(draw(st.sampled_from(kinds)), seqlen))
    if not draw(st.booleans()):
        return mask
    if mask.causal and mask.prefix is None and draw(st.booleans()):
        dice = np.random.default_rng(draw(st.integers(0, 999)))
        runs = np.repeat(dice.integers(-1, 3, seqlen), dice.integers(1, draw(st.integers(2, 9)), seqlen))
        return dataclasses.replace(mask, together=runs[:seqlen])
    block = draw(st.integers(1, 9))
    count = -(-seqlen // block)
    dice = np.random.default_rng(draw(st.integers(0, 999)))
    seen = dice.random((count, count)) < draw(st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]))
    return dataclasses.replace(mask, blocks=seen, block=block)


@st.composite
def masks_of(draw, kind: str, seqlen: int) -> Mask:
    borders = None
    if "documents" in kind:
        inner = draw(st.lists(st.integers(0, seqlen), max_size=6))
        borders = [0, *sorted(inner), seqlen]
    if kind == "prefix":
        return Mask(prefix=draw(st.integers(0, seqlen)))
    window = draw(st.integers(1, seqlen + 2)) if "window" in kind else None
    causal = kind != "full" and draw(st.booleans())
    return Mask(causal=causal, window=window, cu_seqlens=borders)


@st.composite
def worlds(draw, most_tokens: int = 48, most_ranks: int = 6) -> tuple[Layout, Mask]:
    seqlen = draw(st.integers(0, most_tokens))
    name, mask = draw(st.sampled_from(sorted(LAYOUTS))), draw(masks(seqlen))
    if name != BALANCED and draw(st.booleans()):
        name += PER_DOCUMENT
    cut = draw(st.sampled_from([mask, draw(masks(seqlen))]))  # a mask derived later may be another
    return Layout(name, seqlen, draw(st.integers(1, most_ranks))).cut_for(cut, seqlen), mask


def seen_by_tile(tile) -> np.ndarray:
    distance = np.arange(tile.rows)[:, None] - np.arange(tile.columns)
    return (distance >= tile.lo) & (distance <= tile.hi)


@settings(max_examples=250, deadline=None)
@given(worlds(), st.randoms(use_true_random=False))
def test_tiles_cover_the_dense_mask_once(world: tuple[Layout, Mask], random) -> None:
    layout, mask = world
    covered = np.zeros((layout.seqlen, layout.seqlen), int)
    ranks, regions = range(layout.world), mask.regions(layout.seqlen)
    found = pair_tiles(layout, layout, regions, ranks, ranks)
    for (i, j), tiles in found.items():
        q_at, k_at = layout.positions(i), layout.positions(j)
        area = 0
        for tile in tiles:
            seen = seen_by_tile(tile)
            assert seen.any(0).all() and seen.any(1).all(), "a tile has a row or column that sees nothing"
            assert tile.full == seen.all()
            assert tile.lo >= 1 - tile.columns and tile.hi <= tile.rows - 1
            area += seen.sum()
            covered[np.ix_(q_at[tile.q_start : tile.q_stop], k_at[tile.k_start : tile.k_stop])] += seen
            check_part(tile, *(sorted(random.choices(range(n + 1), k=2)) for n in (tile.rows, tile.columns)))
        assert tiles.area == area
    np.testing.assert_array_equal(covered, mask.dense(layout.seqlen))
    counted = TrafficModel(layout, regions).pairs
    assert [*zip(counted.i.tolist(), counted.j.tolist(), strict=True)] == sorted(found)
    for n, pair in enumerate(sorted(found)):
        rows = counted.rows[Side.QUERY][n], counted.rows[Side.KEY][n]
        assert (counted.area[n], *rows) == (found[pair].area, found[pair].q_rows.count, found[pair].k_rows.count)


def check_part(tile: Tile, r: list[int], c: list[int]) -> None:
    expected, actual = (np.zeros((tile.rows, tile.columns), bool) for _ in "ab")
    expected[r[0] : r[1], c[0] : c[1]] = seen_by_tile(tile)[r[0] : r[1], c[0] : c[1]]
    part = tile.part((r[0], r[1]), (c[0], c[1]))
    if part is not None:
        top, left = part.q_start - tile.q_start, part.k_start - tile.k_start
        seen = seen_by_tile(part)
        assert seen.any(0).all() and seen.any(1).all()
        actual[top : top + part.rows, left : left + part.columns] = seen
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=False), Mask(window=70), Mask(cu_seqlens=[0, 90, 230, 300])])
def test_tiles_of_many_pages_cover_the_dense_mask_once(mask: Mask) -> None:
    dice = np.random.default_rng(0)
    owners = np.repeat(dice.integers(-1, 2, 150), 2)
    keys = Layout.of_stretches([[(n, n + 1) for n in np.flatnonzero(owners == rank)] for rank in range(2)])
    queries = Layout("zigzag", 40, 2, start=260)
    covered = np.zeros((300, 300), int)
    for (i, j), tiles in pair_tiles(queries, keys, mask.regions(300), range(2), range(2)).items():
        for tile in tiles:
            at = queries.positions(i)[tile.q_start : tile.q_stop], keys.positions(j)[tile.k_start : tile.k_stop]
            covered[np.ix_(*at)] += seen_by_tile(tile)
    expected = mask.dense(300) & (owners >= 0)
    expected[:260] = False
    np.testing.assert_array_equal(covered, expected)


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_layouts_partition_evenly(name: str) -> None:
    for world in (1, 2, 3, 5, 8):
        for seqlen in range(4 * world + 2):
            layout = Layout(name, seqlen, world)
            held = [layout.positions(rank) for rank in range(world)]
            assert sorted(np.concatenate(held).tolist()) == list(range(seqlen))
            assert [len(h) for h in held] == list(layout.lengths)
            assert max(layout.lengths) - min(layout.lengths) <= 1
            np.testing.assert_array_equal(np.concatenate(held)[layout.gather_order], np.arange(seqlen))


@pytest.mark.parametrize("name", sorted(set(LAYOUTS) - {BALANCED}))
def test_layouts_per_document_cut_each_document_by_itself(name: str) -> None:
    borders = (0, 0, 4, 4, 5, 36, 41, 41)
    for world in (1, 2, 3, 5):
        layout = Layout(name + PER_DOCUMENT, 41, world, borders)
        held = [layout.positions(rank) for rank in range(world)]
        assert sorted(np.concatenate(held).tolist()) == list(range(41))
        np.testing.assert_array_equal(np.concatenate(held)[layout.gather_order], np.arange(41))
        for rank in range(world):
            alone = [Layout(name, stop - start, world).positions(rank) + start for start, stop in pairwise(borders)]
            own = np.concatenate(alone)
            np.testing.assert_array_equal(held[rank], np.sort(own) if world == 1 else own)


def test_documents_of_layouts_per_document() -> None:
    def planned(mask: Mask, layout: str = "zigzag-per-document"):
        return make_schedule(40, mask=mask, layout=layout, route="direct", rank=1, world=3)

    one, other = (planned(Mask(cu_seqlens=c)) for c in ([0, 8, 40], [0, 16, 40]))
    assert one.with_mask(Mask()).description != other.with_mask(Mask()).description
    assert one.with_mask(other.mask).layout == one.layout
    assert planned(Mask()).layout.segments(1) == Layout("zigzag", 40, 3).segments(1)


@pytest.mark.parametrize("documents", [(0, 4096), (0, 16, 560, 640)])
def test_zigzag_is_balanced_under_a_causal_mask(documents: tuple[int, ...]) -> None:
    name = "zigzag-per-document" if len(documents) > 2 else "zigzag"
    layout, mask, areas = Layout(name, documents[-1], 8, documents), Mask(cu_seqlens=documents), []
    for rank in range(8):
        pairs = pair_tiles(layout, layout, mask.regions(layout.seqlen), [rank], range(8))
        areas.append(sum(tiles.area for tiles in pairs.values()))
    assert max(areas) == min(areas) == sum(n * (n + 1) // 2 for n in np.diff(documents)) // 8


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 8)), max_size=8), st.data())
def test_rows_are_sets(intervals: list[tuple[int, int]], data) -> None:
    def make(pairs) -> Rows:
        starts = np.array([a for a, _ in pairs], np.int64)
        return Rows.of(starts, starts + np.array([n for _, n in pairs], np.int64))

    packed = make(intervals)
    members = sorted({x for a, n in intervals for x in range(a, a + n)})
    assert packed.count == len(members)
    if members:
        assert packed.locate(np.array(members)).tolist() == list(range(len(members)))
    subset = data.draw(st.lists(st.sampled_from(members), unique=True)) if members else []
    inner = make([(x, 1) for x in subset])
    where = inner.within(packed)
    picked = np.array(members, np.int64)[where] if members else np.empty(0, np.int64)
    assert picked.tolist() == sorted(subset)


COLUMNS = {Payload.ALL: [0, 1], Payload.INPUTS: [0], Payload.GRADIENTS: [1]}


class Simulation:
    """Run all ranks' programs on sets of positions instead of tensors.

    Each rank runs as far as its messages allow. A shard has a column of positions for each of its two payloads. -1
    marks positions that have not arrived.
    """

    def __init__(self, schedules: list[Schedule], cube: Cube, direction: Direction, groups: Groups = WHOLE) -> None:
        self.layout, self.cube, self.groups = schedules[0].layout, cube, groups
        self.layouts, self.span = schedules[0].layouts, schedules[0].span
        self.programs = [assigned(s, cube, direction, groups) for s in schedules]
        self.wires: defaultdict[tuple[int, int], deque] = defaultdict(deque)  # (source, target) -> in the order sent
        self.posted: dict[tuple[int, int], Post] = {}  # (step, rank)
        ranks = range(self.layout.world)
        self.own = {side: [self.layouts[side].positions(rank) for rank in ranks] for side in Side}
        self.owner = {side: np.full(self.span, -1) for side in Side}
        for rank, side in product(ranks, Side):
            self.owner[side][self.own[side][rank]] = rank
        parts = [(side, part) for side in Side for part in range(groups.count(side))]
        self.held = [
            {(side, rank, part): np.stack([self.own[side][rank]] * 2, 1) for side, part in parts} for rank in ranks
        ]
        if groups.keep and direction is Direction.BACKWARD:
            for rank in ranks:
                members = groups.members(groups.context(rank))
                for place in self.programs[rank].kept.values():
                    own = self.own[place[0]]
                    ordered = np.empty(len(np.concatenate([own[r] for r in members])), int)
                    gathered = Slice(self.layouts[place[0]], members, chunks=groups.chunk_count)
                    for r in members:
                        for at, row in enumerate(own[r]):
                            one = Rows.of(np.array([at]), np.array([at + 1]))
                            ordered[gathered.place(r, one).starts] = row
                    self.held[rank][place] = np.stack([ordered, np.full_like(ordered, -1)], 1)
        # partial sums: per row a Counter of the contributions folded in, (position, head group) of the other side
        self.sums: list[dict] = [{} for _ in ranks]

    def run(self) -> None:
        at, waiting = [0] * self.layout.world, True
        while waiting:
            waiting, moved = False, False
            for rank, program in enumerate(self.programs):
                while at[rank] < len(program.ops) and self.execute(rank, program, program.ops[at[rank]]):
                    at[rank] += 1
                    moved = True
                waiting |= at[rank] < len(program.ops)
            assert moved or not waiting, "deadlock"

    def execute(self, rank: int, program, op) -> bool:
        match op:
            case Post():
                for m in op.sends:
                    assert (m.edge.source, m.edge.step) == (rank, op.step) and m.edge.target != rank
                    self.wires[rank, m.edge.target].append((m.edge, self.outgoing(rank, program, m)))
                self.posted[op.step, rank] = op
            case Wait():
                post = self.posted[op.step, rank]
                # A message may need its receiver's buffer before it leaves.
                others = {m.edge.source for m in post.receives} | {m.edge.target for m in post.sends}
                if any((op.step, other) not in self.posted for other in others):
                    return False
                for m in post.receives:
                    sent, payload = self.wires[m.edge.source, rank].popleft()
                    assert reported(sent) == reported(m.edge)
                    self.arrived(rank, program, m, payload)
            case Move():
                assert reported(op.source.edge) == reported(op.target.edge) and op.source.edge.target == rank
                self.arrived(rank, program, op.target, self.outgoing(rank, program, op.source))
            case Visit():
                self.visit(rank, program, op)
            case Drop():
                del (self.sums if op.partial else self.held)[rank][op.place]
        return True

    def outgoing(self, rank: int, program, m) -> np.ndarray | list[Counter]:
        if not m.edge.partial:
            payload = self.held[rank][m.place][m.where][:, COLUMNS[m.edge.key.payload]]
            assert (payload >= 0).all(), "sent before it came"
            return payload
        if m.where is None:
            return self.sums[rank].pop(m.place)
        total = self.sums[rank][m.place]
        return [total[row].copy() for row in np.arange(len(total))[m.where]]

    def arrived(self, rank: int, program, m, payload) -> None:
        if m.edge.partial:
            self.fold(rank, program, m.place, m.where, payload)
        elif m.where is None:
            self.held[rank][m.place] = payload
        else:
            buffer = self.held[rank].setdefault(m.place, np.full((program.held_rows[m.place].count, 2), -1))
            at = np.arange(len(buffer))[m.where]
            assert (buffer[np.ix_(at, COLUMNS[m.edge.key.payload])] == -1).all(), "came twice"
            buffer[np.ix_(at, COLUMNS[m.edge.key.payload])] = payload

    def visit(self, rank: int, program, op) -> None:
        both = {side: self.held[rank][op.places[side]][op.held[side]] for side in Side}
        assert (both[Side.QUERY][:, 0] == both[Side.QUERY][:, 1]).all()
        q_at, k_at = (both[side][:, 0] for side in Side)
        seen = np.zeros((len(q_at), len(k_at)), bool)
        for tile in op.tiles:
            part = seen[tile.q_start : tile.q_stop, tile.k_start : tile.k_stop]
            assert not (part & seen_by_tile(tile)).any()
            part |= seen_by_tile(tile)
        assert seen.any(1).all() and seen.any(0).all(), "rows sent that no tile touches"
        group = op.places[Side.QUERY][2]
        assert op.places[Side.KEY][2] == self.groups.part(Side.KEY, group)
        i, j = np.broadcast_arrays(self.owner[Side.QUERY][q_at][:, None], self.owner[Side.KEY][k_at])
        assert (self.cube(i, j, group)[seen] == rank).all()
        for side in op.into:
            grid = seen if side is Side.QUERY else seen.T
            others = k_at if side is Side.QUERY else q_at
            part = [Counter({(int(o), group): 1 for o in others[row]}) for row in grid]
            self.fold(rank, program, op.places[side], op.into[side], part)

    def fold(self, rank: int, program, place, where, part) -> None:
        total = self.sums[rank].setdefault(place, [Counter() for _ in range(program.sum_rows[place].count)])
        rows = range(len(total))[where] if isinstance(where, slice) else where.tolist()
        for row, more in zip(rows, part, strict=True):
            total[row] += more

    def check(self, mask: Mask, direction: Direction) -> None:
        """Check that every cell's contribution arrived once at its owner, and that nothing is left over."""
        dense = mask.dense(self.span)
        dense[self.owner[Side.QUERY] < 0] = False  # no query, or no key, at this position
        dense[:, self.owner[Side.KEY] < 0] = False
        assert not any(self.wires.values()), "unread messages"
        for rank, program in enumerate(self.programs):
            own = {(side, rank, part) for side in Side for part in range(self.groups.count(side))}
            assert set(self.held[rank]) - set(program.kept.values()) == own, "foreign shards kept"
            assert set(self.sums[rank]) <= own, "foreign results kept"
            for side in direction.returns:
                for part, place in enumerate(program.home[side]):
                    groups = [g for g in range(self.groups.query) if self.groups.part(side, g) == part]
                    home = self.sums[rank].get(place, [Counter()] * len(self.own[side][rank]))
                    for position, got in zip(self.own[side][rank], home, strict=True):
                        line = dense[position] if side is Side.QUERY else dense[:, position]
                        assert got == Counter((int(x), g) for x in np.flatnonzero(line) for g in groups)


def reported(edge) -> tuple:
    return edge.step, edge.key, edge.partial, edge.exact, edge.finished, edge.rows.count


@st.composite
def cubes(draw) -> tuple[int, Cube, Groups]:
    """Return a world, and an assignment of its cells: by sequence groups, cached or not, or at random."""
    ways = [(2, 1), (2, 2), (3, 1), (4, 1), (2, 3), (2, 2), (1, 2), (1, 3), (1, 4), (1, 5)]
    count, contexts = draw(st.sampled_from(ways))
    ranks = count * contexts
    shared = draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
    chunks = draw(st.integers(0, 3)) if count > 1 else 0
    if draw(st.booleans()):
        dice = np.random.default_rng(draw(st.integers(0, 1 << 20))).integers(0, ranks, (count, ranks, ranks))
        return ranks, lambda i, j, group: dice[group, i, j], Groups(count, shared, chunks=chunks)
    groups = Groups(count, shared, count > 1 and draw(st.booleans()), chunks)
    inner = draw(st.sampled_from([rows, columns, nearest(contexts), blocks(contexts, 2)]))
    return ranks, HeadsFirst(groups, inner), groups


def check_programs(route, nodes, layout, mask, cube, groups, keys=None):
    over = dataclasses.replace(ROUTES[route], nodes=nodes)
    schedules = [Schedule(layout, mask, over, rank, keys=keys) for rank in range(layout.world)]
    for direction in Direction:
        simulation = Simulation(schedules, cube, direction, groups)
        simulation.run()
        simulation.check(mask, direction)


def draw_route(data, ranks: int, groups: Groups) -> tuple[str, tuple[int, ...]]:
    """Return a route, and each rank's node; nodes are uneven, and their ranks need not be adjacent."""
    routes = ["direct"] if groups.chunks else ["direct", "nodes"] if groups.query > 1 else sorted(ROUTES)
    nodes = st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks)
    return data.draw(st.sampled_from(routes)), tuple(data.draw(nodes))


@pytest.mark.parametrize("seed", range(8))
def test_ranks_forward_results_of_sparse_blocks_that_they_do_not_use(seed: int) -> None:
    dice = np.random.default_rng(seed)
    for _ in range(5):
        count, contexts = [(2, 2), (3, 2), (4, 2), (2, 3)][dice.integers(4)]
        groups = Groups(count, int(dice.choice([n for n in range(1, count + 1) if count % n == 0])), seed % 4 == 0)
        length, block, world = int(dice.integers(count * contexts, 20)), int(dice.integers(1, 5)), count * contexts
        blocks = -(-length // block)
        seen = dice.random((blocks, blocks)) < 0.25
        mask = Mask(causal=False, blocks=BlockPattern(blocks, np.packbits(seen).tobytes()), block=block)
        nodes = tuple(dice.integers(0, 3, world).tolist())
        cube = HeadsFirst(groups, (rows, columns)[dice.integers(2)])
        check_programs(("nodes", "direct")[seed % 2], nodes, Layout("zigzag", length, world), mask, cube, groups)


@settings(max_examples=150, deadline=None)
@given(worlds(most_tokens=16, most_ranks=1), cubes(), st.data())
def test_programs_bring_every_cell_home_once(world: tuple[Layout, Mask], case: tuple[int, Cube, Groups], data) -> None:
    (layout, mask), (ranks, cube, groups) = world, case
    check_programs(*draw_route(data, ranks, groups), dataclasses.replace(layout, world=ranks), mask, cube, groups)


@pytest.mark.parametrize(("count", "bits", "block"), [(3, b"\x11\x00", 3), (4, b"0\x15", 2)])
def test_a_node_with_part_of_a_cached_sequence_group_forwards(count: int, bits: bytes, block: int) -> None:
    """Ranks 2 and 3 cache one sequence group, on two nodes. Rank 2 forwards shards that only its cache needs."""
    groups = Groups(query=2, key=1, keep=True)
    mask = Mask(blocks=BlockPattern(count, bits), block=block)
    layout = Layout("balanced", 7, 4, mask=Mask())
    for inner in (rows, columns):
        check_programs("nodes", (0, 0, 0, 1), layout, mask, HeadsFirst(groups, inner), groups)


@st.composite
def stretches(draw, world: int, most: int) -> Layout:
    """Return a layout of random stretches: positions may be on no rank, and ranks may have none."""
    owners = draw(st.lists(st.integers(-1, world - 1), max_size=most))
    owners = np.repeat(np.array(owners, int), draw(st.integers(1, 3)))
    return Layout.of_stretches([[range(n, n + 1) for n in np.flatnonzero(owners == rank)] for rank in range(world)])


@settings(max_examples=200, deadline=None)
@given(cubes(), st.sampled_from(["zigzag", "contiguous", "zigzag-by-halves"]), st.data())
def test_programs_bring_every_cell_of_two_layouts_home_once(case: tuple[int, Cube, Groups], name: str, data) -> None:
    ranks, cube, groups = case
    layout = Layout(name, data.draw(st.integers(0, 14)), ranks, start=data.draw(st.integers(0, 24)))
    keys = data.draw(stretches(ranks, 12))
    mask = data.draw(masks(max(layout.stop, keys.stop)))
    check_programs(*draw_route(data, ranks, groups), layout, mask, cube, groups, keys)


@pytest.mark.parametrize(("world", "count"), [(6, 1), (6, 3), (8, 8)])
def test_each_step_is_a_permutation_of_the_ranks_own_context_first(world: int, count: int) -> None:
    groups, ranks = Groups(count, count), np.arange(world)
    distance = groups.distance(ranks[:, None], ranks, world)
    for line in (*distance, *distance.T):
        assert sorted(line) == list(range(world))
    assert ((distance < count) == (groups.context(ranks)[:, None] == groups.context(ranks))).all()
    if count == 1:
        np.testing.assert_array_equal(distance, (ranks - ranks[:, None]) % world)


@pytest.mark.parametrize(("world", "count", "size"), [(8, 2, 4), (12, 1, 3)])
def test_by_nodes_each_step_is_a_permutation_too_own_node_first(world: int, count: int, size: int) -> None:
    ranks = np.arange(world)
    route = dataclasses.replace(ROUTES["nodes"], nodes=tuple(ranks // size))
    distance = route.distance(Groups(count, count), ranks[:, None], ranks, world)
    for line in (*distance, *distance.T):
        assert sorted(line) == list(range(world))
    assert ((distance < size) == (ranks[:, None] // size == ranks // size)).all()
    first = (distance % size == 0) & (distance > 0)  # the first of another node is the one of the same place there
    assert (first == ((ranks[:, None] != ranks) & (ranks[:, None] % size == ranks % size))).all()


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_own_results_are_rounded_at_once_only_if_nothing_is_added(degree: int) -> None:
    schedule = Schedule(Layout("zigzag", 64, 4), Mask(causal=False), ROUTES["direct"], 0)
    groups, local = Groups.of(degree, q_heads=8, kv_heads=8), []
    for direction in Direction:
        work = schedule.work("query", direction, groups)
        edges = [edge for edge in work.edges(work.cells()) if edge.partial]
        parts = Counter(e.key for e in edges if e.target == e.key.owner)  # how many ranks' results reach their owner
        local += [(e, parts[e.key]) for e in edges if e.source == e.target]
    assert len(local) >= (4 if degree > 1 else 0)
    assert all(edge.finished == (count == 1) for edge, count in local)
    assert all(edge.exact != edge.finished for edge, _ in local)


def test_the_ranks_of_a_node_share_out_what_crosses() -> None:
    nodes = (0, 0, 0, 0, 1, 1, 1, 1)
    over = dataclasses.replace(ROUTES["nodes"], nodes=nodes)
    schedule = Schedule(Layout("contiguous", 64, 8), Mask(causal=False), over, 0)
    for direction, circulate in product(Direction, ("query", "key-value")):
        work = schedule.work(circulate, direction)
        crossing = [e for e in work.edges(work.cells()) if nodes[e.source] != nodes[e.target]]
        assert set(Counter(e.source for e in crossing).values()) == set(Counter(e.target for e in crossing).values())
        assert len(set(Counter(e.source for e in crossing).values())) == 1


def test_a_step_is_one_visit_and_the_last_completes_whole_sequences() -> None:
    """A step of a head group has one visit: new queries with all keys held, and old queries with the new keys."""
    layout = Layout("contiguous", 64, 8)
    for direction, keep in product(Direction, (False, True)):
        groups = Groups(8, 8, keep)
        program = Schedule(layout, Mask(causal=False), ROUTES["direct"], 2).program("query", direction, groups)
        visits = [op for op in program.ops if isinstance(op, Visit)]
        assert max(Counter(visit.step for visit in visits).values()) == 1
        assert sum(len(visit.tiles) for visit in visits) <= 4 * len(visits)  # neighbours' rows are one tile
        assert sum(visit.tiles.area for visit in visits) == 64 * 64


def test_a_wave_is_one_visit_and_its_results_leave_while_the_next_is_on_its_way() -> None:
    for direction, keep in product(Direction, (False, True)):
        groups = Groups(4, 4, keep, chunks=2)
        program = Schedule(Layout("zigzag", 64, 4), Mask(), ROUTES["direct"], 1).program("query", direction, groups)
        visits = [n for n, op in enumerate(program.ops) if isinstance(op, Visit)]
        home = [
            n
            for n, op in enumerate(program.ops)
            if isinstance(op, Post) and any(m.edge.partial and m.edge.key.side is Side.QUERY for m in op.sends)
        ]
        if keep or direction is Direction.FORWARD:
            assert len(visits) == len(home) == 2 and visits[0] < home[0] < visits[1] < home[1]
            assert [len(program.ops[n].tiles) for n in visits] == [1, 1]
        first, last = program.ops[visits[0]], program.ops[visits[-1]]
        places = {chunk % 2 for chunk in first.chunks[Side.QUERY]}, {chunk % 2 for chunk in last.chunks[Side.QUERY]}
        assert places[0] == ({0} if direction is Direction.FORWARD else {1})
        if keep or direction is Direction.FORWARD:
            assert places[1] == ({1} if direction is Direction.FORWARD else {0})


def test_each_quarter_is_spread_over_all_ranks_by_halves() -> None:
    for world, seqlen in product(range(1, 6), range(90)):
        layout = Layout("zigzag-by-halves", seqlen, world)
        assert max(layout.lengths) - min(layout.lengths) <= 1
        quarters = np.array(Chunks(layout, 4).lengths).reshape(world, 4)
        assert (quarters.max(0) - quarters.min(0)).max() <= world  # remainders lie before the quarters' borders


def test_chunks_count_from_the_first_position() -> None:
    assert Chunks(Layout("contiguous", 12, 2, start=100), 3).lengths == (4, 2, 0, 0, 2, 4)


def test_chunks_are_what_shards_have_of_each_stretch() -> None:
    names = "zigzag", "zigzag-by-halves", "striped", "contiguous", "zigzag-per-document"
    for name, world, count in product(names, (1, 2, 3), (2, 3)):
        layout = Layout(name, 17, world, documents=(0, 5, 17) if name.endswith("document") else None)
        chunks = Chunks(layout, count)
        for owner, place in product(range(world), range(count)):
            stretch = range(place * 17 // count, (place + 1) * 17 // count)
            mine, rows = layout.positions(owner), chunks.rows(owner, place)
            got = [p for n, p in zip(rows.starts, rows.stops, strict=True) for p in mine[n:p].tolist()]
            assert len(got) == chunks.lengths[owner * count + place] == sum(p in stretch for p in mine.tolist())
            if not layout.per_document:
                assert set(got) <= set(stretch)
            table = chunks.table([owner * count + place])
            reported = [f + n * s for _, _, f, count, s in table.tolist() for n in range(count)]
            assert reported == got and table[:, 3].sum() == len(got)


SIZES = {"batch": 2, "head_dim": 8, "v_head_dim": 4, "io": 2, "partial": 4, "accumulate": 4}
MASKS = [Mask(), Mask(causal=False), Mask(window=9), Mask(cu_seqlens=[0, 7, 33, 34, 50])]
COUNTED = covering_array(
    {
        "mask": MASKS,
        "world": [(4, 1, 4), (4, 2, 4), (4, 4, 2), (6, 3, 3), (6, 2, 1)],  # ranks, head groups, key-value heads
        "layout": ["zigzag", "striped"],
        "circulate": list(CIRCULATIONS),
        "cut": [(False, 0), (True, 0), (False, 2), (True, 2)],
    }
)


@pytest.mark.parametrize("case", COUNTED, ids=str)
def test_bytes_counted_for_a_choice_are_those_of_the_programs(case: dict) -> None:
    world, count, kv_heads = case["world"]
    keep, chunks = case["cut"] if count > 1 else (False, 0)
    groups = Groups.of(count, q_heads=12, kv_heads=kv_heads, keep=keep, chunks=chunks)
    layout = Layout(case["layout"], 50, world)
    schedules = [Schedule(layout, case["mask"], ROUTES["direct"], rank) for rank in range(world)]
    check_counted(schedules, Shape(q_heads=12, kv_heads=kv_heads, **SIZES), case["circulate"], groups)


@pytest.mark.parametrize(("count", "chunks"), [(1, 0), (2, 0), (2, 2), (4, 1)])
def test_bytes_counted_for_two_layouts_are_those_of_the_programs(count: int, chunks: int) -> None:
    shape, groups = Shape(q_heads=12, kv_heads=4, **SIZES), Groups.of(count, q_heads=12, kv_heads=4, chunks=chunks)
    queries = Layout("zigzag", 13, 4, start=37)
    keys = Layout.of_stretches([[(0, 9), (40, 50)], [(9, 11)], [], [(11, 40)]])
    for n, circulate in enumerate(CIRCULATIONS):
        schedules = [Schedule(queries, MASKS[n % 3], ROUTES["direct"], rank, keys=keys) for rank in range(4)]
        check_counted(schedules, shape, circulate, groups)


@pytest.mark.parametrize(("mask", "layout"), [*zip(MASKS, ["zigzag", "contiguous", "striped", "zigzag"], strict=True)])
def test_gathered_keys_arrive_in_one_exchange_and_are_one_visit(mask: Mask, layout: str) -> None:
    world, groups, shape = 5, Groups(gather=True), Shape(q_heads=4, kv_heads=2, **SIZES)
    schedules = [Schedule(Layout(layout, 50, world), mask, ROUTES["direct"], rank) for rank in range(world)]
    check_counted(schedules, shape, "key-value", groups)
    plain, traffic = ([each.traffic(shape, "key-value", one) for each in schedules] for one in (WHOLE, groups))
    assert plain == traffic
    for direction, schedule in product(Direction, schedules):
        ops = schedule.program("key-value", direction, groups).ops
        assert sum(isinstance(op, Visit) for op in ops) <= 2
        assert {op.step for op in ops if isinstance(op, Post) and any(not m.edge.partial for m in op.sends)} <= {1}


def check_counted(schedules: list[Schedule], shape: Shape, circulate: str, groups: Groups) -> None:
    """Compare the bytes and messages that a choice counts with those of the programs of all ranks."""
    first = schedules[0]
    moved = bytes_moved(first, shape, circulate, groups)
    traffic = [schedule.traffic(shape, circulate, groups) for schedule in schedules]
    assert moved.tolist() == [[t.sent for t in traffic], [t.received for t in traffic]]
    for one in Planner().passes(first, shape, circulate, groups):
        direction, found = one.direction, one.messages()
        counted, sent = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
        for *key, size in np.stack((found.step, found.source, found.target, found.size), 1).tolist():
            counted[tuple(key)] += size
        work = first.work(circulate, direction, groups)
        for edge in work.edges(work.cells()):
            if edge.source != edge.target and edge.rows.count:
                size = shape.edge_bytes(edge, direction, groups)
                sent[edge.step, edge.source, edge.target] += size
        assert dict(counted) == dict(sent)


def test_blocks_are_of_one_size_or_nearly() -> None:
    for world in range(1, 20):
        i, j = np.indices((world, world))
        for keys in range(1, world + 1):
            ranks = blocks(world, keys)(i, j)
            cells = np.bincount(ranks.ravel(), minlength=world)
            assert len(cells) == world and cells.min() > 0
            if world % keys == 0:
                assert set(cells) == {world} and (np.diag(ranks) == np.arange(world)).all()


def test_buffers_do_not_grow_with_the_world() -> None:
    """A rank holds at most two foreign shards, and one outgoing and one incoming partial per exchange."""
    cases = product(("direct", "ring-attention"), (rows, columns), Direction, (4, 12), (0, 3))
    for route, assignment, direction, world, rank in cases:
        schedule = Schedule(Layout("zigzag", 16 * world, world), Mask(), ROUTES[route], rank)
        held, arriving = 0, {}
        for op in assigned(schedule, HeadsFirst(WHOLE, assignment), direction).ops:
            if isinstance(op, Post):
                arriving[op.step] = sum(not m.edge.partial for m in op.receives)
                assert sum(m.edge.partial for m in op.sends) <= 1 and sum(m.edge.partial for m in op.receives) <= 1
            elif isinstance(op, Wait):
                held += arriving.pop(op.step)
            elif isinstance(op, Drop):
                held -= 1
            assert held + sum(arriving.values()) <= 2


def test_two_exchanges_are_under_way_where_nothing_is_passed_on() -> None:
    layout = Layout("zigzag", 128, 8)
    for route, assignment, expected in (("direct", columns, 2), ("direct", rows, 2), ("ring-attention", rows, 1)):
        schedule = Schedule(layout, Mask(), ROUTES[route], 1)
        ops = assigned(schedule, HeadsFirst(WHOLE, assignment), Direction.BACKWARD).ops
        for n, op in enumerate(ops):
            if isinstance(op, Wait) and op.step < 7:
                before = ops[:n]
                under_way = sum(isinstance(o, Post) for o in before) - sum(isinstance(o, Wait) for o in before)
                assert under_way == expected, (route, op.step)


def test_of_several_chunks_three_exchanges_are_under_way() -> None:
    """Results leave with the first exchange that is posted after they exist, so that none waits for a later chunk."""
    for chunks, most in ((1, 2), (2, 2), (4, 3)):
        groups = Groups(4, 4, keep=True, chunks=chunks, results=True)
        schedule = Schedule(Layout("zigzag-by-halves", 128, 4), Mask(), ROUTES["direct"], 1)
        for direction in Direction:
            ops = schedule.program("query", direction, groups).ops
            visits = [n for n, op in enumerate(ops) if isinstance(op, Visit)]
            posted = [sum(isinstance(op, Post) for op in ops[:n]) for n in visits]
            assert posted == [min(chunks, most), *(n + most for n in range(1, chunks))]
            leaves = [op.step for op in ops if isinstance(op, Post) if any(m.edge.partial for m in op.sends)]
            assert leaves == [n + most for n in range(1, chunks + 1)]


@pytest.mark.parametrize(
    ("nodes", "heads", "kv_heads", "count", "circulate", "most"),
    [
        ((0, 0, 1, 1), 4, 4, 2, "query", 0.55),  # heads cut within a node: every byte of K and V crosses once
        ((0, 0, 1, 1), 4, 1, 1, "key-value", 0.60),  # one key-value head: by two levels
        ((0, 0, 0, 0, 1, 1, 1, 1), 4, 1, 1, "key-value", 0.36),
        ((0, 0, 0, 0, 1, 1, 1, 1), 8, 2, 2, "key-value", 0.36),
    ],
)
def test_what_crosses_to_another_node_does_so_once(nodes, heads, kv_heads, count, circulate, most):
    """Compare with zigzag and direct messages, forward and backward, bf16."""
    world, sizes = len(nodes), {"batch": 1, "head_dim": 128, "v_head_dim": 128, "io": 2, "partial": 2, "accumulate": 4}
    shape = Shape(q_heads=heads, kv_heads=kv_heads, **sizes)
    total, cut = {}, Groups.of(count, q_heads=heads, kv_heads=kv_heads, keep=count > 1)
    for route, groups in (("direct", WHOLE), ("nodes", cut)):
        over = dataclasses.replace(ROUTES[route], nodes=nodes)
        schedule = Schedule(Layout("zigzag", 64 * world, world), Mask(), over, 0, Strategy(ulysses_degree=groups.query))
        total[route] = sum(
            shape.edge_bytes(edge, work.direction, groups)
            for work in (schedule.work(circulate, direction, groups) for direction in Direction)
            for edge in work.edges(work.cells())
            if nodes[edge.source] != nodes[edge.target]
        )
    assert total["nodes"] <= most * total["direct"]


def test_hops_without_a_tile_are_skipped() -> None:
    window = make_schedule(64, mask=Mask(window=8), layout="contiguous", route="direct", rank=3, world=8)
    assert {(e.source, e.target) for e in window.program("query", Direction.FORWARD).edges} == {(2, 3), (3, 4)}
    assert {e.rows.count for e in window.program("query", Direction.FORWARD).edges} == {7}
    documents = Mask(cu_seqlens=range(0, 65, 8))
    alone = make_schedule(64, mask=documents, layout="contiguous", route="direct", rank=3, world=8)
    assert all(alone.program("query", direction).edges == [] for direction in Direction)


def test_causal_zigzag_sends_half_where_half_is_needed() -> None:
    schedule = make_schedule(64, mask=Mask(), layout="zigzag", route="direct", rank=1, world=4)
    received = {e.source: e.rows.count for e in schedule.program("query", Direction.FORWARD).edges if e.target == 1}
    assert received == {0: 8, 2: 16, 3: 16}


def test_wire_of_the_papers_table() -> None:
    """Full mask, MHA, bf16: forward 2 n hops elements, backward 3 n hops (query side) or 4 n hops (key-value)."""
    world, seqlen, heads, dim = 4, 64, 8, 16
    schedule = make_schedule(seqlen, mask=Mask(causal=False), layout="contiguous", route="direct", rank=0, world=world)
    sizes = {"batch": 1, "q_heads": heads, "head_dim": dim, "v_head_dim": dim, "io": 2, "partial": 2, "accumulate": 4}
    shape = Shape(**sizes, kv_heads=heads)
    n, hops = heads * seqlen // world * dim, world - 1
    traffic = schedule.traffic(shape, "query")
    statistics = heads * seqlen // world * 2 * 4 * hops
    assert traffic.forward_sent == traffic.forward_received == 2 * n * hops * 2
    assert traffic.backward_sent == traffic.backward_received == 3 * n * hops * 2 + statistics
    assert schedule.traffic(shape, "key-value").backward_sent == 4 * n * hops * 2
    assert schedule.choose_circulation(shape) == "query"
    grouped = Shape(**sizes, kv_heads=heads // 2)
    assert schedule.choose_circulation(grouped) == "key-value"


@pytest.mark.parametrize("world", [3, 5, 8])
def test_either_balances_a_contiguous_layout(world: int) -> None:
    """Half a ring of whole blocks each: 1 / world more than the mean at most; fewer bytes than zigzag's best."""
    shape = Shape(batch=1, q_heads=8, kv_heads=8, head_dim=8, v_head_dim=8, io=2, partial=2, accumulate=4)
    sent = {}
    for layout, expected in (("contiguous", "nearest"), ("zigzag", "query"), ("striped", "query")):
        schedules = [Schedule(Layout(layout, 32 * world, world), Mask(), ROUTES["direct"], r) for r in range(world)]
        assert {Planner().choose_circulation(s, shape) for s in schedules} == {expected}
        sent[layout] = sum(s.traffic(shape, expected).sent for s in schedules)
    assert sent["contiguous"] < 0.8 * sent["zigzag"] if world > 3 else sent["contiguous"] < 0.9 * sent["zigzag"]
    contiguous = Schedule(Layout("contiguous", 32 * world, world), Mask(), ROUTES["direct"], 0)
    for direction, assign in CIRCULATIONS["nearest"](world).items():
        work = np.zeros(world)
        tiles_of = pair_tiles(*[contiguous.layout] * 2, contiguous.regions, range(world), range(world))
        for (i, j), tiles in tiles_of.items():
            work[assign(np.array(i), np.array(j))] += tiles.area
        assert work.max() <= (1 + 1.05 / world) * work.mean(), direction
    for rank in range(world):
        ops = Schedule(contiguous.layout, Mask(), ROUTES["direct"], rank).program("nearest", Direction.BACKWARD).ops
        assert max(op.step for op in ops if isinstance(op, Visit)) <= world // 2


def test_route_auto_crosses_between_crowded_hosts_once() -> None:
    def pick(hosts: list[int] | None) -> str:
        planner = Planner(nodes=None if hosts is None else tuple(hosts))
        options = {"layout": "contiguous", "route": "auto", "rank": 0, "world": 8, "planner": planner}
        return make_schedule(64, mask=Mask(causal=False), **options).route.name

    assert pick(None) == pick([0] * 8) == pick(list(range(8))) == "direct"
    assert pick([0, 0, 0, 0, 1, 1, 1, 1]) == "nodes"


def test_many_alike_rows_of_blocks_are_few_regions() -> None:
    """Planning time grows with the number of regions. Blocks above a causal diagonal don't matter."""
    count = 500
    for seen in (np.ones((count, count), bool), np.tri(count, dtype=bool)):
        assert len(Mask(blocks=seen, block=16).regions(16 * count)) == 1
    sinks_and_neighbours = np.eye(count, dtype=bool) | np.eye(count, k=-1, dtype=bool)
    sinks_and_neighbours[:, 0] = True
    assert len(Mask(blocks=sinks_and_neighbours, block=16).regions(16 * count)) < 3 * count


def test_a_world_is_planned_with_blocks() -> None:
    """Large worlds are predicted by smaller ones, with a similar pattern."""
    count, world = 600, 300
    mask = Mask(blocks=np.eye(count, dtype=bool) | (np.arange(count) % 8 == 0), block=64)
    shape = Shape(batch=1, q_heads=8, kv_heads=8, head_dim=64, v_head_dim=64, io=2, partial=2, accumulate=4)
    planner = Planner(preset("cpu"), call_shape=shape)
    found = planner.choose(64 * count, mask=mask, strategy=Strategy(), rank=1, world=world)
    assert found.mask == mask and found.layout.seqlen == 64 * count


def test_masks_are_values() -> None:
    import torch

    blocks = torch.eye(3).bool()
    assert Mask(blocks=blocks, block=4) == Mask(blocks=blocks.tolist(), block=4) != Mask(blocks=~blocks, block=4)
    assert hash(Mask(blocks=blocks, block=4)) == hash(Mask(blocks=blocks.numpy(), block=4))
    assert Mask(cu_seqlens=[0, 3, 8]) == Mask(cu_seqlens=torch.tensor([0, 3, 8])) == Mask(cu_seqlens=(0, 3, 8))
    assert hash(Mask(window=4)) == hash(Mask(window=4)) != hash(Mask(window=5))
    assert len(repr(Mask(cu_seqlens=range(5000)))) < 120


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Mask)])
def test_ranks_agree_on_every_field_of_a_mask(field: str) -> None:
    """If a field could differ between ranks unnoticed, some ranks would compute wrong results."""
    seen, hidden = np.ones((2, 2), bool), np.eye(2, dtype=bool)
    one = {"blocks": seen, "block": 4} if field in ("blocks", "block") else {}
    values = {"causal": False, "window": 3, "cu_seqlens": [0, 3, 8], "prefix": 2, "blocks": hidden, "block": 7}
    values["together"] = [0, 0, -1, -1, 1, 1, 1, -1]
    reported = [
        make_schedule(8, mask=Mask(**m), layout="zigzag", route="direct", rank=0, world=2).description
        for m in (one, {**one, field: values[field]})
    ]
    assert reported[0]["mask"] != reported[1]["mask"]


@pytest.mark.parametrize(
    ("mask", "banded"),
    [
        (Mask(), False),
        (Mask(causal=False), False),
        (Mask(prefix=13), False),
        (Mask(cu_seqlens=[0, 7, 33, 34, 50]), False),
        (Mask(window=9), True),
        (Mask(causal=False, window=9), True),
        (Mask(together=np.arange(50) // 4 % 3 - 1), True),
        (Mask(blocks=np.tri(7, dtype=bool), block=8), True),
    ],
)
def test_a_mask_tells_whether_its_bands_are_more_than_full_and_causal(mask, banded):
    """By that a kernel is chosen and proved on a device."""
    q_start, q_stop, k_start, k_stop, lo, hi = mask.regions(50).T
    full = (lo <= q_start - k_stop + 1) & (hi >= q_stop - 1 - k_start)
    causal = (lo == 0) & (hi >= q_stop - 1 - k_start) & (q_start == k_start)
    assert mask.banded == banded and (banded or (full | causal).all())
