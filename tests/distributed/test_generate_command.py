"""The command ``burst generate``: text, figures, saved caches, errors."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BloomConfig,
    BloomForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
)

from burst_attention.cli.generate import GenerateArguments, _digest, _read_tokens, main
from tests.support.hybrid_models import make_hybrid
from tests.support.indexed_models import make_indexed
from tests.support.processes import is_alive, workers_of
from tests.support.vision_models import IMAGE, build

TEXT = "A prompt that the ranks share. " * 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model whose tokens are bytes."""
    path = tmp_path_factory.mktemp("model")
    alphabet = ["<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={each: n for n, each in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(path)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    none = dict.fromkeys(("eos_token_id", "bos_token_id"))
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=257, pad_token_id=0, **sizes, **none)).save_pretrained(path)
    (path / "prompt.txt").write_text(TEXT)
    return path


def rank_of_torchrun(words):
    """Run the command as one of torchrun's ranks; return its exit status and what it printed."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    started = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    started |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}  # not read: the pool has a process group
    with mock.patch.dict(os.environ, started), redirect_stdout(io.StringIO()) as out, redirect_stderr(out):
        try:
            return main(words), out.getvalue()
        except ValueError as error:  # torchrun gets it
            return 1, str(error)


def burst(*words, ranks):
    """Run the command in a pool; return the exit status of rank 0 and what it printed."""
    return ranks.run(rank_of_torchrun, ["--device", "cpu", *map(str, words)])[0]


def flat(text):
    return " ".join(text.split())


def expected_text(folder, ids, count, kind=AutoModelForCausalLM):
    model = kind.from_pretrained(folder)
    out = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)[0, len(ids) :]
    return out.tolist()


def test_a_text_is_continued_and_continued_again(pools, folder):
    tokenizer, cache, more = PreTrainedTokenizerFast.from_pretrained(folder), folder / "cache", folder / "more.txt"
    more.write_text("More.")
    options = ("--max-new-tokens", 8, "--prefill-chunk", 64)  # the prompt has three such pieces
    prompt = ("--model", folder, "--prompt", folder / "prompt.txt")
    status, said = burst(*prompt, *options, "--save-cache", cache, ranks=pools(2))
    assert status == 0, said
    ids = tokenizer(TEXT)["input_ids"]
    new = expected_text(folder, ids, 8)
    assert json.loads((cache / "tokens.json").read_text())["ids"] == [*ids, *new]
    assert tokenizer.decode(new, skip_special_tokens=True).strip("\n \N{REPLACEMENT CHARACTER}") in said
    for figure in ("first token after", "tokens/s", "cache bytes per rank", "sent bytes per rank"):
        assert figure in said
    options = ("--max-new-tokens", 5, "--load-cache", cache, "--json", "--shard-weights")
    again = ("--model", folder, "--prompt", more, *options)
    status, said = burst(*again, ranks=pools(3))
    assert status == 0, said
    said = json.loads(said.splitlines()[-1])
    whole = [*ids, *new, *tokenizer("More.")["input_ids"]]
    assert said["text"] == tokenizer.decode(expected_text(folder, whole, 5), skip_special_tokens=True)
    assert said["prompt_tokens"] == len(whole) and said["new_tokens"] == 5 and len(said["cache_bytes"]) == 3
    held = json.loads((cache / "tokens.json").read_text())
    for content, status, text in (
        (held | {"ids": [7, *held["ids"][1:]]}, 2, "tokens.json was altered"),
        (held["ids"], 2, "is of an earlier version; save it again"),
        ({"ids": [7], "digest": _digest(cache, [7])}, 1, "tokens.json has 1 tokens, and the cache"),
    ):
        (cache / "tokens.json").write_text(json.dumps(content))
        found, said = burst(*again, ranks=pools(3))
        assert found == status and text in flat(said), said
    (cache / "tokens.json").write_text(json.dumps(held))
    found, said = burst(*again, "--chat", ranks=pools(3))
    assert found == 2 and "would begin a second conversation" in flat(said)
    shutil.copytree(cache, folder / "other")
    (folder / "other" / "cache.json").write_text("of another cache")
    with pytest.raises(ValueError, match="was altered, or is of another cache"):
        _read_tokens(folder / "other")


def test_ranks_of_torchrun_share_no_standard_input(monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    assert main(["--model", "absent", "--prompt", "-"]) == 2
    assert "torchrun's ranks share one standard input; pass a file" in " ".join(capsys.readouterr().err.split())


def test_a_name_on_the_hub_is_taken_as_training_takes_it(monkeypatch, tmp_path, folder, capsys):
    """The hub's cache stands in for the hub."""
    snapshot = tmp_path / "models--who--tiny" / "snapshots" / "0123"
    shutil.copytree(folder, snapshot)
    (tmp_path / "models--who--tiny" / "refs").mkdir()
    (tmp_path / "models--who--tiny" / "refs" / "main").write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    asked = GenerateArguments(model="who/tiny", prompt="-", max_new_tokens=5)
    object.__setattr__(asked, "text", "some text")
    asked.check()
    assert AutoModelForCausalLM.from_pretrained("who/tiny").config.vocab_size == 257
    for name, text in (
        ("who/other", "--model who/other: its configuration or tokenizer can't be loaded: "),
        (str(tmp_path / "none"), "there is no such folder; pass a model's folder or its hub name"),
        (str(tmp_path), "has no config.json; pass a model's folder or its hub name"),
    ):
        assert main(["--model", name, "--prompt", str(folder / "prompt.txt")]) == 2
        assert text in flat(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--prompt", "absent.txt"), "absent.txt can't be read"),
        (("--prompt", "-"), "--prompt - is empty"),
        (
            ("--prompt", "-", "--load-cache", "absent"),
            "--load-cache absent has no tokens.json; pass a folder that --save-cache wrote",
        ),
        (("--prompt", "-", "--top-p", "0"), "--top-p 0.0 must be above 0"),
        (("--prompt", "-", "--top-p", "0.9"), "--top-p 0.9 needs sampling; add --temperature 1"),
        (("--prompt", "-", "--prefill-chunk", "63"), "--prefill-chunk 63 must be at least 64"),
        (("--prompt", "-", "--prefill-chunk", "64", "--ranks", "33"), "must be at least twice --ranks 33"),
        (
            ("--prompt", "-", "--max-new-tokens", "2100"),
            "--max-new-tokens 2100 is too many: the text's 9 tokens and these exceed the model's 2,048 positions",
        ),
    ],
)
def test_wrong_arguments_are_named(monkeypatch, capsys, folder, words, text):
    monkeypatch.setattr("sys.stdin", io.StringIO("" if "empty" in text else "some text"))
    assert main(["--model", str(folder), *words]) == 2
    assert text in flat(capsys.readouterr().err)


