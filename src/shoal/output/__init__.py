"""Output: what an engine's tokens become before an API writes them: text, stop strings, logprobs, parsed parts.

Owns the samples of a request while they run. Knows text/ and core/; never HTTP, JSON, torch, an engine or an event
loop, so that the server and LLM can share it.

    token, logprobs ──► Sample (detokenizer, stop strings) ──text──► Parser ──content, reasoning, tool calls──► an API
"""
