"""A model is read in one walk, and what is asked of the result stays right when ``parallelize`` replaces classes."""

from unittest import mock

import pytest
import torch
from torch import nn

from burst_attention.integrations import hf
from burst_attention.integrations.hf.layers import converted
from burst_attention.integrations.hf.reading import Kind, forwards, read
from burst_attention.testing import local_world
from tests.support.hf_models import make_model
from tests.tools import families

KINDS = {
    "llama": {Kind.ATTENTION},
    "lfm2": {Kind.ATTENTION, Kind.MIXER},
    "llama4_text": {Kind.ATTENTION, Kind.TEMPERED},
    "gpt_neo": {Kind.SCORES},
    "bart": {Kind.ATTENTION, Kind.PLACES},
}


@pytest.mark.parametrize("model_type", KINDS)
def test_kinds_of_parts_stay_when_classes_are_replaced(model_type):
    _, model = families.built(model_type)
    before = [(part.name, part.kind) for part in read(model)]
    assert {kind for _, kind in before} - {Kind.OTHER} == KINDS[model_type]
    converted.convert(read(model))
    assert [(part.name, part.kind) for part in read(model)] == before


def test_parts_that_are_shared_are_read_once():
    inner = nn.Sequential(nn.ReLU())
    reading = read(nn.Sequential(inner, nn.Sequential(inner, nn.Tanh())))
    assert [part.name for part in reading] == ["", "0", "0.0", "1", "1.1"]
    assert [part.name for part in reading.parts[3].inside] == ["1", "0", "0.0", "1.1"]


def test_a_changed_model_is_walked_once_for_all_checks():
    """Once itself, and once its body: everything else asks these two results."""
    ids, stock = torch.ones(1, 8, dtype=torch.long), nn.Module.named_modules
    models, walked = [make_model("llama") for _ in range(2)], []

    def named_modules(module, *args, **kwargs):
        if module in (models[0], models[0].model) and not (args or kwargs):
            walked.append(module)
        return stock(module, *args, **kwargs)

    def rank(group):
        model = hf.parallelize(models[group.rank()], group)
        model(input_ids=ids, labels=ids)
        if group.rank() == 0:
            model.train(not model.training)
            with mock.patch.object(nn.Module, "named_modules", named_modules):
                model._burst.check_parts(model)

    with local_world(2) as ranks:
        ranks.run(rank)
    assert walked == [models[0], models[0].model]


def reads(input_ids, mm_token_type_ids=None):
    return input_ids + mm_token_type_ids


def reads_inside(input_ids, mm_token_type_ids=None):
    return [input_ids + each for each in (lambda: mm_token_type_ids)()]


def never_reads(input_ids, mm_token_type_ids=None):
    return input_ids


@pytest.mark.parametrize(("forward", "dropped"), [(reads, False), (reads_inside, False), (never_reads, True)])
def test_types_of_tokens_are_dropped_only_where_no_code_reads_them(forward, dropped):
    with mock.patch.object(forwards, "stock_forward", lambda model: forward.__code__):
        assert forwards.drops(None, "mm_token_type_ids") is dropped
