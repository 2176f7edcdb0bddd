"""Harmony's special tokens and a short chat template in its manner, for tests: there are no small models with them."""

from tokenizers import AddedToken, Tokenizer

MARKS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
TEMPLATE = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort | default('medium') }}<|end|>"
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}"
    "{% if m.tool_calls %}{% if m.content and m.thinking %}{{ raise_exception('one of both') }}{% endif %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'tool' %}<|start|>functions to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def with_marks(backend: Tokenizer) -> Tokenizer:
    """The same tokenizer with harmony's special tokens."""
    made = Tokenizer.from_str(backend.to_str())
    made.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    return made


def ends_of(backend: Tokenizer) -> list[int]:
    """The ids that end an answer."""
    return [backend.token_to_id(mark) for mark in ("<|return|>", "<|call|>")]
