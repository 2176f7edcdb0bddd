"""The settings of a front.

Owns their names and defaults; processes/front.py fills them in from flags. Knows no flags and no files.
"""

import secrets
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

from shoal.keys.api_key import KeySource, no_keys


def own_version() -> str:
    try:
        return version("shoal")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "unknown"


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How one front answers. All fronts of a server have the same.

    >>> ServerSettings(models=("tiny",)).model
    'tiny'
    """

    models: tuple[str, ...]  # names under which the model is served; the first one is used in answers
    keys: KeySource = no_keys  # the API keys in force; none: no key is required
    salt_secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)  # see auth.salt_of
    host: str = "127.0.0.1"  # the one it listens on …
    allowed_hosts: tuple[str, ...] = ()  # … and other names it answers to; see hosts.py
    allowed_origins: tuple[str, ...] = ()  # web origins that may call from a browser; none: no CORS headers
    max_body_bytes: int = 4 * 2**20
    max_body_memory_bytes: int = 32 * 2**20  # of all bodies that are being read or prepared
    max_head_bytes: int = 64 * 2**10  # of the request line and headers
    max_headers: int = 128
    max_choices: int = 1024  # prompts times samples of one HTTP request
    max_answer_logprobs: int = 2**22  # kept by all whole answers together; about 16 bytes each
    slow_client_timeout_s: float = 30.0  # for a client that does not read, or does not finish sending
    keep_alive_s: float = 75.0  # how long an idle connection is kept
    drain_timeout_s: float = 30.0
    max_unsent_bytes: int = 2 * 2**20  # limit for one stream whose client reads too slowly
    default_max_tokens: int | None = 16  # of /v1/completions, as OpenAI has it; None: until the context is full
    default_chat_max_tokens: int | None = None
    log_prompts: bool = False
    uses_priority: bool = True  # whether the order of the queue looks at requests' priority
    seed: int | None = None  # makes the seeds of requests without one repeatable
    tool_format: str = "auto"  # how the model writes tool calls: a name of text/tools/formats.py; auto: by its template
    reasoning_format: str = "auto"  # the marks around reasoning: a name of text/reasoning.py; auto: by its template
    grammar_threads: int = 2  # schemas compiled at the same time
    max_waiting_grammars: int = 64  # … and how many may wait
    version: str = own_version()

    @property
    def model(self) -> str:
        return self.models[0]
