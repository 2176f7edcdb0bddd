"""shoal generate: continue one prompt and print the text."""

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shoal.cli.common import add_sampling, new_command, open_llm, sampling_from
from shoal.config.engine import add_flags
from shoal.core.params import SamplingParams
from shoal.errors import BadRequest

if TYPE_CHECKING:
    from shoal.llm.llm import LLM


def add_generate(commands: Any) -> None:
    parser = new_command(
        commands,
        "generate",
        "continue a prompt and print the text",
        'shoal generate --chat "What is the capital of France?" --max-tokens 40 --temperature 0',
        run_generate,
    )
    parser.add_argument("prompt", help="the text to continue; - reads it from standard input")
    parser.add_argument("--model", "-m", default=None, help="folder, .gguf file or hub name (default: SmolLM2)")
    parser.add_argument("--chat", action="store_true", help="send it as a chat message, through the chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object: texts, tokens, reasons, times")
    add_sampling(parser, max_tokens=256)
    add_flags(parser)


def read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise BadRequest(f"standard input is not UTF-8 text: {error}") from error


def run_generate(args: argparse.Namespace) -> int:
    text = read_stdin() if args.prompt == "-" else args.prompt
    with open_llm(args) as llm:
        ids = llm.encode([{"role": "user", "content": text}] if args.chat else text)
        params = sampling_from(args, llm, len(ids))
        if args.json:
            output = llm.generate(ids, params)[0]
            print(json.dumps(asdict(output), ensure_ascii=False))
            return 1 if any(one.error for one in output.outputs) else 0
        if params.n > 1:
            errors = []
            for one in llm.generate(ids, params)[0].outputs:
                print(f"--- {one.index}\n{one.text}")
                errors.append(one.error)
        else:
            errors = print_stream(llm, ids, params)[1]
    for error in filter(None, errors):
        print(f"shoal: the request failed: {error}", file=sys.stderr)
    return 1 if any(errors) else 0


def print_stream(llm: "LLM", ids: list[int], params: SamplingParams) -> tuple[str, list[str]]:
    """Print an answer as it streams; returns its text and errors."""
    texts, errors = [], []
    for chunk in llm.stream(ids, params):
        print(chunk.text, end="", flush=True)
        texts.append(chunk.text)
        errors.append(chunk.error)
    print()
    return "".join(texts), errors
