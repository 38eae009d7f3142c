"""The parts of a model: one walk over its modules, and what each of them is.

A :class:`Reading` holds until a module is added, replaced or changed; :class:`..snapshots.Watched` tells when.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from functools import cached_property
from itertools import takewhile
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from . import known
from .forwards import body_of


class Kind(Enum):
    """What a part is to shards. Parts of all kinds but ``OTHER`` exchange data, or need the plan of the call."""

    MIXER = "a recurrent layer or a short convolution that is known to run on shards"
    ATTENTION = "an attention that calls transformers' interface"
    TEMPERED = "such an attention that scales queries by their places"
    INDEXED = "such an attention whose indexer chooses the keys of each query"
    INDEXER = "an indexer that is known to choose keys over all ranks"
    SCORES = "a known attention that computes its scores itself"
    PLACES = "an embedding of positions that the module around it counts"
    POOLER = "a part that scores a sequence by one token"
    OTHER = "a part that must treat each token independently"


_INNER = ("language_model", "text_model")  # names of the language model inside of a vision-language model
INTERFACE = (Kind.ATTENTION, Kind.TEMPERED, Kind.INDEXED)
ATTENTIONS = (*INTERFACE, Kind.SCORES)
EXCHANGING = (*ATTENTIONS, Kind.MIXER)


class Part:
    """A module of a model. ``name``: as ``named_modules`` gives it."""

    def __init__(self, name: str, module: nn.Module, reading: Reading) -> None:
        self.name, self.module, self._reading = name, module, reading

    def __str__(self) -> str:
        return f"{self.name or 'the model'} ({type(self.module).__name__})"

    @cached_property
    def kind(self) -> Kind:
        """What the part is. It stays when ``parallelize`` replaces the module's class."""
        module = self.module
        if known.mechanism(module):
            return Kind.MIXER
        if known.is_tempered(module):
            return Kind.TEMPERED
        if known.scores_itself(module):
            return Kind.SCORES
        if known.is_indexer(module):
            return Kind.INDEXER
        if calls_interface(module):
            if known.is_indexed(module):
                return Kind.INDEXED
            return Kind.ATTENTION
        if known.is_counted(module):
            return Kind.PLACES
        return Kind.POOLER if id(module) in self._reading.poolers else Kind.OTHER

    @property
    def definer(self) -> type:
        """The class that defines the module's forward, FSDP's classes aside; ``nn.Module`` if none does."""
        definers = (base for base in type(self.module).__mro__ if "forward" in vars(base))
        return next(x for x in definers if not known.within(x.__module__, ["torch.distributed.fsdp"]))

    @cached_property
    def inside(self) -> list[Part]:
        """The part itself, and those inside of it."""
        return [self._reading.by_id[id(module)] for module in self.module.modules()]

    def holds(self, *kinds: Kind) -> bool:
        """Return whether the part, or one inside of it, is of one of these kinds."""
        return any(part.kind in kinds for part in self.inside)

    @property
    def is_attention(self) -> bool:
        """Whether it is called an attention; a mixer may be called so too."""
        return "Attention" in type(self.module).__name__ and not self.holds(Kind.MIXER)


class Reading:
    """A model's parts, in the order of ``named_modules``."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.parts = [Part(name, module, self) for name, module in model.named_modules()]
        self.by_id = {id(part.module): part for part in self.parts}
        self.judged: dict[Any, str | None] = {}  # of :func:`.token_code.mixing`

    def __iter__(self) -> Iterator[Part]:
        return iter(self.parts)

    @property
    def modules(self) -> dict[str, Any]:
        """The modules by name."""
        return {part.name: part.module for part in self}

    @cached_property
    def text(self) -> Reading:
        """The reading of the part that runs on shards."""
        body = text_of(self.model)
        return self if body is self.model else read(body)

    @cached_property
    def poolers(self) -> frozenset[int]:
        """The ids of the poolers of the model's bodies."""
        owners = (part.module for part in self if isinstance(part.module, PreTrainedModel))
        poolers = (getattr(owner, "pooler", None) for owner in owners)
        return frozenset(id(x) for x in poolers if isinstance(x, nn.Module) and known.is_called(x, "Pooler"))

    def of(self, *kinds: Kind) -> list[Part]:
        """Return the parts of these kinds."""
        return [part for part in self if part.kind in kinds]


def read(model: Any) -> Reading:
    """Read a model, or a part of one."""
    return Reading(model)


def calls_interface(module: nn.Module) -> bool:
    """Return whether a method of a module's class uses transformers' attention interface."""
    bases = takewhile(lambda base: base not in (PreTrainedModel, nn.Module), type(module).__mro__)
    methods = (value for base in bases for value in vars(base).values() if callable(value))
    return any("ALL_ATTENTION_FUNCTIONS" in known.code_names(value) for value in methods)


def language_model_of(model: Any) -> Any:
    """Return the language model inside a vision-language model, without its head; None for other models."""
    around, name = around_language(model)
    inner = getattr(around, name, None)
    return body_of(inner) if inner is not None and inner.get_output_embeddings() is not None else inner


def around_language(model: Any) -> tuple[Any, str]:
    """Return the module that calls the language model, and the language model's name in it; (None, "") otherwise."""
    embeddings = _embeddings_of(model) if isinstance(model, PreTrainedModel) else None
    for around in (model, body_of(model)) if embeddings is not None else ():
        for name in _INNER:
            inner = getattr(around, name, None)
            if isinstance(inner, PreTrainedModel) and _embeddings_of(inner) is embeddings:
                return around, name
    return None, ""


def _embeddings_of(model: Any) -> Any:
    with suppress(NotImplementedError):
        return model.get_input_embeddings()


def text_of(model: Any) -> Any:
    """Return the part that runs on shards: the language model, or the body of a model without vision."""
    inner = language_model_of(model)
    return body_of(model) if inner is None else inner
