"""Test how a batch's documents and padding become rows, and how results return to the batch's order."""

from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from burst_attention import Mask, Strategy, make_plan
from burst_attention.attention.batch import PlanCache
from burst_attention.integrations.hf.call import vision
from burst_attention.integrations.hf.call.rows import rows_of
from burst_attention.plan.mask import TokenGroups

IDS = torch.arange(1, 13).view(2, 6)


def batch(**entries):
    return {"input_ids": IDS, "labels": IDS} | entries


def ones(*, left=0, right=0):
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, :left] = 0
    mask[1, 6 - right :] = 0
    return mask


def labels(*, ignored):
    out = IDS.clone()
    out[1, list(ignored)] = -100
    return out


def test_rows_of_one_document_stay_as_they_are():
    rows = rows_of(batch(), ranks=2)
    assert rows.cu_seqlens is None and rows.padding is None and torch.equal(rows.input_ids, IDS)
    assert rows.targets.tolist() == [[2, 3, 4, 5, 6, -100], [8, 9, 10, 11, 12, -100]]
    assert torch.equal(rows.restore(rows.input_ids), IDS)


@pytest.mark.parametrize("positions", [None, [0, 1, 2, 3, 0, 1]])
def test_rows_with_the_same_documents_can_be_joined(positions):
    entries = {} if positions is None else {"position_ids": torch.tensor([positions])}
    rows = rows_of(batch(**entries), ranks=2, join=True)
    assert rows.cu_seqlens == ((0, 6, 12) if positions is None else (0, 4, 6, 10, 12))
    assert torch.equal(rows.input_ids, IDS.reshape(1, 12))
    assert torch.equal(rows.restore(rows.input_ids), IDS)
    one = rows_of({name: x[:1] for name, x in batch(**entries).items()}, ranks=2, join=True)
    assert one.cu_seqlens == (None if positions is None else (0, 4, 6)), "a single row stays as it is"


def test_a_balanced_layout_joins_the_rows_of_a_batch():
    for layout, joins in (("balanced", True), ("zigzag", False), ("auto", False)):
        assert PlanCache(make_plan(1, strategy=Strategy(layout=layout)), [None]).joins_rows is joins


def test_padding_in_front_goes_behind():
    given = batch(attention_mask=ones(left=2), labels=labels(ignored=(0, 1, 2)))
    rows = rows_of(given, ranks=2)
    assert rows.input_ids[1].tolist() == [9, 10, 11, 12, 7, 8]
    assert rows.targets[1].tolist() == [10, 11, 12, -100, -100, -100]
    assert torch.equal(rows.restore(rows.input_ids), IDS)


@pytest.mark.parametrize(
    ("mask", "positions", "shifted"),
    [
        ([0, 0, 1, 1], [1, 1, 0, 1], False),
        ([0, 0, 1, 1], [0, 0, 2, 3], True),
        ([0, 0, 1, 1], [0, 1, 2, 3], True),
        ([0, 1, 1, 0], [5, 0, 1, 1], False),
        ([1, 1, 1, 0], [0, 1, 2, 0], False),
        ([1, 1, 1, 1], [2, 3, 4, 5], True),
    ],
)
def test_a_row_begins_with_its_first_token_and_not_with_padding(mask, positions, shifted):
    """Positions are read after padding has moved behind the tokens, so positions of padding don't count."""
    given = {"input_ids": torch.tensor([[7, 8, 9, 10]]), "attention_mask": torch.tensor([mask])}
    rows = rows_of(given | {"position_ids": torch.tensor([positions])}, ranks=2)
    assert rows.shifted is shifted
    assert rows.cu_seqlens is None
    assert rows_of(given, ranks=2).shifted is (not mask[0])


def test_rows_with_documents_of_their_own_are_laid_end_to_end():
    places = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 3]])
    rows = rows_of(batch(position_ids=places), ranks=2)
    assert rows.cu_seqlens == (0, 6, 8, 12)
    assert rows.input_ids.shape == (1, 12)
    assert rows.targets[0, 5] == -100  # a row's last token must not predict the next row
    assert torch.equal(rows.restore(rows.input_ids), IDS)


@pytest.mark.parametrize(
    "entries",
    [
        {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1]])},
        {"seq_idx": torch.tensor([[0, 0, 0, 0, 1, 1]] * 2)},
        {"sequence_ids": torch.tensor([[7, 7, 7, 7, 3, 3]] * 2), "attention_mask": ones()},
        {"cu_seq_lens_q": torch.tensor([0, 4, 6, 10, 12])},
        {"cu_seq_lens_q": torch.tensor([0, 4, 6, 10, 12]), "position_ids": torch.arange(6)[None]},
        {"cu_seq_lens_q": torch.tensor([0, 4, 6, 10, 12]), "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1]])},
    ],
)
def test_every_spelling_of_documents(entries):
    rows = rows_of(batch(**entries), ranks=2)
    assert rows.cu_seqlens == (0, 4, 6)
    assert rows.input_ids.shape == (2, 6)


def test_a_batch_shorter_than_its_ranks_is_lengthened():
    rows = rows_of(batch(), ranks=9)
    assert rows.input_ids.shape == (2, 9)
    assert (rows.targets[:, 6:] == -100).all()
    assert torch.equal(rows.restore(rows.input_ids), IDS)
    assert torch.equal(rows.restore(rows.input_ids[..., None])[..., 0], IDS)