def test_a_model_that_can_not_run_on_shards_is_sent_to_transformers(pools, folder, tmp_path):
    bloom = tmp_path / "bloom"
    shutil.copytree(folder, bloom)
    BloomForCausalLM(BloomConfig(vocab_size=257, hidden_size=32, n_head=4, n_layer=1)).save_pretrained(bloom)
    status, printed = burst("--model", bloom, "--prompt", folder / "prompt.txt", ranks=pools(1))
    assert status == 1
    assert "(BloomAttention) adds biases by distance" in printed
    assert "; call model.generate of transformers" in printed and "on one rank" not in printed


def test_a_chat_template_is_applied_and_a_hybrid_model_continues(pools, folder):
    """Qwen3.5: three layers in four are recurrent."""
    tokenizer, path, cache = PreTrainedTokenizerFast.from_pretrained(folder), folder / "hybrid", folder / "hybrid-cache"
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>"
    tokenizer.save_pretrained(path)
    sizes = {"vocab_size": 257, "pad_token_id": 0, "num_hidden_layers": 4, "eos_token_id": None}
    hybrid = make_hybrid("qwen3_5", double=False, layer_types=None, **sizes)
    hybrid.config.use_cache = hybrid.generation_config.use_cache = True
    hybrid.save_pretrained(path)
    ids = tokenizer(f"<user>{TEXT}<answer>")["input_ids"]
    options = ("--max-new-tokens", 8, "--prefill-chunk", 64, "--chat", "--save-cache", cache)
    status, said = burst("--model", path, "--prompt", folder / "prompt.txt", *options, ranks=pools(2))
    assert status == 0, said
    assert json.loads((cache / "tokens.json").read_text())["ids"] == [*ids, *expected_text(path, ids, 8)]


