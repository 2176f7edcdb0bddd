"""What Shoal does with every endpoint and field of vLLM's and SGLang's servers: the page docs/api.md.

    python -m shoal.server.compat > docs/api.md

Owns the page and the notes in it. Whether something is taken is read from the bodies and routes themselves, so the page
cannot claim what the code does not do; tests/fields checks what each field that is taken does.
Knows no requests.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

from shoal.server import openapi
from shoal.server.app import DIALECTS
from shoal.server.bodies import GenerationBody
from shoal.server.chat_body import ChatRequest
from shoal.server.dialects.completions import CompletionRequest
from shoal.server.dialects.generate import GenerateRequest, GenerateSampling
from shoal.server.dialects.responses import Responses
from shoal.server.known_fields import ABSENT, DEFAULT_ONLY, NULL_ONLY, REFUSED, WHY
from shoal.server.messages_body import CountTokensRequest, MessagesRequest
from shoal.server.other_servers import ENDPOINTS, FIELDS
from shoal.server.responses_body import ResponsesRequest
from shoal.server.settings import ServerSettings
from shoal.server.token_bodies import DetokenizeRequest, TokenizeRequest

BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/generate": GenerateRequest,
    "/generate sampling_params": GenerateSampling,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
TAKEN, DIFFERS, IGNORED, REFUSES = "taken", "taken with a difference", "ignored with a warning", "refused"
# What is different, for a field of one path or of all.
DIFFERENCES: dict[str, str] = {
    "model": "may be left out; another name than the served ones is a 404",
    "n": "at most 128",
    "seed": "the same seed gives the same tokens whatever else is in the batch",
    "logit_bias": "at most 1,024 tokens, from -100 to 100",
    "stop": "at most 64, of at most 1,024 characters",
    "priority": "needs a key that may set it; without `--order priority` it warns",
    "cache_salt": "at most 256 characters; one text, not a list of them",
    "request_id": "the header X-Request-Id takes precedence",
    "rid": "one text, not a list of them",
    "parallel_tool_calls": "false holds the model to one call, by grammar",
    "response_format": "always strict; goes together with tools",
    "structured_outputs": "grammars are Lark or GBNF; goes together with tools",
    "reasoning_effort": "any text for the chat template; a number is refused",
    "chat_template_kwargs": "cannot replace what the server sets, such as messages",
    "thinking_token_budget": "a grammar closes the reasoning; -1 is refused, null means no limit",
    "top_logprobs": "at most 64",
    "/v1/completions logprobs": "at most 64",
    "prompt_logprobs": "at most 64",
    "/v1/chat/completions tool_choice": "auto by default where tools are given; the call is constrained",
    "/v1/chat/completions add_special_tokens": "only false: the chat template writes them",
    "/v1/completions max_tokens": "16 by default",
    "return_token_ids": "prompt ids come in the first chunk of a stream, or at the top of a whole answer",
    "/v1/completions prompt": "texts and lists of ids may be mixed in one list",
    "/detokenize skip_special_tokens": "false by default, as vLLM shows them; SGLang's default is true",
    "/v1/responses metadata": "values are texts; stored and returned",
    "/v1/responses include": "logprobs; other entries have no effect",
    "/v1/responses store": "bounded in size and age, per key",
    "/v1/responses truncation": "auto leaves out the oldest turns",
    "/v1/responses tools": "functions only",
    "/v1/responses background": "must be stored",
    "/tokenize prompt": "several, too, as SGLang has it",
    "/detokenize tokens": "of several texts, too, as SGLang has it; the answer's `text` repeats `prompt`",
    "/generate stream": "each event has the whole text so far; of a long answer, events come at growing intervals",
    "/generate sampling_params": "one object for all prompts",
    "/generate top_logprobs_num": "at most 64; not in a stream",
    "/generate token_ids_logprob": "at most 64, of the output alone; not in a stream or beside top_logprobs_num",
    "/generate logprob_start_len": "not in a stream",
    "/generate return_logprob": "one value for all prompts",
    "/v1/messages tools": "those that the client runs",
    "/v1/messages thinking": "budget_tokens is enforced by grammar; signatures are empty",
}
# Why endpoints are not there.
NOT_SERVED: dict[str, tuple[str, ...]] = {
    "models that embed, classify or rank are not served yet": (
        *("/v1/embeddings", "/v2/embed", "/encode", "/pooling", "/classify", "/v1/classify", "/score", "/v1/score"),
        *("/rerank", "/v1/rerank", "/v2/rerank", "/v1/decisions"),
    ),
    "only text is read and written": ("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/realtime"),
    "adapters are not supported": (
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/load_lora_adapter", "/unload_lora_adapter"),
        "/load_lora_adapter_from_tensors",
    ),
    "weights do not change while the server runs; `shoal restart` takes new ones": (
        *("/update_weights_from_disk", "/update_weights_from_tensor", "/update_weights_from_distributed"),
        *("/update_weights_from_ipc", "/init_weights_update_group", "/destroy_weights_update_group"),
        *("/init_weights_send_group_for_remote_instance", "/send_weights_to_remote_instance"),
        *("/init_weight_transfer_engine", "/start_weight_update", "/start_draft_weight_update", "/update_weights"),
        *("/finish_weight_update", "/update_weight_version", "/weight_info", "/weight_version", "/get_weight_version"),
        *("/sleep", "/wake_up", "/is_sleeping", "/release_memory_occupation", "/resume_memory_occupation"),
    ),
    "weights are not shown": ("/get_weights_by_name", "/weight_checker", "/weights_checker"),
    "use /v1/completions": ("/inference/v1/generate",),
    "use /generate": ("/vertex_generate",),
    "only text is read": ("/generate_from_file",),
    "use the path of the API that is meant": ("/invocations",),
    "use /tokenize": ("/v1/completions/render", "/v1/chat/completions/render"),
    "use /load or /metrics": ("/get_load", "/v1/loads"),
    "there are no images, and so no cache of them": ("/reset_mm_cache", "/reset_encoder_cache"),
    "close the connection": ("/abort_request", "/abort_requests"),
    "requests wait in the queue; drain with SIGTERM": (
        *("/is_paused", "/pause", "/resume", "/pause_generation", "/continue_generation"),
    ),
    "engines are added by --cluster": ("/scale_elastic_ep", "/is_scaling_elastic_ep", "/get_world_size"),
    "engines that fail are restarted by themselves; /health names them": (
        *("/fault_tolerance/apply", "/fault_tolerance/status"),
    ),
    "what is cached is set by flags": (
        *("/hicache/storage-backend", "/hicache/storage-backend/clear", "/clear_hicache_storage_backend"),
    ),
    "drafts come from the request's own text": (
        *("/add_external_corpus", "/remove_external_corpus", "/list_external_corpora"),
    ),
    "logs and traces are set by flags": ("/configure_logging", "/set_trace_level"),
    "it is a tool of SGLang's developers": ("/freeze_gc", "/slow_down"),
    "profile with `shoal bench throughput --profile`": ("/start_profile", "/stop_profile"),
    "nothing outside runs code in the engine": ("/collective_rpc", "/set_internal_state"),
    "conversations are kept by clients, or by /v1/responses": ("/open_session", "/close_session"),
    "experts are not recorded": (
        *("/start_expert_distribution_record", "/stop_expert_distribution_record", "/dump_expert_distribution_record"),
    ),
    "answers come parsed": ("/parse_function_call", "/separate_reasoning"),
}
ABOUT = """# vLLM's and SGLang's API, field by field

