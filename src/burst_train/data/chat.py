"""Conversations as token ids, by the tokenizer's chat template, and which of them the assistant wrote.

A template with ``{% generation %}`` says itself what the assistant writes. For another, a turn of the assistant is what
the template adds to the conversation before it and the prompt for an answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")
EVERYTHING = "or give --chat-loss all"
_AS_TOKENS = {"split_special_tokens": False}  # a template writes special tokens; those of plain text stay text

Message = Mapping[str, Any]


def check_messages(messages: Any) -> None:
    """Raise TypeError unless these are messages of text: objects with a role and a content."""
    if not isinstance(messages, list) or not messages:
        raise TypeError("the 'messages' field must be a list of objects with 'role' and 'content'")
    for number, message in enumerate(messages, start=1):
        held = message if isinstance(message, Mapping) else {}
        if not isinstance(held.get("role"), str):
            raise TypeError(f"message {number} has no 'role'")
        content = held.get("content")
        if not isinstance(content, str) and (content is not None or not held.get("tool_calls")):
            raise TypeError(f"the 'content' of message {number} holds {type(content).__name__}, not a string")


def encode_chat(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, assistant_only: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Return a conversation's ids (int32) and which of them are targets (bool): the assistant's, or all.

    ValueError: the template refuses the messages, or which tokens are the assistant's is unclear, or none are.
    """
    inputs: dict[str, Any] = {"conversation": [*messages], "tools": tools}
    try:
        template = tokenizer.get_chat_template(tools=tools)
        if not assistant_only:
            encoding = tokenizer.apply_chat_template(**inputs, return_dict=True, tokenizer_kwargs=_AS_TOKENS)
            return (ids := np.array(encoding["input_ids"], np.int32)), np.ones(len(ids), bool)
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(f"the tokenizer gives no token's place in the text; name a fast --tokenizer, {EVERYTHING}")
        if GENERATION.search(template):
            encoding = tokenizer.apply_chat_template(
                **inputs, return_dict=True, return_assistant_tokens_mask=True, tokenizer_kwargs=_AS_TOKENS
            )
            ids, ours = np.array(encoding["input_ids"], np.int32), np.array(encoding["assistant_masks"], bool)
        else:
            ids, ours = _by_prefixes(tokenizer, inputs)
    except Exception as error:  # a template can raise anything
        if type(error) is ValueError:
            raise
        raise ValueError(f"the chat template refuses it: {error}") from error
    if not ours.any():
        raise ValueError("no token is the assistant's, so there is nothing to learn; remove it")
    return ids, ours


def _by_prefixes(tokenizer: Any, inputs: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Find the assistant's turns by rendering the conversation up to each; ValueError if one then looks different."""
    messages, tools = inputs["conversation"], inputs["tools"]

    def text(stop: int, prompt: bool = False) -> str:
        return tokenizer.apply_chat_template(messages[:stop], tools=tools, tokenize=False, add_generation_prompt=prompt)

    whole, turns = text(len(messages)), list[tuple[int, int]]()
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = text(number, prompt=True) if number else "", text(number + 1)
        if not number or not after.startswith(before) or not whole.startswith(after):
            raise ValueError(
                f"the chat template marks no turns by {{% generation %}}, and message {number + 1} looks different at "
                f"the end of a conversation, so its tokens are unclear; mark them in the template, {EVERYTHING}"
            )
        turns.append((len(before), len(after)))
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False, **_AS_TOKENS)
    starts, stops = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2).T
    ours = np.zeros(len(starts), bool)
    for start, stop in turns:
        ours |= (stops > start) & (starts < stop)
    return np.array(encoded["input_ids"], np.int32), ours
