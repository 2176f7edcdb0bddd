"""docs/python.md, made from signatures and docstrings: python -m tests.docs.python_api writes it.

Reads the sources, so that every version of Python makes the same page.
"""

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import shoal
from shoal.config.engine import EngineConfig
from shoal.config.options import parse_bytes
from shoal.core.params import DEFAULTS, PARAMS, SamplingParams

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
# classes in their order on the page, and what is not for callers
CLASSES = (
    "LLM", "AsyncLLM", "CompletionStream", "AsyncStream", "RequestOutput", "Completion", "RequestMetrics", "Chunk",
    "GrammarSpec",
)  # fmt: skip
HIDDEN = {"step", "forget", "drop", "begin", "end", "grammars"}
INTRODUCTION = """# Python

<!-- Made by `python -m tests.docs.python_api` from the docstrings; change those. -->

For programs that run the engine themselves. Everything here is imported from `shoal`; `import shoal` does not load
torch.

```python
from shoal import LLM, SamplingParams

with LLM(max_model_len=1024) as llm:
    print(llm.chat("What is the capital of France?", SamplingParams(max_tokens=20, temperature=0))[0].outputs[0].text)
```

Several prompts in one call, and several calls of an `AsyncLLM` at once, share passes. A misspelt option, parameter or
name is an error that suggests the one that was meant. Every error that Shoal raises on purpose is a `ShoalError`;
`shoal.errors` has the tree.
"""


def class_node(name: str) -> tuple[ast.ClassDef, str]:
    home = importlib.import_module(shoal._HOMES[name])
    source = inspect.getsource(home)
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node, source
    raise AssertionError(f"{name} is not a class in {home}")


def signature(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    arguments = ast.unparse(node.args).removeprefix("self, ").removeprefix("cls, ").removeprefix("self")
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None and node.name != "__init__" else ""
    kind = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    return f"{kind}{name}({arguments}){returns.replace(chr(39), '')}"


def paragraphs(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Its docstring; an indented example becomes a block, one with a prompt is left to the source."""
    text = (ast.get_docstring(node) or "").split(">>>")[0].strip()
    found: list[str] = []
    for part in text.split("\n\n"):
        if part.startswith("    "):
            found.append(f"```text\n{textwrap.dedent(part)}\n```")
        else:
            found.append(" ".join(part.split()))
    return "\n\n".join(found)


def members(name: str, node: ast.ClassDef) -> Iterator[str]:
    for item in node.body:
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            if item.name in HIDDEN or (item.name.startswith("_") and item.name != "__init__"):
                continue
            said = paragraphs(item)
            if not said:
                continue
            decorators = {ast.unparse(one) for one in item.decorator_list}
            shown = name if item.name == "__init__" else f"{name}.{item.name}"
            title = shown if "property" in decorators else signature(shown, item)
            yield f"**`{title}`**\n\n{said}"
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            yield f"- `{item.target.id}`: `{ast.unparse(item.annotation)}`"


def class_text(name: str) -> str:
    node, _ = class_node(name)
    parts = [f"## {name}", paragraphs(node)]
    lines: list[str] = []
    for one in members(name, node):
        if one.startswith("- "):
            lines.append(one)
        else:
            parts.append(one)
    if lines:
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def parameter_table() -> str:
    rows = [
        "## SamplingParams",
        paragraphs(class_node("SamplingParams")[0]),
        "| parameter | values | default |\n|---|---|---|",
    ]
    for item in fields(SamplingParams):
        param = PARAMS[item.name]
        bounds = [f"from {param.low:g}"] if param.low > -1e300 else []
        bounds += [f"to {param.high:g}"] if param.high < 2**31 - 1 else []
        kind = {"strings": "a text or a list of them", "token_ids": "token ids", "biases": "token id → number"}
        values = " ".join([kind.get(param.kind, param.kind), *(bounds if param.kind in ("number", "integer") else [])])
        default = DEFAULTS[item.name]
        shown = "the model's own" if default is None and param.neutral is not None else f"`{default!r}`"
        rows[-1] += f"\n| `{item.name}` | {values} | {shown} |"
    return (
        "\n\n".join(rows)
        + "\n\nTheir meaning is that of the server's fields of the same names ([server.md](server.md))."
    )


def option_table() -> str:
    about = "Keyword arguments of `LLM` and `AsyncLLM` (typed as `EngineOptions`). Flags have the same names."
    rows = ["## Options", about, "| option | values | default | |\n|---|---|---|---|"]
    for item in fields(EngineConfig):
        if item.name == "model":
            continue
        parse, choices = item.metadata["parse"], item.metadata["choices"]
        values = ", ".join(f"`{one}`" for one in choices)
        values = values or {int: "integer", float: "number", parse_bytes: "bytes, or a text such as `2GiB`"}.get(
            parse, "text"
        )
        values = "`True` or `False`" if isinstance(item.default, bool) else values
        rows[-1] += (
            f"\n| `{item.name}` | {values} | `{item.default!r}` | {item.metadata['help'].replace('|', chr(92) + '|')} |"
        )
    return "\n\n".join(rows)


def page() -> str:
    return "\n\n".join([INTRODUCTION.strip(), *map(class_text, CLASSES), parameter_table(), option_table()]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
