"""The command ``burst generate``: text, figures, saved caches, errors."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from burst_attention.cli.generate import _digest, _read_tokens, main
from tests.support.hybrid_models import make_hybrid
from tests.support.processes import is_alive, workers_of

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


def burst(*words, text=None):
    command = [sys.executable, "-m", "burst_attention.cli", "generate", "--device", "cpu", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, input=text)


def expected_text(folder, ids, count):
    model = AutoModelForCausalLM.from_pretrained(folder)
    out = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)[0, len(ids) :]
    return out.tolist()


@pytest.mark.long
def test_a_text_is_continued_and_continued_again(folder):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    cache = folder / "cache"
    prompt = ("--model", folder, "--prompt", folder / "prompt.txt")
    options = ("--max-new-tokens", 8, "--prefill-chunk", 64)  # the prompt has three such pieces
    done = burst(*prompt, "--ranks", 2, *options, "--save-cache", cache)
    assert done.returncode == 0, done.stderr
    ids = tokenizer(TEXT)["input_ids"]
    new = expected_text(folder, ids, 8)
    assert json.loads((cache / "tokens.json").read_text())["ids"] == [*ids, *new]
    assert done.stdout.strip() == tokenizer.decode(new, skip_special_tokens=True).strip("\n \N{REPLACEMENT CHARACTER}")
    for figure in ("first token after", "tokens/s", "cache bytes per rank", "sent bytes per rank"):
        assert figure in done.stderr
    options = ("--ranks", 3, "--max-new-tokens", 5, "--load-cache", cache, "--json", "--shard-weights")
    again = burst("--model", folder, "--prompt", "-", *options, text="More.")
    assert again.returncode == 0, again.stderr
    said = json.loads(again.stdout)
    whole = [*ids, *new, *tokenizer("More.")["input_ids"]]
    assert said["text"] == tokenizer.decode(expected_text(folder, whole, 5), skip_special_tokens=True)
    assert said["prompt_tokens"] == len(whole) and said["new_tokens"] == 5 and len(said["cache_bytes"]) == 3
    held = json.loads((cache / "tokens.json").read_text())
    (cache / "tokens.json").write_text(json.dumps(held | {"ids": [7, *held["ids"][1:]]}))
    altered = burst("--model", folder, "--prompt", "-", *options, text="More.")
    assert altered.returncode == 2 and "tokens.json was altered" in " ".join(altered.stderr.split())
    (cache / "tokens.json").write_text(json.dumps(held["ids"]))
    early = burst("--model", folder, "--prompt", "-", *options, text="More.")
    assert early.returncode == 2 and "is of an earlier version; save it again" in " ".join(early.stderr.split())
    (cache / "tokens.json").write_text(json.dumps({"ids": [7], "digest": _digest(cache, [7])}))
    other = burst("--model", folder, "--prompt", "-", *options, text="More.")
    assert other.returncode == 1 and "tokens.json has 1 tokens, and the cache" in " ".join(other.stderr.split())
    shutil.copytree(cache, folder / "other")
    (folder / "other" / "cache.json").write_text("of another cache")
    with pytest.raises(ValueError, match="was altered, or is of another cache"):
        _read_tokens(folder / "other")
    (cache / "tokens.json").write_text(json.dumps(held))
    chat = burst("--model", folder, "--prompt", "-", *options, "--chat", text="More.")
    assert chat.returncode == 2 and "would begin a second conversation" in " ".join(chat.stderr.split())


def test_ranks_of_torchrun_share_no_standard_input(monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    assert main(["--model", "absent", "--prompt", "-"]) == 2
    assert "torchrun's ranks share one standard input; pass a file" in " ".join(capsys.readouterr().err.split())


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
    ],
)
def test_wrong_arguments_are_named(folder, words, text):
    done = burst("--model", folder, *words, text="" if "empty" in text else "some text")
    assert done.returncode == 2 and text in " ".join(done.stderr.split()), done.stderr


def test_a_chat_template_is_applied(folder):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>"
    tokenizer.save_pretrained(folder / "chat")
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder / "chat")
    options = ("--ranks", 2, "--max-new-tokens", 4, "--json", "--chat")
    done = burst("--model", folder / "chat", "--prompt", "-", *options, text="Why?")
    assert done.returncode == 0, done.stderr
    ids = tokenizer("<user>Why?<answer>")["input_ids"]
    assert json.loads(done.stdout)["text"] == tokenizer.decode(expected_text(folder, ids, 4), skip_special_tokens=True)


@pytest.mark.long
def test_a_hybrid_model_is_continued(folder):
    """Qwen3.5: three layers in four are recurrent."""
    tokenizer, path = PreTrainedTokenizerFast.from_pretrained(folder), folder / "hybrid"
    tokenizer.save_pretrained(path)
    sizes = {"vocab_size": 257, "pad_token_id": 0, "num_hidden_layers": 4, "eos_token_id": None}
    hybrid = make_hybrid("qwen3_5", double=False, layer_types=None, **sizes)
    hybrid.config.use_cache = hybrid.generation_config.use_cache = True
    hybrid.save_pretrained(path)
    ids, cache = tokenizer(TEXT)["input_ids"], folder / "hybrid-cache"
    options = ("--prompt", folder / "prompt.txt", "--max-new-tokens", 8, "--prefill-chunk", 64)
    done = burst("--model", path, "--ranks", 2, *options, "--save-cache", cache)
    assert done.returncode == 0, done.stderr
    new = expected_text(path, ids, 8)
    assert json.loads((cache / "tokens.json").read_text())["ids"] == [*ids, *new]
    options = ("--prompt", "-", "--max-new-tokens", 5, "--load-cache", cache, "--json")
    again = burst("--model", path, "--ranks", 3, *options, text="More.")
    assert again.returncode == 0, again.stderr
    whole = [*ids, *new, *tokenizer("More.")["input_ids"]]
    assert json.loads(again.stdout)["text"] == tokenizer.decode(expected_text(path, whole, 5), skip_special_tokens=True)


@pytest.mark.long
def test_control_c_leaves_no_process(folder):
    options = ("--ranks", "2", "--max-new-tokens", "1800", "--prompt", str(folder / "prompt.txt"))
    command = [sys.executable, "-m", "burst_attention.cli", "generate", "--device", "cpu", "--model", str(folder)]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(1), process.stderr.read()  # it writes text
        workers = workers_of(process.pid)
        assert len(workers) == 2
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 130 and b"Traceback" not in said, said
    deadline = time.monotonic() + 5
    while any(map(is_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, workers))
