"""The cache of a model's keys and values, dealt over the ranks of a group."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig

from burst_attention.attention.batch import Reach, digest_text
from burst_attention.attention.dealt import Seen, attend_dealt, choose_dealt, rows_held
from burst_attention.attention.plan import Plan
from burst_attention.comm.lines import open_lines
from burst_attention.comm.link import connect, resolve_group, resolve_timeout
from burst_attention.integrations.hf.layers.checks import UNSTATED
from burst_attention.integrations.hf.layers.dealt import ON_ONE_RANK, DealtCache, Step
from burst_attention.integrations.hf.reading import known
from burst_attention.integrations.hf.reading.configs import by_layer, layer_windows
from burst_attention.integrations.hf.tensor import axis

from . import files, forward
from .layer import EmptyLayer, Filling, IndexedLayer, IndexLayer, ShardedLayer, SharingLayer, StateLayer, shown_reach
from .sharing import sources_of
from .slots import NO_HOLE, Hole, own_slots, seen_keys

_INDEXED = (known.INDEXED, known.BLOCKS)
_KINDS = ("full_attention", "sliding_attention", known.CHUNKED, *_INDEXED, "linear_attention", "conv", "mlp", "moe")
_SIZES = ("model_type", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
_CHOICE = ("index_topk", "index_topk_blocks", "index_block_size", "index_local_blocks", "indexer_types", "index_kpool")

Layer = ShardedLayer | StateLayer | EmptyLayer


class ShardedCache(DealtCache):
    """Keys and values of a prompt and of generated tokens; each rank holds about 1/W of each layer's, and all states.

    Pass it to ``generate`` of a model from ``hf.parallelize``, with the same ids on every rank:

        cache = ShardedCache(model.config)
        out = model.generate(ids, cache=cache, max_new_tokens=200)  # the same tokens on every rank

    Args:
        config: the model's configuration.
        group: the group of ``hf.parallelize``: a ProcessGroup, one axis of a DeviceMesh, or None for all ranks.
        timeout: seconds that one exchange may take; None for the group's own timeout.
        prefill_chunk: compute at most this many tokens of a prompt or of a later turn at once, on all ranks together.
            At least 64, and twice the number of ranks. None: all at once.

    The prompt is computed on shards, and each rank keeps its own. Pages of 64 generated tokens are dealt in turn.
    Layers with a window drop what no later token sees. One cache serves one batch: later turns continue its rows.
    Recurrent layers have a state of a fixed size, which every rank holds. GLM-5.3's keys of pools are on every
    rank, too.

    Raises:
        TypeError, ValueError: the configuration has other layers than attention and recurrent ones, or no attention,
            or ``group`` or ``prefill_chunk`` can't be used.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        group: Any = None,
        *,
        timeout: float | timedelta | None = None,
        prefill_chunk: int | None = None,
    ) -> None:
        if not isinstance(config, PreTrainedConfig):
            raise TypeError(f"config is a {type(config).__name__}; pass model.config")
        text = config.get_text_config(decoder=True)
        layers = _layers_of(text)
        super().__init__(layers=[*layers])
        self.sharded = {n: each for n, each in enumerate(layers) if isinstance(each, ShardedLayer)}
        self.states = {n: each for n, each in enumerate(layers) if isinstance(each, StateLayer)}
        self.prefill_sent = 0  # payload bytes that this rank sent in prefills, and
        self.weights_sent = 0  # for weights that ranks share
        self.group = resolve_group(group)
        self.transport, self.agreement = connect(self.group, resolve_timeout(timeout))
        with self.agreement.entering("ShardedCache"):
            self.prefill_chunk = _check_chunk(prefill_chunk, self.transport.world)
        self.model = describe_model(text, layers)
        others = {n: each for n, each in enumerate(layers) if isinstance(each, (SharingLayer, IndexLayer))}
        self.sources = {n: each.source for n, each in others.items()}  # whose keys such a layer attends to
        self.weights = None
        self.holes: list[Hole] = []  # of each row of the batch
        self.failure: str | None = None
        self.strided = False
        # Versions of the weights of models that filled the cache, or will.
        self._models: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        self._filling: Filling | None = None
        self._cut = 1  # over how many ranks tensor parallelism cut the model that filled the cache
        self._last = 0  # the layer of the last update

    def generating(
        self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], argument: str
    ) -> AbstractContextManager[dict[str, Any]]:
        """See :func:`.forward.generating`."""
        return forward.generating(model, args, kwargs, argument)

    def run(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """See :func:`.forward.forward`."""
        return forward.forward(model, args, kwargs)

    @property
    def weights(self) -> dict[str, str] | None:
        """Digests of weights of the model that filled the cache, by name."""
        return self._weights

    @weights.setter
    def weights(self, weights: dict[str, str] | None) -> None:
        self._weights, self._digest = weights, None if weights is None else digest_text(weights)

    @property
    def length(self) -> int:
        """Columns of the batch that the cache holds, on all ranks together."""
        return next(iter(self.sharded.values())).length

    def nbytes(self) -> int:
        """Return the bytes of keys, values, indexers' keys and states on this rank."""
        return sum(layer.nbytes() for layer in self._holding())

    def _holding(self) -> list[ShardedLayer | StateLayer]:
        """Return the layers that hold tensors."""
        return [*self.sharded.values(), *self.states.values()]

    @property
    def sent(self) -> int:
        """Payload bytes that this rank has sent in prefill and decoding, except those of FSDP2."""
        return self.transport.sent + self.prefill_sent + self.weights_sent

    def figures(self) -> list[dict[str, int]]:
        """Return ``cache_bytes`` and ``sent_bytes`` of every rank, by rank. Every rank must call it.

        ``sent_bytes`` counts the payload of prefill and decoding since the cache was made, except that of FSDP2.
        """
        own = {"cache_bytes": self.nbytes(), "sent_bytes": self.sent}
        return self.agreement.agree("figures", {}, own)

    def reset(self) -> None:
        """Forget all tokens, on this rank; call it on every rank."""
        super().reset()
        self.holes, self.failure, self._filling, self.strided = [], None, None, False
        self.weights = None  # the next model may have others
        self._models.clear()

    def __deepcopy__(self, memo: Any) -> ShardedCache:
        raise TypeError("a ShardedCache can't be copied, because it has messages of its group; use save and load")

    def save(self, folder: str | Path) -> None:
        """Write the cache to a folder that all ranks share. Every rank must call it.

        Raises:
            ValueError: the folder is not empty, or the cache is, or it failed before; on every rank.
        """
        path = Path(folder)
        with self.agreement.entering("save"):
            if self.failure is not None or not self.length:
                raise ValueError(f"the cache is empty or failed ({self.failure}); generate with it before you save it")
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise ValueError(f"folder={str(folder)!r} exists and is not empty; pass a new folder")
            if self._cut > 1:
                raise ValueError(
                    f"the cache was filled by a model cut over {self._cut} tensor-parallel ranks and can't be saved; "
                    "fill it by a model without tensor parallelism"
                )
        self.agreement.agree("save", self.describe())
        with self.agreement.entering("the end of save"):
            path.mkdir(parents=True, exist_ok=True)
            own = files.write_rank(path, self.transport.rank, self.layers)
        every = self.agreement.agree("the end of save", {}, own)
        with self.agreement.entering("the manifest of a cache"):
            if self.transport.rank == 0:
                content = {"model": self.model, "weights": self.weights, "length": self.length, "holes": self.holes}
                files.write_manifest(path, {**content, "files": every})
        self.agreement.agree("the manifest of a cache", {})

    @classmethod
    def load(
        cls,
        folder: str | Path,
        config: PreTrainedConfig,
        group: Any = None,
        *,
        timeout: float | timedelta | None = None,
        prefill_chunk: int | None = None,
    ) -> ShardedCache:
        """Read a cache that any number of ranks saved. Every rank must call it.

        Args:
            folder: where :meth:`save` wrote it.
            config, group, timeout, prefill_chunk: as for the class.

        Raises:
            ValueError: the folder is incomplete, truncated or altered, or holds another model's cache; on every rank.
        """
        cache, path = cls(config, group, timeout=timeout, prefill_chunk=prefill_chunk), Path(folder)
        rank, world = cache.transport.rank, cache.transport.world
        with cache.agreement.entering("load"):
            content = files.read_manifest(path)
            _check_same(content["model"], cache.model, f"folder={str(folder)!r}")
            files.check_files(path, content["files"][rank::world])
            cache.weights, cache.holes = content["weights"], [(first, stop) for first, stop in content["holes"]]
        cache.agreement.agree("load", {"the cache in the folder": digest_text(content)})
        with cache.agreement.entering("the end of load"):
            files.read_layers(path, content["files"], cache.layers, rank=rank, world=world)
            for layer in cache.sharded.values():
                layer.length = content["length"]
        cache.agreement.agree("the end of load", cache.describe())
        return cache

    def check(
        self,
        model: Any,
        base: Plan,
        weights: Callable[[], dict[str, str]],
        rows: Callable[[], dict[str, str]],
        *,
        argument: str,
        turn: bool,
    ) -> None:
        """Refuse a model over another group, of another configuration or with other weights.

        ``argument``: the keyword that passed the cache, for errors. ``turn``: sample the weights, and this rank's
        ``rows`` of shared ones.
        """
        if self.failure is not None:
            raise ValueError(f"{argument} failed before ({self.failure}); make a new ShardedCache")
        text = model.config.get_text_config(decoder=True)
        _check_same(self.model, describe_model(text, _layers_of(text)), argument)
        if self.transport.group is not base.group:
            raise ValueError(
                f"{argument} covers {self.transport.world} ranks, the model {base.world}, or another group; "
                "make ShardedCache with the group of hf.parallelize"
            )
        if self.prefill_chunk is not None and base.layout.startswith("striped"):
            raise ValueError(
                f"prefill_chunk={self.prefill_chunk} can't be combined with layout={base.layout!r} of hf.parallelize; "
                "use strategy=None, or make ShardedCache without prefill_chunk"
            )
        cut = axis.ranks_of(model)
        if not self.length:  # no keys depend on any weights
            self.weights, self._cut = None, cut
            self._models.clear()
        if cut != self._cut:
            raise ValueError(
                f"{argument} was filled by a model whose weights were cut over {self._cut} ranks, this one's are "
                f"cut over {cut}; make a new ShardedCache"
            )
        # How often each weight was written to; one that was made in inference mode has no count.
        versions: dict[str, Any] = {name: p._version for name, p in model.named_parameters() if not p.is_inference()}
        if turn or model not in self._models:
            versions |= {f"a row of {name}": digest for name, digest in rows().items()}
        before = self._models.get(model, versions)
        changed = [name for name in versions if before.get(name) != versions[name]]
        if changed:
            raise ValueError(
                f"{argument} holds keys of other weights: {min(changed)} of the model was changed since it filled "
                "the cache; call its reset() on every rank, or make ShardedCache(model.config)"
            )
        if turn or model not in self._models:  # a sample finds writes to ``.data``, which no version counts
            current, earlier = weights(), self.weights or {}
            other = [name for name in current.keys() & earlier.keys() if current[name] != earlier[name]]
            if other:
                raise ValueError(
                    f"{argument} is the cache of another model: its weights differ ({min(other)}); make "
                    "ShardedCache(model.config)"
                )
            self.weights = {**current, **earlier}  # sharded weights are unknown, so the names may differ
            self._models[model] = versions

    def move(self, device: torch.device) -> None:
        """Move what this rank holds to a device; :meth:`load` reads to the CPU."""
        for layer in self._holding():
            layer.move(device)

    def check_batch(self, padding: Tensor, argument: str) -> None:
        """Refuse rows other than those of earlier calls, and padding before a state."""
        if self.states and padding.any():
            raise ValueError(
                f"attention_mask has {padding.tolist()} columns of padding in front of rows, but layer "
                f"{min(self.states)} of the model is recurrent, and its state can't skip them; generate with rows of "
                "equal lengths, or with each row alone"
            )
        indexed = ((n, layer) for n, layer in self.sharded.items() if isinstance(layer, IndexedLayer))
        counted = [(n, "pools" if layer.pool else "blocks") for n, layer in indexed if layer.pool or layer.blocks]
        if counted and padding.any():
            raise ValueError(
                f"attention_mask has {padding.tolist()} columns of padding in front of rows, but the indexer of layer "
                f"{counted[0][0]} counts {counted[0][1]} from the start of a row; generate with rows of equal lengths, "
                "or with each row alone"
            )
        if self.length and [stop - start for start, stop in self.holes] != padding.tolist():
            raise ValueError(
                f"{argument} holds {len(self.holes)} rows with {[b - a for a, b in self.holes]} columns of "
                f"padding in front, but the call has {padding.tolist()}; a cache continues the rows that it began with"
            )

    def open_lines(self) -> None:
        """Connect the ranks of a host by lines, which steps of few tokens use. Every rank must call it."""
        health = self.transport.health
        if health.lines is None and isinstance(self.group, dist.ProcessGroup):
            health.lines = open_lines(self.agreement)

    def describe(self) -> dict[str, Any]:
        """Return what must be equal on all ranks before a call."""
        return {
            "tokens in the cache": self.length,
            "weights of the cache's model": self._digest,
            "prefill_chunk": self.prefill_chunk,
        }

    def stretches(self) -> dict[Reach, list[list[range]]]:
        """Return the slots of every rank's keys, by reach and by rank. Every rank must call it."""
        layers = {layer.reach: layer for layer in self.sharded.values()}  # layers that see the same hold the same slots
        own = [layer.held.stretches() for layer in layers.values()]
        every = self.agreement.collect("the keys of the cache", own)
        return {
            reach: [[range(*r) for r in of_rank[number]] for of_rank in every] for number, reach in enumerate(layers)
        }

    @contextmanager
    def prefilling(self, plan: Plan, padding: Tensor, stop: int) -> Iterator[None]:
        """Store the shards that the model computes inside this context; a prompt has ``stop`` columns."""
        first, before = self.length, plan.transport.sent
        if not first:
            self.holes = [(stop - n, stop) if n else NO_HOLE for n in padding.tolist()]
            self.strided = any(step > 1 for step in plan.schedule.layout.strides)
        with self._fill(Filling(plan, plan.positions.numpy(), first, first + plan.seqlen)):
            yield
        self.prefill_sent += plan.transport.sent - before

    def stepping(self, count: int, padding: Tensor) -> AbstractContextManager[Step]:
        """Take ``count`` tokens that every rank computes inside this context, each rank its own pages of them."""
        first, stop = self.length, self.length + count
        if not first:  # without a prefill, padding stays in front
            self.holes = [(0, n) for n in padding.tolist()]
        own = own_slots(first, stop, self.transport.rank, self.transport.world)
        filling = Filling(None, own, first, stop)
        return self._fill(filling, Step(self._attend, self._choose, first, stop, lambda: filling.attends))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take this rank's part of a layer's new keys and values; return what its queries attend to."""
        now, layer = self._filling, self.sharded[layer_idx]
        if now is None:
            return layer.update(key_states, value_states)
        if isinstance(layer, IndexedLayer):
            layer.filling = now
        if now.plan is None:
            layer.append(key_states, value_states, now.slots, now.first)
            self._last, now.attends = layer_idx, True
            # Latent attention can't expand zero tokens. No query sees the keys that a rank without any returns.
            found = layer.tokens() if len(layer.held) else (key_states, value_states)
            now.keys[layer_idx] = found[0]
            return found
        slots = now.slots if now.order is None else now.slots[now.order]
        layer.store(now.own(key_states), now.own(value_states), slots)
        if now.first:
            return layer.tokens()
        layer.forget(self.holes, now.stop, least=1)
        self._last = layer_idx
        return key_states, value_states

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Take this rank's part of an indexer's new keys [B, n, D]; return those that its queries choose among."""
        layer = self.sharded[layer_idx]
        if not isinstance(layer, IndexedLayer):
            raise ValueError(f"layer {layer_idx} has an indexer, but its configuration says otherwise; correct it")
        if isinstance(layer, IndexLayer):
            layer.filling = self._filling
        self._last = layer_idx
        return layer.update_indexer(indexer_key_states)

    @contextmanager
    def _fill(self, filling: Filling, step: Any = None) -> Iterator[Any]:
        self._filling = filling
        try:
            yield step
        except BaseException as error:
            self.failure = f"{type(error).__name__} while {filling.stop - filling.first} tokens were computed"
            raise
        finally:
            self._filling = None
        for layer in self.sharded.values():
            if isinstance(layer, IndexedLayer):
                layer.filling = None
            layer.length = filling.stop
            layer.forget(self.holes, filling.stop)

    def _attend(
        self,
        q: Tensor,
        key: Tensor,
        value: Tensor,
        number: int | None,
        reach: Reach | Any,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        indices: Tensor | None = None,
        up: Tensor | None = None,
    ) -> Tensor:
        """Compute a layer's attention of the tokens of this step: [B, Hq, n, Dv]."""
        now, number = self._filling, self._last if number is None else number
        assert now is not None
        now.attends = False
        source = self.sources.get(number)
        if source is None and number != self._last:
            raise ValueError(
                f"layer {number} attends, but layer {self._last} was updated last; such models are refused"
            )
        # Latents are made into keys on the way here.
        if source is not None and indices is None and key is not now.keys.get(source):
            raise ValueError(
                f"layer {number} attends to other keys than those of layer {source}; such models are refused"
            )
        layer = self.sharded[number if source is None else source]
        if reach is not UNSTATED and reach != layer.reach:
            raise ValueError(
                f"layer {number} asks for {shown_reach(reach)}, but its configuration says "
                f"{shown_reach(layer.reach)}; correct the configuration"
            )
        held = len(layer.held)
        if key.shape[2] != (held or q.shape[2]):
            raise ValueError(
                f"layer {number} attends to {key.shape[2]} keys, but the cache returned {held}; such models are refused"
            )
        seen, label = self._seen(layer, now), f"decoding, token {now.stop - 1}, layer {number}"
        how: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks, "up": up, "label": label}
        if isinstance(layer, IndexedLayer) != (indices is not None):
            raise ValueError(f"layer {number} attends to other keys than its configuration says; correct it")
        chosen = None if indices is None else rows_held(indices, self._places(layer, now, q.device))
        return attend_dealt(q, key, value, seen, self.transport, among=chosen, **how)

    def _choose(self, q: Tensor, keys: Tensor, weights: Tensor | None, **how: Any) -> Tensor:
        """Choose keys for the tokens of this step: columns of the cache, [B, n, count]; for blocks [B, H, n, count]."""
        now, layer = self._filling, self.sharded[self._last]
        assert now is not None
        held = len(layer.held)
        if keys.shape[2] != (held or q.shape[2]):
            raise ValueError(
                f"the indexer of layer {self._last} chooses among {keys.shape[2]} keys, but the cache returned {held}; "
                "such models are refused"
            )
        how |= {"first": now.first, "label": f"choosing, token {now.stop - 1}, layer {self._last}"}
        places, seen = self._places(layer, now, q.device), self._seen(layer, now)
        return choose_dealt(q, keys, weights, places, seen, self.transport, **how)

    def _seen(self, layer: ShardedLayer, now: Filling) -> list[Seen]:
        """Return which of a layer's keys the tokens of this step see."""
        if layer.reach not in now.seen:
            now.seen[layer.reach] = seen_keys(layer.held, range(now.first, now.stop), layer.reach, self.holes)
        return now.seen[layer.reach]

    def _places(self, layer: ShardedLayer, now: Filling, device: torch.device) -> Tensor:
        """Return the columns of the cache that a layer's keys are of, int64 [held]."""
        if layer.reach not in now.places:
            now.places[layer.reach] = torch.from_numpy(layer.held.slots()).to(device, non_blocking=True)
        return now.places[layer.reach]


