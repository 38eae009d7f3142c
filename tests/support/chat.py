"""Conversations, and a tokenizer of bytes with a chat template, with or without marks of what the assistant writes."""

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.support.training import saved_model

SPECIAL = ("<|open|>", "<|close|>", "<|pad|>")  # ids 256, 257, 258
ANSWER = "{{ m.content + '<|close|>' }}"
TEMPLATE = """{% for m in messages %}{{ '<|open|>' + m.role + ':' }}\
{% if m.role == 'assistant' %}ANSWER{% else %}{{ m.content + '<|close|>' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|open|>assistant:' }}{% endif %}"""


def template_of(answer):
    """Return a template that writes the assistant's turns in this way."""
    return TEMPLATE.replace("ANSWER", answer)


PLAIN = template_of(ANSWER)
MARKED = template_of("{% generation %}" + ANSWER + "{% endgeneration %}")


def chat_tokenizer(template):
    raw = Tokenizer(models.BPE(vocab={each: n for n, each in bytes_to_unicode().items()}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([*SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token=SPECIAL[1], pad_token=SPECIAL[2], chat_template=template
    )


def talk(*contents, system=None):
    """Return messages: the contents are the user's and the assistant's in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": content} for n, content in enumerate(contents)]
    return [{"role": "system", "content": system}] * bool(system) + messages


def conversations(count=30):
    """Return conversations of one to three answers, of different lengths; some have a system prompt."""
    made = []
    for n in range(count):
        words = [f"{n} and {line} make {'café ' * ((n * 7 + line * 5) % 6)}{n + line}?" for line in range(6)]
        made.append(talk(*words[: 2 + n % 3 * 2], system="Count." if n % 4 == 0 else None))
    return made


def write_chat(path, rows=None):
    """Write conversations as JSON lines; return the path."""
    lines = [json.dumps({"messages": messages}) for messages in (conversations() if rows is None else rows)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def chat_model(folder, template=MARKED):
    """Save a small Llama with a tokenizer that has the template; return its folder."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"bos_token_id": None, "eos_token_id": 257, "pad_token_id": 258}
    config = LlamaConfig(**sizes, **ids, vocab_size=259, num_key_value_heads=2, initializer_range=0.2)
    chat_tokenizer(template).save_pretrained(folder)
    return saved_model(config, folder, 3)
