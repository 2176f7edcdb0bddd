"""lm-eval: log-likelihoods and generated answers, through completions and through chats."""

import json
import math
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

url, model, tokenizer = sys.argv[1:]
folder = Path(tempfile.mkdtemp())
questions = [
    {"question": "The quick brown fox", "choices": [" jumps", " sleeps"], "answer": 0},
    {"question": "Once upon a", "choices": [" time", " fish", " a dog"], "answer": 0},
]
(folder / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
task: dict[str, Any] = {"dataset_path": "json", "dataset_kwargs": {"data_files": str(folder / "questions.jsonl")}}
task |= {"test_split": "train", "num_fewshot": 0, "doc_to_text": "{{question}}"}
choose = {"task": "choose", "output_type": "multiple_choice", **task}
choose |= {"doc_to_choice": "choices", "doc_to_target": "answer", "target_delimiter": ""}
write = {"task": "write", "output_type": "generate_until", **task, "doc_to_target": "{{choices[answer]}}"}
write |= {"generation_kwargs": {"max_gen_toks": 8, "until": ["\n"], "temperature": 0.0, "do_sample": False}}


def evaluate(kind: str, path: str, tasks: list[dict[str, Any]], chat: bool = False) -> dict[str, Any]:
    args = {"model": model, "base_url": f"{url}{path}", "tokenizer": tokenizer, "num_concurrent": 2, "max_retries": 1}
    args |= {"tokenizer_backend": None} if chat else {"tokenized_requests": True}
    ended = lm_eval.simple_evaluate(
        kind, args, tasks=tasks, task_manager=TaskManager(), bootstrap_iters=0, apply_chat_template=chat
    )
    assert ended is not None
    return ended


def post(path: str, **body: Any) -> Any:
    request = urllib.request.Request(f"{url}{path}", json.dumps({"model": model, **body}).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as told:
        return json.load(told)


def echoed(context: str, answer: str) -> float:
    """The answer's log-likelihood as the server reports it for an echoed prompt."""
    before, whole = (
        post("/tokenize", prompt=text, add_special_tokens=False)["tokens"] for text in (context, context + answer)
    )
    told = post("/v1/completions", prompt=whole, max_tokens=1, logprobs=1, echo=True, temperature=0)
    return sum(told["choices"][0]["logprobs"]["token_logprobs"][len(before) : len(whole)])


told = evaluate("local-completions", "/v1/completions", [choose, write])
for sample in told["samples"]["choose"]:
    for answer, (likelihood, _) in zip(sample["doc"]["choices"], sample["filtered_resps"], strict=True):
        assert math.isclose(likelihood, echoed(sample["doc"]["question"], answer), abs_tol=1e-3)
assert len(told["samples"]["write"]) == 2
spoken = evaluate("local-chat-completions", "/v1/chat/completions", [write], chat=True)
assert len(spoken["samples"]["write"]) == 2
