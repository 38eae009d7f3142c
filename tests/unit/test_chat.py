"""Conversations as training data: their ids, their targets, and what is refused."""

import itertools
import json

import numpy as np
import pytest

from burst_train.data import sequences as data
from burst_train.data.chat import encode_chat
from burst_train.data.corpus import open_corpus
from burst_train.data.sequences import Cursor, SequenceReader
from burst_train.data.tokenizer import ByteTokenizer, HubTokenizer
from tests.support.chat import MARKED, PLAIN, chat_tokenizer, conversations, talk, template_of, write_chat


def hub_tokenizer(folder, template):
    chat_tokenizer(template).save_pretrained(folder)
    return HubTokenizer(str(folder))


def reader_of(path, tokenizer, **changes):
    settings = {"seq_len": 64, "packed": True, "held_out": 0.0, "seed": 0} | changes
    return SequenceReader(open_corpus(path), tokenizer, **settings)


def encoded(path, tokenizer, **changes):
    """Return (ids, labels) of each conversation in the order of the file."""
    reader = reader_of(path, tokenizer, **changes)
    found = [data.TokenSequence(reader.encode(document), None) for document in reader.corpus.documents()]
    return [(each.ids.tolist(), each.labels.tolist()) for each in found]


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "plain"])
def test_targets_are_what_the_assistant_wrote(tmp_path, template):
    path = write_chat(tmp_path / "chat.jsonl", [talk("é?", "yes <b>", "why", "so", system="Be kind.")])
    ((ids, labels),) = encoded(path, hub_tokenizer(tmp_path / "its", template))
    plain = chat_tokenizer(None)
    whole = "<|open|>system:Be kind.<|close|><|open|>user:é?<|close|><|open|>assistant:yes <b><|close|>"
    whole += "<|open|>user:why<|close|><|open|>assistant:so<|close|>"
    assert ids == plain(whole)["input_ids"], "special tokens are tokens, and none is added"
    assert [each for each in labels if each != -100] == plain("yes <b><|close|>so<|close|>")["input_ids"]
    assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
    ((same, every),) = encoded(path, hub_tokenizer(tmp_path / "its", template), assistant_only=False)
    assert same == every == ids


@pytest.mark.long
def test_ids_and_labels_are_those_of_trl(tmp_path):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from tests.support.chat import chat_model

    rows = [{"messages": messages} for messages in conversations()]
    model = chat_model(tmp_path / "model")
    options = {"max_length": None, "report_to": "none", "use_cpu": True, "output_dir": str(tmp_path / "trl")}
    trainer = SFTTrainer(model, SFTConfig(assistant_only_loss=True, **options), train_dataset=Dataset.from_list(rows))
    expected = [(each["input_ids"], each["labels"]) for each in trainer.train_dataset]
    assert {-100} < {label for _, labels in expected for label in labels}
    path = write_chat(tmp_path / "chat.jsonl")
    assert encoded(path, HubTokenizer(model)) == expected
    assert encoded(path, hub_tokenizer(tmp_path / "plain", PLAIN)) == expected, "without {% generation %}"


def test_a_text_beside_conversations_keeps_its_own_rules(tmp_path):
    """Special tokens stay text there, all tokens are targets, and the end token is added."""
    path = tmp_path / "both.jsonl"
    path.write_text('{"text": "<|open|>x"}\n' + json.dumps({"messages": talk("a", "b")}))
    (text, chat) = encoded(str(path), hub_tokenizer(tmp_path / "its", MARKED))
    assert text[0] == text[1] == [*b"<|open|>x", 257]
    assert chat[1][-2:] == [*b"b", 257] and chat[1][:-2] == [-100] * (len(chat[1]) - 2)


def test_sequences_keep_what_is_no_target(tmp_path, monkeypatch):
    """Packed, joined, shuffled, and read on from a cursor that passed through JSON."""
    monkeypatch.setattr(data, "SHUFFLED_TOKENS", 3 * 64)
    path = write_chat(tmp_path / "chat.jsonl")
    reader = reader_of(path, hub_tokenizer(tmp_path / "its", MARKED))
    stream = reader.training()
    found = list(itertools.islice(stream, 12))
    for sequence in (*found, data.join_sequences(found[:3])):
        starts = {*sequence.cu_seqlens}
        predicted = [n for n, label in enumerate(sequence.labels) if label >= 0 and n not in starts]
        assert sequence.valid_tokens == len(predicted) < len(sequence.tokens) - len(starts) + 1
    joined = data.join_sequences(found[:3])
    assert joined.labels.tolist() == [label for each in found[:3] for label in each.labels]
    documents = [ids for ids, _ in encoded(path, reader.tokenizer)]
    texts = [bytes(min(token, 255) for token in ids) for ids in documents]
    for start, stop in itertools.pairwise(found[0].cu_seqlens):
        assert any(bytes(min(int(each), 255) for each in found[0].ids[start:stop]) in text for text in texts)
    cursor = stream.cursor()
    again = reader.training(Cursor(**dict(cursor) | {"waiting": cursor.waiting.copy()}))
    for expected, got in zip(itertools.islice(stream, 40), again, strict=False):
        assert np.array_equal(expected.tokens, got.tokens) and expected.cu_seqlens == got.cu_seqlens


