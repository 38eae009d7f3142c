"""``burst generate``: continue a prompt that may be too long for one device."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from ..launch import local as launch
from .flags import (
    NUMBERS,
    Count,
    DeviceOrAuto,
    Name,
    NonNegative,
    NonNegativeInt,
    Ranks,
    Seconds,
    check_settings,
    number,
    require,
    whole,
)

COMMAND = "burst generate"
TOKENS = "tokens.json"  # in a saved cache's folder: the ids of its text, and their digest
_SAVED = "pass a folder that --save-cache wrote"
_Chunk = Annotated[int, whole(64)]
_TopP = Annotated[float, number(lambda value: 0 < value <= 1, "must be above 0 and at most 1")]


@dataclass(frozen=True, kw_only=True)
class GenerateArguments:
    """Continue a prompt with a Hugging Face model. Each rank holds a part of the prompt's keys and values.

    The text goes to standard output, figures go to standard error. Without torchrun, it launches local workers.
    """

    model: Name
    """The folder or hub name of a model with its tokenizer, such as OUT/model of `burst train`."""
    prompt: str
    """A text file; - reads standard input (not under torchrun)."""
    ranks: Ranks | None = None
    """Number of local workers. Default: one per GPU, or one per core without GPUs."""
    prefill_chunk: _Chunk | None = None
    """Compute at most this many tokens of the prompt at once, over all ranks. Bounds memory. Default: all."""
    max_new_tokens: Count = 200
    temperature: NonNegative = 0.0
    """0 takes the most likely token; above 0 samples."""
    top_p: _TopP = 1.0
    """Sample from the most likely tokens with this total probability. Needs --temperature."""
    seed: NonNegativeInt = 0
    """Seed of the sampling, the same on all ranks."""
    chat: bool = False
    """Wrap the prompt in the tokenizer's chat template. Not with --load-cache."""
    save_cache: Path | None = None
    """Write the cache to this new folder at the end."""
    load_cache: Path | None = None
    """Continue a saved cache: its text precedes the prompt. Any number of ranks can load it."""
    json: bool = False
    """Print one JSON object with text and figures in place of the text."""
    shard_weights: bool = False
    """Share the weights over the ranks, for a model too large for one. Each computes its part of every layer."""
    device: DeviceOrAuto = "auto"
    timeout: Seconds = 600.0
    """Seconds before a pending exchange counts as failed."""
    text: str = field(default="", init=False)  # of the prompt
    earlier: tuple[int, ...] = field(default=(), init=False)  # ids of the loaded cache's text

    def check(self) -> None:
        """Raise ValueError if a flag's value is invalid."""
        check_settings(self)
        self._check_folder()
        require(bool(self.text), "prompt", self.prompt, "is empty; pass a file with text")
        enough = self.prefill_chunk is None or self.prefill_chunk >= 2 * (self.ranks or 1)
        require(enough, "prefill_chunk", self.prefill_chunk, f"must be at least twice --ranks {self.ranks}")
        require(self.top_p == 1 or self.temperature > 0, "top_p", self.top_p, "needs sampling; add --temperature 1")
        if self.load_cache is not None:
            require((self.load_cache / TOKENS).is_file(), "load_cache", self.load_cache, f"has no {TOKENS}; {_SAVED}")
            if self.chat:
                raise ValueError("--chat would begin a second conversation behind --load-cache; leave --chat out")
            object.__setattr__(self, "earlier", _read_tokens(self.load_cache))
        taken = self.save_cache is not None and self.save_cache.exists()
        require(not taken, "save_cache", self.save_cache, "exists; pass a new folder")
        self._check_length()

    def _check_folder(self) -> None:
        """Raise ValueError if ``model`` is a path without a model; other names may be on the hub."""
        folder = Path(self.model)
        if folder.is_dir():
            whole = (folder / "config.json").is_file()
            require(whole, "model", self.model, "has no config.json; pass a model's folder or its hub name")
        elif self.model.startswith((".", "/", "~")) or folder.exists():
            raise ValueError(f"--model {self.model}: there is no such folder; pass a model's folder or its hub name")

    def _check_length(self) -> None:
        """Raise ValueError if the text and the new tokens have more positions than the model."""
        from transformers import AutoConfig, AutoTokenizer

        try:
            config = AutoConfig.from_pretrained(self.model)
            count = len(_ids(AutoTokenizer.from_pretrained(self.model), self))
        except Exception as error:  # whatever transformers raises for a broken folder
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ValueError(f"--model {self.model}: its configuration or tokenizer can't be loaded: {first}") from None
        if _kind_of(config) is None:
            raise ValueError(f"--model {self.model}: {config.model_type!r} continues no text; pass a language model")
        most = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
        if most is not None:
            rule = f"is too many: the text's {count:,} tokens and these exceed the model's {most:,} positions; lower it"
            fits = count + self.max_new_tokens - 1 <= most  # nothing follows the last token
            require(fits, "max_new_tokens", self.max_new_tokens, rule)


