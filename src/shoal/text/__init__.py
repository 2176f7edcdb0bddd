"""Between text and token ids: tokenizer, chat template, incremental detokenizer.

Knows tokenizers and jinja2. Does not know torch, the scheduler or HTTP.
"""
