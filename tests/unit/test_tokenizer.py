"""Text to ids and back; a saved tokenizer equals the one used in training."""

import itertools
import json

import numpy as np
import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from burst_train.data.tokenizer import ByteTokenizer, HubTokenizer, open_tokenizer
from burst_train.strategies import FAMILIES

SPELLED = ["<s>", "</s>", "<pad>", "<|endoftext|>", "<|im_start|>", "\x00", "\ufeff", "e\u0301", "🦙", "  ", "\r\n", ""]
TEXTS = st.lists(st.sampled_from(SPELLED) | st.text(max_size=8), max_size=6).map("".join)


def model_folder(folder, architecture):
    """Return a folder with a small model's config.json; AutoTokenizer reads its model type."""
    kind = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[architecture]
    getattr(transformers, f"{kind}Config")(vocab_size=300).save_pretrained(folder)
    return folder


def small_bpe(special, *, opened=False):
    """Return a byte-level BPE with a few merges; its pipeline may prepend the first special token."""
    raw = tokenizers.Tokenizer(tokenizers.models.BPE())
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator(["the endoftext of the theme, then im_start"], trainer)
    raw.add_special_tokens(list(special))
    if opened:
        ids = [(special[0], raw.token_to_id(special[0]))]
        raw.post_processor = tokenizers.processors.TemplateProcessing(single=f"{special[0]} $A", special_tokens=ids)
    return raw


def hub_tokenizer(folder, kind):
    """Save a tokenizer to a folder without a model."""
    if kind == "qwen2":
        model = json.loads(small_bpe(["<|endoftext|>"]).to_str())["model"]
        inner = Qwen2Tokenizer(vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]])
    else:
        raw = small_bpe(["<s>", "</s>"], opened=True)
        inner = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")
    inner.save_pretrained(folder)
    return HubTokenizer(str(folder))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return, by (architecture, kind), the tokenizer and the folder where it was saved with a model."""
    pairs = {}
    for architecture, kind in itertools.product(FAMILIES, ("bytes", "plain", "qwen2")):
        own = tmp_path_factory.mktemp(f"{kind}-own")
        tokenizer = ByteTokenizer() if kind == "bytes" else hub_tokenizer(own, kind)
        folder = model_folder(tmp_path_factory.mktemp(f"{architecture}-{kind}"), architecture)
        tokenizer.save(folder)
        pairs[architecture, kind] = tokenizer, folder
    return pairs


def body_of(tokenizer, ids):
    """Return the ids between the opening and closing special tokens."""
    return ids[tokenizer.bos_id is not None : len(ids) - (tokenizer.eos_id is not None)]


@pytest.mark.parametrize("kind", ["bytes", "plain", "qwen2"])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_what_was_saved_gives_the_ids_that_were_trained_with(saved, architecture, kind):
    trained, folder = saved[architecture, kind]
    again, theirs = open_tokenizer(None, str(folder)), AutoTokenizer.from_pretrained(folder)
    assert (again.vocab_size, again.bos_id, again.eos_id) == (trained.vocab_size, trained.bos_id, trained.eos_id)

    @settings(max_examples=40, deadline=None)
    @given(TEXTS)
    def same(text):
        ids = trained.encode(text).tolist()
        assert again.encode(text).tolist() == ids
        assert theirs(text, add_special_tokens=False)["input_ids"] == body_of(trained, ids)
        opened = [] if trained.bos_id is None else [trained.bos_id]
        assert theirs(text)["input_ids"] == opened + body_of(trained, ids), "a prompt is opened and goes on"
        special = {trained.bos_id, trained.eos_id}
        assert not special & set(body_of(trained, ids)), "no text becomes the border of a document"

    same()


def test_what_was_saved_can_be_saved_again(saved, tmp_path):
    _, folder = saved["qwen2", "bytes"]
    again = model_folder(tmp_path / "again", "qwen2")
    open_tokenizer(None, str(folder)).save(again)
    assert np.array_equal(open_tokenizer(None, str(again)).encode("e\u0301</s>"), ByteTokenizer().encode("e\u0301</s>"))
    assert {path.name for path in folder.iterdir()} == {path.name for path in again.iterdir()}


def test_code_next_to_the_tokenizer_reads_it_too_where_it_is_trusted(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    trained, folder = saved["qwen2", "bytes"]
    trusted = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    assert type(trusted).__name__ == "AsSaved"
    assert trusted("e\u0301</s>")["input_ids"] == trained.encode("e\u0301</s>").tolist()[:-1]


def test_a_chat_template_still_writes_special_tokens_out(tmp_path):
    inner = hub_tokenizer(tmp_path / "own", "qwen2").inner
    inner.chat_template = "{% for message in messages %}<|im_start|>{{ message['content'] }}{% endfor %}"
    inner.add_special_tokens({"extra_special_tokens": ["<|im_start|>"]})
    inner.save_pretrained(tmp_path / "chat")
    trained = HubTokenizer(str(tmp_path / "chat"))
    trained.save(model_folder(tmp_path / "model", "qwen2"))
    again, start = AutoTokenizer.from_pretrained(tmp_path / "model"), inner.convert_tokens_to_ids("<|im_start|>")
    prompt = again.apply_chat_template([{"role": "user", "content": "then"}], return_dict=False)
    assert prompt[0] == start
    assert start not in trained.encode("<|im_start|>then"), "a document's spelling stays text all the same"
    assert start not in open_tokenizer(None, str(tmp_path / "model")).encode("<|im_start|>then")


def test_bytes_round_trip_between_an_opening_and_a_closing_token(saved):
    text = "def f(x):\n\treturn 'naïve — 🦙'\r\n\x00  \x7f<s></s>" + "".join(map(chr, range(32, 256)))
    tokens = ByteTokenizer().encode(text)
    assert (tokens[0], tokens[-1]) == (256, 257)
    assert bytes(tokens[1:-1].astype(np.uint8)).decode() == text
    assert tokens.max() < ByteTokenizer().vocab_size
    theirs = AutoTokenizer.from_pretrained(saved["llama", "bytes"][1])
    assert theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True) == text


def test_a_tokenizer_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"--tokenizer .*can't be loaded"):
        open_tokenizer(str(tmp_path), "tiny")