def _check_same(cached: dict[str, Any], model: dict[str, Any], argument: str) -> None:
    for name, value in cached.items():
        if model.get(name) != value:
            raise ValueError(
                f"{argument} is the cache of another model: {name} was {value}, this model has {model.get(name)}; "
                "make ShardedCache(model.config), or pass the configuration of the model that filled the cache"
            )


def _check_chunk(chunk: Any, world: int) -> int | None:
    """Return ``prefill_chunk`` after its checks."""
    least = max(forward.SHORT, 2 * world)  # equal pieces of a longer call then have a token for each rank
    if chunk is None:
        return None
    if isinstance(chunk, bool) or not isinstance(chunk, int):
        raise TypeError(f"prefill_chunk={chunk!r} must be an int, or None")
    if chunk < least:
        raise ValueError(
            f"prefill_chunk={chunk} must be at least {least} tokens over {world} ranks; pass more, or None"
        )
    return chunk


def _layers_of(config: Any) -> list[Layer]:
    """Return an empty layer for each layer of a configuration."""
    for attribute, listed in known.layer_lists(config):
        for kind in listed:
            if kind not in _KINDS:
                raise ValueError(
                    f"{attribute} of the configuration has {kind!r}, which has no cache over ranks; {ON_ONE_RANK}"
                )
        if listed and not any(known.LAYERS[kind] == "attention" for kind in listed):
            raise ValueError(
                f"{attribute} of the configuration has no attention, so its states have a fixed size and need no "
                f"cache over ranks; {ON_ONE_RANK}"
            )
    if getattr(config, "number_of_conv_states", 1) != 1:
        raise ValueError(
            f"number_of_conv_states={config.number_of_conv_states} of the configuration: a cache over ranks holds one "
            f"state per layer; {ON_ONE_RANK}"
        )
    kinds = getattr(config, "layer_types", None) or _KINDS[:1] * config.num_hidden_layers
    pool = getattr(config, "index_kpool", None) or 0
    reaches = layer_windows(config)
    sources = sources_of(config, reaches)
    fixed: dict[str, Callable[[], Layer]] = {"state": StateLayer, "nothing": EmptyLayer}
    layers: list[Layer] = []
    for number, (kind, reach) in enumerate(zip(kinds, reaches, strict=True)):
        source = sources.get(number)
        if source is not None:
            owner, chooses = layers[source], kind in _INDEXED and config.indexer_types[number] != "shared"
            assert isinstance(owner, ShardedLayer)
            layers.append(IndexLayer(source, owner) if chooses else SharingLayer(source))
        elif kind in _INDEXED:
            layers.append(IndexedLayer(blocks=kind == known.BLOCKS, pool=pool))
        else:
            layers.append(fixed.get(known.LAYERS[kind], lambda reach=reach: ShardedLayer(reach))())
    return layers


def describe_model(config: Any, layers: Sequence[Layer]) -> dict[str, Any]:
    """Return what a cache remembers of its model: JSON types, by name."""
    every = {name: by_layer(config, name) for name in (*_SIZES, *_CHOICE)}
    sizes = {name: values[0] if len(values) == 1 else values for name, values in every.items()}
    rope = repr(sorted((getattr(config, "rope_parameters", None) or {}).items(), key=str))
    return {**sizes, "layers see": [layer.sees for layer in layers], "rope_parameters": rope}
