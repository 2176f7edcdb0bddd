"""The body of a chat, and what all APIs that answer chats do with it before jobs are submitted.

Owns the fields of /v1/chat/completions and the path from them to a PreparedRequest. Other chat APIs turn their own
bodies into this one. Knows no HTTP beyond its errors.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from shoal.core.params import MAX_LOGPROBS
from shoal.keys.api_key import ApiKey
from shoal.server.answer_form import Reasoning, form_of
from shoal.server.bodies import MOST_MESSAGES, SMALL_BODY, ChatMessage, GenerationBody, Nothing, limits
from shoal.server.errors import BadField
from shoal.server.final_message import text_of
from shoal.server.prepare import Preparer
from shoal.server.prepared import PreparedRequest
from shoal.server.prompt_reader import MOST_CUT, ChatPrompt
from shoal.server.token_bodies import TokenizeRequest
from shoal.server.tool_choice import FunctionChoice, FunctionList, ToolChoice, ToolList, ToolRequest, tools_of
from shoal.server.workers import PYTHON, off_loop
from shoal.text.reasoning import thought_after


class ChatRequest(GenerationBody, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Annotated[int, limits("max_tokens")] | None = None  # the newer name of max_tokens
    logprobs: bool | None = None
    top_logprobs: Annotated[int, limits("logprobs")] | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # variables for the chat template, such as enable_thinking
    reasoning_effort: Annotated[str, Meta(max_length=16)] | None = None  # for the chat template; none: no reasoning
    add_generation_prompt: bool | None = None  # true by default: the template opens the answer
    continue_final_message: bool | None = None  # the answer continues the last message
    echo: bool | None = None  # the answer begins with the last message, if that is the assistant's
    include_reasoning: bool | None = None  # false: the reasoning is not shown
    thinking_token_budget: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None  # then the reasoning is closed
    tools: ToolList | None = None
    tool_choice: ToolChoice | None = None  # auto by default
    parallel_tool_calls: bool | None = None  # true by default
    functions: FunctionList | None = None  # the older names of tools
    function_call: FunctionChoice | None = None  # … and of tool_choice
    audio: Nothing = None
    modalities: list[Literal["text"]] | None = None
    chat_template: Nothing = None


async def prepare_chat(
    preparer: Preparer, request: ChatRequest, size: int, id: str, key: ApiKey | None
) -> PreparedRequest:
    """`size`: of the body, in bytes; the work on the tools of a large one is done in a thread."""
    return await prepare_chats(preparer, request, [request.messages], size, id, key)


async def prepare_chats(
    preparer: Preparer,
    request: ChatRequest,
    chats: Sequence[list[ChatMessage]],
    size: int,
    id: str,
    key: ApiKey | None,
) -> PreparedRequest:
    """Several conversations with the same parameters, one job each."""
    model = preparer.check_model(request.model)
    top = top_logprobs_of(request)
    if top is not None and request.logprob_token_ids is not None:
        top = len(request.logprob_token_ids)
    limit = max_tokens_of(request)
    params = preparer.params(
        request,
        n=1 if request.n is None else request.n,
        max_tokens=limit if limit is not None else preparer.settings.default_chat_max_tokens,
        logprobs=top,
    )
    preparer.check_count(len(chats), params.n, "n")
    tools = await off_loop(size, lambda: tool_request(request), PYTHON, SMALL_BODY)
    keep = preparer.token_cut(request, params.max_tokens)
    prompts: list[list[int]] = []
    for number, messages in enumerate(chats):
        prompt = await preparer.chat_prompt(
            messages,
            request.add_generation_prompt is not False,
            variables_of(request),
            None if keep is None else MOST_CUT,
            tools.shown,
            continues_of(request),
        )
        prompts.append(prompt.ids if keep is None else keep.of(prompt.ids))
        preparer.check_ids(prompts[-1], f"messages[{number}]" if len(chats) > 1 else "messages")
    reasoning = Reasoning(
        thought_after(preparer.reasoning, prompt.end),
        request.include_reasoning is not False,
        request.thinking_token_budget,
    )
    form = await off_loop(
        size, lambda: form_of(request, tools, preparer.tool_format, preparer.tokenizer, reasoning), PYTHON, SMALL_BODY
    )
    last = chats[0][-1]
    prefix = text_of(last) if request.echo and last.role == "assistant" else ""
    return await preparer.request(
        request, id, key, prompts, params, model=model, keep=params.n, top=top, prefix=prefix, form=form
    )


async def chat_prompt(preparer: Preparer, request: ChatRequest, size: int, most: int) -> ChatPrompt:
    """Its prompt alone, of at most so many tokens."""
    tools = await off_loop(size, lambda: tool_request(request), PYTHON, SMALL_BODY)
    return await preparer.chat_prompt(request.messages, True, variables_of(request), most, tools.shown)


def variables_of(request: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """The variables of the chat template. Templates have three names for whether a model reasons."""
    effort = request.reasoning_effort
    if effort is None:
        return dict(request.chat_template_kwargs or {})
    reasons = effort != "none"
    own = {"reasoning_effort": effort, "enable_thinking": reasons, "thinking": reasons}
    return own | (request.chat_template_kwargs or {})


def continues_of(request: ChatRequest) -> bool:
    """Whether the answer continues the last message."""
    if request.add_special_tokens:
        raise BadField("add_special_tokens", "add_special_tokens: the chat template writes them all; leave it out")
    if request.continue_final_message and request.add_generation_prompt:
        raise BadField(
            "continue_final_message",
            "continue_final_message and add_generation_prompt exclude each other; give one of them",
        )
    return bool(request.continue_final_message)


def tool_request(request: ChatRequest) -> ToolRequest:
    return tools_of(
        request.tools, request.tool_choice, request.parallel_tool_calls, request.functions, request.function_call
    )


def top_logprobs_of(body: ChatRequest) -> int | None:
    """How many alternatives to show for each token; None: no logprobs at all."""
    if body.top_logprobs and not body.logprobs:  # 0 is the default of some clients
        raise BadField("top_logprobs", "top_logprobs requires logprobs to be true")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        raise BadField("top_logprobs", f"top_logprobs must be between 0 and {MAX_LOGPROBS}, not {body.top_logprobs}")
    return (body.top_logprobs or 0) if body.logprobs else None


def max_tokens_of(body: ChatRequest) -> int | None:
    """The limit, under its newer or its older name."""
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and new < 1:
        raise BadField("max_completion_tokens", f"max_completion_tokens must be at least 1, not {new}")
    if new is not None and old is not None and new != old:
        raise BadField(
            "max_completion_tokens", f"max_completion_tokens is {new} but max_tokens is {old}; give one of them"
        )
    return old if new is None else new