@pytest.mark.parametrize("family", ["glm_moe_dsa", pytest.param("minimax_m3_vl", marks=pytest.mark.long)])
def test_a_model_whose_indexer_chooses_keys_is_continued(pools, folder, tmp_path, family):
    tokenizer, path, more = PreTrainedTokenizerFast.from_pretrained(folder), tmp_path / "model", tmp_path / "more.txt"
    tokenizer.save_pretrained(path)
    more.write_text("More.")
    indexed = make_indexed(family, stock=True, vocab_size=257, pad_token_id=0, eos_token_id=None)
    indexed.config.use_cache = indexed.generation_config.use_cache = True
    indexed.float().save_pretrained(path)
    whole, first, second = [], tmp_path / "first", tmp_path / "second"
    for prompt, ranks, *caches in (
        (folder / "prompt.txt", 2, "--save-cache", first),
        (more, 3, "--load-cache", first, "--save-cache", second),
    ):
        words = ("--model", path, "--prompt", prompt, "--max-new-tokens", 8, *caches)
        status, said = burst(*words, ranks=pools(ranks))
        assert status == 0, said
        whole += tokenizer(prompt.read_text())["input_ids"]
        whole += expected_text(path, whole, 8)
        assert json.loads((caches[-1] / "tokens.json").read_text())["ids"] == whole


def test_a_model_that_also_sees_images_continues_text(pools, folder, tmp_path):
    """transformers has no causal class for it."""
    path, cache, prompt = tmp_path / "model", tmp_path / "cache", tmp_path / "prompt.txt"
    prompt.write_text(TEXT.replace(" ", "_"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.model = models.BPE(vocab={chr(33 + n): n for n in range(IMAGE)}, merges=[])  # none is an image's
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    tokenizer.save_pretrained(path)
    seeing = build("mistral3", torch.float32, max_position_embeddings=256)
    seeing.get_output_embeddings().weight.data[IMAGE:] = 0
    seeing.save_pretrained(path)
    words = ("--model", path, "--prompt", prompt, "--max-new-tokens", 8, "--save-cache", cache)
    status, said = burst(*words, ranks=pools(2))
    assert status == 0, said
    ids = tokenizer(prompt.read_text())["input_ids"]
    expected = expected_text(path, ids, 8, AutoModelForImageTextToText)
    assert json.loads((cache / "tokens.json").read_text())["ids"] == [*ids, *expected]
    words = ("--model", path, "--prompt", prompt, "--max-new-tokens", 2, "--shard-weights")
    status, said = burst(*words, ranks=pools(2))
    assert status == 1 and "--shard-weights: " in flat(said) and "can't be sharded" in flat(said)


def test_a_model_that_continues_no_text_is_refused(folder, tmp_path, capsys):
    T5Config().save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path)
    assert main(["--model", str(tmp_path), "--prompt", str(folder / "prompt.txt")]) == 2
    assert "'t5' continues no text; pass a language model" in flat(capsys.readouterr().err)


@pytest.mark.long
def test_control_c_leaves_no_process_and_no_semaphore(folder):
    options = ("--ranks", "2", "--max-new-tokens", "1800", "--prompt", str(folder / "prompt.txt"))
    command = [sys.executable, "-m", "burst_attention.cli", "generate", "--device", "cpu", "--model", str(folder)]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(1), process.stderr.read()  # it writes text
        workers = workers_of(process.pid)
        assert len(workers) == 2
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 130 and b"Traceback" not in said and b"leaked" not in said, said
    deadline = time.monotonic() + 5
    while any(map(is_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, workers))