For users of other servers: what Shoal does with every endpoint and field of vLLM's and SGLang's OpenAI-compatible
servers. This page is generated from the code (`python -m shoal.server.compat`); tests send every field, and check on a
real engine what each that is taken does. [server.md](server.md) describes the API, [tools.md](tools.md) tools and
reasoning.

- **taken**: it means what it means there. **ignored with a warning**: the answer's `X-Shoal-Warning` header names it.
  **refused**: a 400 that names it, with the reason; for an endpoint, a 404.
- Every field is accepted as null, and with the default that it has in vLLM or SGLang. A field that no server has is
  refused as unknown.
"""


@dataclass(frozen=True)
class Field:
    """A field of another server, and what becomes of it here."""

    name: str
    servers: tuple[str, ...]
    defaults: tuple[Any, ...]  # where it has one
    status: str
    note: str


def fields_of(path: str) -> list[Field]:
    """The fields of other servers' bodies at a path, in the order of their names."""
    servers: dict[str, list[str]] = {}
    defaults: dict[str, list[Any]] = {}
    for server, text in FIELDS[path].items():
        for one in text.split():
            name, equals, default = one.partition("=")
            servers.setdefault(name, []).append(server)
            if equals and json.loads(default) not in defaults.setdefault(name, []):
                defaults[name].append(json.loads(default))
    found = []
    for name in sorted(servers):
        status, note = status_of(path, name)
        found.append(Field(name, tuple(servers[name]), tuple(defaults.get(name, ())), status, note))
    return found