def test_whole_conversations_are_held_out(tmp_path):
    path = write_chat(tmp_path / "chat.jsonl")
    reader = reader_of(path, hub_tokenizer(tmp_path / "its", MARKED), held_out=0.3)
    parts = [document.text for document in reader.corpus.documents()]
    held = [text for text in parts if reader.split.held_out(data.Document("", text, True))]
    assert 0 < len(held) < len(parts) and next(reader.held_out()).valid_tokens > 0
    alone = write_chat(tmp_path / "alone.jsonl", [talk("a", "b")])
    with pytest.raises(ValueError, match="a single conversation, which can't be split"):
        reader_of(alone, reader.tokenizer, held_out=0.3)
    assert next(reader_of(alone, reader.tokenizer).training()).valid_tokens > 0


CHANGING = template_of("{{ ('(last) ' if loop.last else '') + m.content + '<|close|>' }}")
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('the user comes first') }}{% endif %}" + MARKED


@pytest.mark.parametrize(
    ("template", "messages", "reported"),
    [
        (CHANGING, talk("a", "b", "c", "d"), r"message 2 looks different at the end of a conversation, .*--chat-loss"),
        (PLAIN, [{"role": "assistant", "content": "a"}, *talk("b", "c")], "message 1 looks different"),
        (MARKED, talk("a"), "no token is the assistant's, so there is nothing to learn"),
        (PLAIN, talk("a"), "no token is the assistant's"),
        (STRICT, talk("a", "b", system="c"), "the chat template refuses it: the user comes first"),
        (None, talk("a", "b"), "has no chat template for 'messages'; name one that has by --tokenizer"),
    ],
)
def test_a_conversation_that_can_not_be_read_is_named(tmp_path, template, messages, reported):
    path = write_chat(tmp_path / "chat.jsonl", [talk("fine", "fine"), messages])
    tokenizer = hub_tokenizer(tmp_path / "its", template)
    where = 1 if template is None else 2
    with pytest.raises(ValueError, match=rf"^--data, chat.jsonl:{where}: .*{reported}"):
        encoded(path, tokenizer)
    if template == CHANGING:  # a single turn is the last one
        assert encode_chat(tokenizer.inner, messages[:2])[1].sum() == len("(last) b") + 1


def test_bytes_have_no_template(tmp_path):
    with pytest.raises(ValueError, match="the tokenizer bytes has no chat template"):
        encoded(write_chat(tmp_path / "chat.jsonl"), ByteTokenizer())


@pytest.mark.parametrize(
    ("row", "reported"),
    [
        ({"messages": []}, "must be a list of objects with 'role' and 'content'"),
        ({"messages": "hello"}, "must be a list of objects"),
        ({"messages": [{"content": "a"}]}, "message 1 has no 'role'"),
        ({"messages": ["a"]}, "message 1 has no 'role'"),
        ({"messages": [*talk("a"), {"role": "assistant"}]}, "the 'content' of message 2 holds NoneType, not a string"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "of message 1 holds list, not a string"),
        ({"messages": talk("a"), "text": "a"}, "it has both a 'text' and a 'messages' field"),
        ({"messages": talk("a"), "tools": 3}, "the 'tools' field holds int, not a list"),
        ({"messages": talk("a"), "chat_template_kwargs": {}}, "'chat_template_kwargs' is not supported"),
    ],
)
def test_rows_that_are_no_conversation_are_refused(tmp_path, row, reported):
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": talk("a", "b")}) + "\n" + json.dumps(row))
    with pytest.raises(ValueError, match=rf"--data .*chat.jsonl:2: .*{reported}"):
        list(open_corpus(str(path)).documents())


def test_tools_and_calls_reach_the_template(tmp_path):
    template = "{% if tools %}{{ tools[0].name }}|{% endif %}" + MARKED.replace(
        "m.content +", "(m.content or m.tool_calls[0].name) +"
    )
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "look"}]}
    path = tmp_path / "chat.jsonl"
    for tools in ([{"name": "eye"}], '[{"name": "eye"}]'):  # as a list, or as JSON in text
        path.write_text(json.dumps({"messages": [*talk("a"), call], "tools": tools}))
        ((ids, labels),) = encoded(str(path), hub_tokenizer(tmp_path / "its", template))
        assert bytes(ids[:4]) == b"eye|" and [each for each in labels if each >= 0] == [*b"look", 257]
