"""The table of checks: (path, field) → the function that checks what the field does. Knows no server."""

from collections.abc import Callable
from typing import Any

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT, TOKENIZE, DETOKENIZE = "/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize"
GENERATE, GENERATE_SAMPLING = "/generate", "/generate sampling_params"
BOTH, THREE, FOUR = (COMPLETIONS, CHAT), (COMPLETIONS, CHAT, RESPONSES), (COMPLETIONS, CHAT, RESPONSES, MESSAGES)

Check = Callable[..., None]  # is given the server and the path
CHECKS: dict[tuple[str, str], Check] = {}


def checks(paths: str | tuple[str, ...], *fields: str) -> Callable[[Check], Check]:
    """The function below checks what these fields do at these paths."""

    def note(check: Check) -> Check:
        for path in (paths,) if isinstance(paths, str) else paths:
            for name in fields:
                assert (path, name) not in CHECKS, f"{name} of {path} is checked twice"
                CHECKS[path, name] = check
        return check

    return note


def runs() -> list[Any]:
    """(check, path), each once."""
    return sorted({(check, path) for (path, _), check in CHECKS.items()}, key=lambda one: (one[1], one[0].__name__))