@pytest.mark.parametrize(
    ("entries", "error", "message"),
    [
        ({"input_ids": None}, ValueError, "input_ids are missing"),
        ({"input_ids": IDS.tolist()}, TypeError, "input_ids is a list; pass a tensor of integers"),
        (
            {"input_ids": IDS.float()},
            TypeError,
            r"input_ids has dtype torch.float32; pass int64, such as input_ids.long",
        ),
        ({"labels": IDS.to(torch.int8)}, TypeError, "labels has dtype torch.int8; pass int64"),
        ({"attention_mask": torch.full((2, 6), 0.5)}, ValueError, "a mask that holds 0.5, neither 0 nor 1, is not"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 2, 2, 2]] * 2)}, ValueError, "a mask that holds 2, neither 0 nor"),
        ({"labels": IDS[:, :5]}, ValueError, r"labels has shape \[2, 5\], input_ids \[2, 6\]"),
        ({"attention_mask": torch.ones(2, 1, 6, 6)}, ValueError, r"a mask of shape \[2, 1, 6, 6\]"),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1, 1, 1]] * 2)}, ValueError, "zeros between tokens"),
        ({"attention_mask": ones(right=2)}, ValueError, "labels has targets for padding tokens"),
        ({"attention_mask": ones(left=2), "labels": labels(ignored=(0, 1))}, ValueError, "first token behind padding"),
        ({"position_ids": torch.tensor([[0, 1, 2, 4, 5, 6]])}, ValueError, "goes from 2 to 4 in row 0"),
        ({"position_ids": torch.zeros(3, 2, 6).long()}, ValueError, r"position_ids has shape \[3, 2, 6\]"),
        (
            {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]]), "attention_mask": ones()},
            ValueError,
            "Leave attention_mask out for packed documents",
        ),
        ({"cu_seq_lens_q": torch.tensor([0, 4, 8, 12])}, ValueError, "crosses the end of a row"),
        ({"cu_seq_lens_q": torch.tensor([0, 4, 6])}, ValueError, "cu_seq_lens_q: cu_seqlens ends at 6"),
        (
            {"cu_seq_lens_q": torch.tensor([4, 12])},
            ValueError,
            r"cu_seq_lens_q: cu_seqlens=\[4, 12\] must start with 0",
        ),
        (
            {"cu_seq_lens_q": torch.tensor([0, 4, 6, 10, 12]), "cu_seq_lens_k": torch.tensor([0, 3, 6, 10, 12])},
            ValueError,
            "cu_seq_lens_q and cu_seq_lens_k describe different documents",
        ),
    ],
)
def test_what_can_not_be_is_refused(entries, error, message):
    with pytest.raises(error, match=message):
        rows_of(batch(**entries), ranks=2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("labels", r"labels holds 12 at token 5 of row 1, neither in \[0, 12\) nor -100; pass ids of the model's"),
        ("shift_labels", "shift_labels holds 99 at token 0 of row 0"),
    ],
)
def test_a_label_beyond_the_vocabulary_is_named_with_its_place(name, message):
    given = IDS.clone()
    given[0, 0] = 99  # nothing predicts the first token, unless labels are shifted
    with pytest.raises(ValueError, match=message):
        rows_of({"input_ids": IDS, name: given}, ranks=2, vocabulary=12)
    assert rows_of({"input_ids": IDS, "labels": given}, ranks=2, vocabulary=13).targets is not None
    assert rows_of({"input_ids": IDS, "labels": IDS - 20}, ranks=2).targets is not None  # of a loss that is not ours


def test_a_few_masks_plans_are_kept():
    plans = PlanCache(make_plan(1), [None, 7, None], kept=3)
    for length in range(10, 20):
        kept, borders = plans.get(length, (0, 4, length)), (0, 4, length)
        masks = {window: Mask(window=window, cu_seqlens=borders) for window in (None, 7)}
        assert {window: plan.mask for window, plan in kept.items()} == masks
        assert all(plan.seqlen == length for plan in kept.values())
    assert len(plans) == 3
    assert plans.get(19, (0, 4, 19)) is kept


def test_groups_of_joined_rows_have_different_numbers():
    """Models number the image groups of each row from 0; a window must not see one image in two rows."""
    groups = torch.tensor([[0, 0, -1, 1], [-1, 0, 0, -1], [-1, -1, -1, -1]])
    rows = rows_of({"input_ids": torch.ones(3, 4, dtype=torch.int64)}, ranks=1)
    joined = vision._numbers(groups, replace(rows, joined=True))
    assert joined.tolist() == [0, 0, -1, 1, -1, 2, 2, -1, -1, -1, -1, -1]
    assert TokenGroups.of(joined).reach == 2
    assert vision._numbers(groups[:1], rows).tolist() == [0, 0, -1, 1]


def test_no_value_is_read_alone():
    """On a GPU, the host would wait for each: decisions are made on one copy of the batch."""
    batch = {"input_ids": torch.arange(24).view(2, 12), "labels": torch.arange(24).view(2, 12)}
    batch |= {"position_ids": torch.tensor([*range(5), *range(7)]).expand(2, 12), "seq_idx": torch.zeros(2, 12).int()}
    batch["seq_idx"][:, 5:] = 1
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        assert rows_of(batch, ranks=2).cu_seqlens == (0, 5, 12)
    assert not any(event.name == "aten::_local_scalar_dense" for event in seen.events())