def _kind_of(config: Any) -> Any:
    """Return the auto class that builds a model of text; many that also see images have no causal one."""
    import transformers

    kinds = {
        transformers.AutoModelForCausalLM: transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.AutoModelForImageTextToText: transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    }
    return next((kind for kind, known in kinds.items() if type(config) in known), None)


@dataclass
class _Streamer:
    """Prints text as it comes, on rank 0, and notes when tokens came."""

    tokenizer: Any
    prints: bool
    times: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    shown: str = ""

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt first, then one new token at a time."""
        self.times.append(time.perf_counter())
        if len(self.times) == 1:
            return
        self.ids += value.flatten().tolist()
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        if self.prints and not text.endswith("\N{REPLACEMENT CHARACTER}"):  # a character may need several tokens
            sys.stdout.write(text[len(self.shown) :])
            sys.stdout.flush()
            self.shown = text

    def end(self) -> None:
        """End the line."""
        if self.prints:
            sys.stdout.write("\n")


def main(arguments: list[str]) -> int:
    """Run ``burst generate``; return the exit status: 0, 1 after a failure, 2 for invalid arguments."""
    parsed = tyro.cli(GenerateArguments, prog=COMMAND, args=arguments, registry=NUMBERS)
    if parsed.prompt == "-" and launch.started_by_torchrun():
        shared = ValueError("--prompt -: torchrun's ranks share one standard input; pass a file")
        return launch.print_error(COMMAND, shared)
    try:
        text = sys.stdin.read() if parsed.prompt == "-" else Path(parsed.prompt).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return launch.print_error(COMMAND, ValueError(f"--prompt {parsed.prompt} can't be read: {error}"))
    object.__setattr__(parsed, "text", text)
    return launch.start_checked(COMMAND, _generate, parsed)


def _generate(arguments: GenerateArguments) -> None:
    from transformers import AutoConfig, AutoTokenizer
    from transformers.utils import logging

    from ..inference import ShardedCache, shard_weights
    from ..integrations import hf
    from ..integrations.hf.untouched import reason_of
    from ..launch.join import join

    # Every rank would show a bar. Its lock is a semaphore, which a rank that Ctrl-C ends would leave behind.
    logging.disable_progress_bar()
    with join(device=arguments.device, timeout=arguments.timeout) as context:
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        kind = _kind_of(AutoConfig.from_pretrained(arguments.model))
        model = kind.from_pretrained(arguments.model, dtype="auto").eval()
        if (reason := reason_of(model)) is not None:  # also on one rank: the cache of this command is over ranks
            raise launch.RefusedError(f"--model {arguments.model}: {reason}; call model.generate of transformers")
        if not arguments.shard_weights:
            model = model.to(context.device)
        hf.parallelize(model, context.everyone, timeout=arguments.timeout)
        if arguments.shard_weights:
            try:
                shard_weights(model, context.everyone)
            except ValueError as error:  # on every rank
                raise launch.RefusedError(f"--shard-weights: {error}") from None
        options: dict[str, Any] = {"timeout": arguments.timeout, "prefill_chunk": arguments.prefill_chunk}
        if arguments.load_cache is None:
            cache = ShardedCache(model.config, context.everyone, **options)
        else:
            cache = ShardedCache.load(arguments.load_cache, model.config, context.everyone, **options)
            if cache.length + 1 != len(arguments.earlier):  # the last token was not computed on
                raise ValueError(
                    f"--load-cache {arguments.load_cache}: {TOKENS} has {len(arguments.earlier)} tokens, and the cache "
                    f"{cache.length}; {_SAVED}"
                )
        ids = torch.tensor([_ids(tokenizer, arguments)], device=context.device)
        first = context.rank == 0
        if first:
            sys.stderr.write(f"{ids.shape[1]:,} tokens over {context.world} ranks, {cache.length:,} from a cache\n")
        streamer = _Streamer(tokenizer, prints=first and not arguments.json)
        torch.manual_seed(arguments.seed)
        sampling: dict[str, Any] = {"do_sample": False}
        if arguments.temperature:
            sampling = {"do_sample": True, "temperature": arguments.temperature, "top_p": arguments.top_p, "top_k": 0}
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),  # the text may hold the padding token
            cache=cache,
            max_new_tokens=arguments.max_new_tokens,
            streamer=streamer,
            **sampling,
        )
        if arguments.save_cache is not None:
            cache.save(arguments.save_cache)
            if first:
                written = out[0].tolist()
                text = {"ids": written, "digest": _digest(arguments.save_cache, written)}
                (arguments.save_cache / TOKENS).write_text(json.dumps(text))
        of_ranks = cache.figures()
        if first:
            _report(arguments, streamer, ids.shape[1], of_ranks)


def _ids(tokenizer: Any, arguments: GenerateArguments) -> list[int]:
    """Return the ids of the whole text: that of a loaded cache, then the prompt."""
    if arguments.chat:
        turn = [{"role": "user", "content": arguments.text}]
        new = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
    else:
        new = tokenizer(arguments.text, add_special_tokens=arguments.load_cache is None)["input_ids"]
    return [*arguments.earlier, *new]


def _read_tokens(folder: Path) -> tuple[int, ...]:
    """Return the ids of a saved cache's text. Raise ValueError if they are not that text's."""
    try:
        held = json.loads((folder / TOKENS).read_text("utf-8"))
        if isinstance(held, list):
            raise ValueError(f"--load-cache {folder} is of an earlier version; save it again by --save-cache")
        if held["digest"] == _digest(folder, held["ids"]):
            return tuple(held["ids"])
    except OSError as error:
        raise ValueError(f"--load-cache {folder} can't be read: {error}") from None
    except (json.JSONDecodeError, KeyError, TypeError):
        pass
    raise ValueError(f"--load-cache {folder}: {TOKENS} was altered, or is of another cache; {_SAVED}")


def _digest(folder: Path, ids: list[int]) -> str:
    """Return a digest of a text and of the cache's manifest, which has the digests of its keys and values."""
    from ..inference.files import MANIFEST

    content = json.dumps(ids).encode() + (folder / MANIFEST).read_bytes()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _report(arguments: GenerateArguments, streamer: _Streamer, prompt: int, of_ranks: list[dict[str, int]]) -> None:
    times, count = streamer.times, len(streamer.ids)
    rate = (count - 1) / (times[-1] - times[1]) if count > 1 else None
    by_rank = {name: [each[name] for each in of_ranks] for name in of_ranks[0]}
    figures = {
        "prompt_tokens": prompt,
        "new_tokens": count,
        "seconds_to_first_token": times[1] - times[0],
        "tokens_per_second": rate,
        **by_rank,
    }
    if arguments.json:
        text = streamer.tokenizer.decode(streamer.ids, skip_special_tokens=True)
        sys.stdout.write(json.dumps({"text": text, **figures}) + "\n")
        return
    sys.stderr.write(f"first token after {times[1] - times[0]:.2f} s, then {rate or 0:.1f} tokens/s\n")
    for name, values in by_rank.items():
        sys.stderr.write(f"{name.replace('_', ' ')} per rank: {', '.join(f'{each:,}' for each in values)}\n")
