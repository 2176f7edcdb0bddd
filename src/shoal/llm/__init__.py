"""LLM and AsyncLLM: the engine in your own program.

records.py   what they return: RequestOutput, Completion, Chunk
jobs.py      prompts in any form → jobs
collect.py   the engine's events → records
llm.py       LLM: the caller's thread drives the engine
async_llm.py AsyncLLM: the engine has a thread, results come to any running event loop
"""