def status_of(path: str, name: str) -> tuple[str, str]:
    """(what becomes of a field, how or why)."""
    body = BODIES[path]
    kinds = kinds_of(body)
    if name not in kinds:
        return REFUSES, ABSENT[name][1]
    if name in (DEFAULT_ONLY if issubclass(body, GenerationBody) else getattr(body, "default_only", ())):
        return REFUSES, WHY[name]
    if is_raw(kinds[name]):
        return IGNORED, ""
    if only_null(kinds[name]):
        reasons: Mapping[str, str] = REFUSED | NULL_ONLY | getattr(body, "refused", {})
        return REFUSES, reasons[name].removeprefix("is not supported: ").removesuffix("; remove it")
    note = DIFFERENCES.get(f"{path} {name}", DIFFERENCES.get(name, ""))
    return (DIFFERS, note) if note else (TAKEN, "")


@cache
def kinds_of(body: type[msgspec.Struct]) -> dict[str, Any]:
    """Its fields and their types."""
    return {field.encode_name: field.type for field in msgspec.inspect.type_info(body).fields}  # type: ignore[attr-defined]


def is_raw(kind: Any) -> bool:
    if isinstance(kind, msgspec.inspect.Metadata):
        return is_raw(kind.type)
    if isinstance(kind, msgspec.inspect.UnionType):
        return any(map(is_raw, kind.types))
    return isinstance(kind, msgspec.inspect.RawType)


def only_null(kind: Any) -> bool:
    if isinstance(kind, msgspec.inspect.Metadata):
        return only_null(kind.type)
    return isinstance(kind, msgspec.inspect.NoneType)


def served() -> set[str]:
    """Every path that Shoal has, as METHOD /path/{}."""
    described = openapi.describe(ServerSettings(models=("model",)), (*DIALECTS, Responses))  # type: ignore[arg-type]
    return {f"{method.upper()} {plain(path)}" for path, methods in described["paths"].items() for method in methods}


def plain(path: str) -> str:
    """The same whatever its variables are called."""
    return re.sub(r"\{[^}]*\}", "{}", path)


def endpoints() -> list[tuple[str, str, str, str]]:
    """(endpoint, servers that have it, what Shoal does, why)."""
    ours = served()
    why = {path: reason for reason, paths in NOT_SERVED.items() for path in paths}
    found = []
    for one, servers in ENDPOINTS.items():
        there = plain(one) in ours
        reason = "" if there else why[one.split()[1]]
        found.append((one, servers.replace(" ", ", "), TAKEN if there else REFUSES, reason))
    return found


def page() -> str:
    """The whole page."""
    lines = [ABOUT, "## Endpoints", "", "| endpoint | of | here | |", "|---|---|---|---|"]
    lines += [f"| `{one}` | {servers} | {status} | {why} |" for one, servers, status, why in endpoints()]
    for path in FIELDS:
        lines += ["", f"## `POST {path.replace(' ', '`, `')}`", "", "| field | of | here | |", "|---|---|---|---|"]
        lines += [f"| `{one.name}` | {', '.join(one.servers)} | {one.status} | {one.note} |" for one in fields_of(path)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
