"""What the fields of requests and answers mean, and what is used where one is left out: the words of the API page.

Owns these words. Each line is `name = meaning | default`, or `Schema.name = …` where one schema differs from the others
that have a field of that name. Knows no types.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

from shoal.server.known_fields import DEFAULT_ONLY, REFUSED, WHY

Json = dict[str, Any]

REQUESTS = """
model = The model's name, one of those that /v1/models lists. | the model that is served
stream = Send the answer piece by piece. | false
stream_options = What else a stream carries. | nothing else
include_usage = One more chunk at the end, with the usage. | false
continuous_usage_stats = The usage so far, in every chunk. | false
include_obfuscation = No effect: nothing is added to hide the length of pieces. | false

temperature = How random the draw is; 0 always takes the likeliest token. | the model's own, else 1
top_p = Draw from the likeliest tokens that hold this much of the probability together. | the model's own, else 1
top_k = Draw from this many of the likeliest tokens; 0 or -1: from all. | the model's own, else 0
min_p = Leave out tokens less likely than this share of the likeliest one. | the model's own, else 0
repetition_penalty = Above 1: tokens of the prompt and the answer so far become less likely. | the model's own, else 1
repeat_penalty = Above 1: tokens of the prompt and the answer so far become less likely. | the model's own, else 1
presence_penalty = Subtracted once from the logits of tokens that the answer has. | 0
frequency_penalty = Subtracted from the logits of a token for each time that the answer has it. | 0
logit_bias = Added to the logits of these token ids. | none
seed = The same seed gives the same answer, whatever else is computed beside it. | drawn for each request
sampling_seed = The same seed gives the same answer, whatever else is computed beside it. | drawn for each request
n = Answers to each prompt. | 1
best_of = Draw this many answers and return the `n` likeliest. | n
use_beam_search = The `n` likeliest answers, found by beam search, instead of draws. | false
length_penalty = Of beams: above 1 favours long answers. | 1
max_tokens = Most tokens of an answer. | until the context is full
CompletionRequest.max_tokens = Most tokens of an answer. | 16
max_completion_tokens = Most tokens of an answer: the newer name of `max_tokens`. | until the context is full
max_output_tokens = Most tokens of the answer, reasoning included. | until the context is full
max_new_tokens = Most tokens of an answer. | 128
num_predict = Most tokens of an answer; below 0: until the context is full. | until the context is full
min_tokens = Neither end tokens nor stop strings end an answer before it has this many tokens. | 0
min_new_tokens = Neither end tokens nor stop strings end an answer before it has this many tokens. | 0
stop = The answer ends before one of these texts. | none
stop_sequences = The answer ends before one of these texts. | none
stop_regex = The answer ends after a text that matches one of these regular expressions. | none
stop_token_ids = The answer ends after one of these tokens. | none beside the model's own
include_stop_str_in_output = The answer keeps the stop string that ended it. | false
no_stop_trim = The answer keeps the stop string that ended it: SGLang's name of it. | false
ignore_eos = The model's end tokens do not end the answer. | false
skip_special_tokens = Special tokens are left out of the text. | true
DetokenizeRequest.skip_special_tokens = Special tokens are left out of the text. | false
allowed_token_ids = Only these tokens are drawn. | all
bad_words = Texts that the answer does not have. | none

logprobs = How many alternatives to report for each token, with their log probabilities. | none are reported
ChatRequest.logprobs = Report the log probability of each token. | false
BatchChatRequest.logprobs = Report the log probability of each token. | false
top_logprobs = How many alternatives to report for each token; needs `logprobs`. | 0
ResponsesRequest.top_logprobs = How many alternatives to report for each token. | 0
logprob_token_ids = The tokens whose log probabilities are reported, instead of the likeliest. | the likeliest
prompt_logprobs = How many alternatives to report for each token of the prompt. | none are reported
return_token_ids = Report the ids of the answer's and the prompt's tokens. | false
return_tokens_as_token_ids = In logprobs, tokens are written as `token_id:5`. | false
return_logprob = Report the log probability of each token. | false
logprob_start_len = From which token of the prompt on log probabilities are reported; -1: from none. | -1
top_logprobs_num = How many alternatives to report for each token. | 0
token_ids_logprob = The tokens whose log probabilities are reported, instead of the likeliest. | the likeliest
return_text_in_logprobs = Log probabilities come with the text of their tokens. | false
return_prompt_token_ids = Report the ids of the prompt's tokens. | false
echo = The answer begins with the prompt; in a chat, with the last message if that is the assistant's. | false

response_format = The form of the answer: text, JSON, JSON that fits a schema, or text with such parts. | text
structured_outputs = The form of the answer: exactly one of the fields below. | text
guided_json = A JSON schema that the answer fits: the older name of `structured_outputs.json`. | none
guided_regex = A regular expression that the answer matches: the older name of `structured_outputs.regex`. | none
guided_choice = The texts that the answer may be: the older name of `structured_outputs.choice`. | none
guided_grammar = A grammar that the answer follows: the older name of `structured_outputs.grammar`. | none
json_schema = A JSON schema that the answer fits. | none
regex = A regular expression that the answer matches. | none
ebnf = A grammar in GBNF that the answer follows. | none
json = A JSON schema that the answer fits. | none
choice = The texts that the answer may be. | none
grammar = A grammar that the answer follows, as Lark (llguidance's) or GBNF. | none
json_object = The answer is any JSON object. | false
structural_tag = Text that is constrained between certain marks. | none
whitespace_pattern = A regular expression of what may stand between the parts of JSON. | any whitespace
disable_any_whitespace = Only single spaces between the parts of JSON, as Python's json.dumps has them. | false
disable_additional_properties = The outermost object has no properties but those that the schema names. | false
disable_fallback = No effect: there is one grammar engine. | false
ResponseFormat.type = text, json_object, json_schema or structural_tag.
ResponseFormat.schema = The schema of json_object or json_schema, as some clients send it. | none
ResponseFormat.format = The structural tag. | none
structures = Of a structural tag in its older form: the constrained parts. | none
triggers = Of a structural tag in its older form: texts that begin a constrained part. | none
at_least_one = The answer has one of the structures at least. | false
JsonSchemaFormat.name = A name for the schema; no effect. | none
JsonSchemaFormat.description = What the schema is for; no effect. | none
schema = The JSON schema. | none
strict = Always treated as true: the answer fits the schema. | true
FunctionBody.strict = Refuse keywords of the schema that cannot be enforced, instead of leaving them out. | false
MessagesTool.strict = Refuse keywords of the schema that cannot be enforced, instead of leaving them out. | false
ResponseTool.strict = Refuse keywords of the schema that cannot be enforced, instead of leaving them out. | false
begin = The text that opens a constrained part.
end = The text that closes it.
StructuralTag.schema = The JSON schema between them. | any JSON

timeout = Seconds from the arrival to the last token; what is there by then is the answer. | no limit
priority = Lower goes first, with `--order priority`; needs a key with that right where there are keys. | 0
tier = The tier whose promise holds for this request, if the key allows it. | the key's own, else the server's
cache_salt = Only requests with the same salt share cached prefixes. | none
request_id = Names the request in the answer, its header and the log. | made by the server
rid = Names the request in the answer, its header and the log: SGLang's name of it. | made by the server
truncate_prompt_tokens = Keep only this many tokens of the prompt; -1: as many as fit. | all, and too many are refused
truncation_side = At which end tokens of the prompt are left out. | left
add_special_tokens = Special tokens, such as the beginning of a text, are added to a prompt that is text. | true

prompt = The text to continue.
OllamaGenerateRequest.prompt = The text to answer.
TokenizeRequest.prompt = A text, or several. | none; give `messages`
messages = The conversation so far, the oldest first.
BatchChatRequest.messages = The conversations, each a list of messages.
TokenizeRequest.messages = A conversation, as in a chat. | none; give `prompt`
role = Who wrote the message: system, user, assistant or tool, as far as the chat template has them.
InputItem.role = Of a message: user, assistant, system or developer. | none
content = The text of the message, or a list of parts. | none
OllamaMessage.content = The text of the message. | empty
Block.content = Of a tool's result: what the tool returned. | none
ChatMessage.name = The author's name, if the chat template uses one. | none
tool_calls = The calls of tools in an earlier answer. | none
tool_call_id = Of a tool's result: which call it answers. | none
tool_name = Of a tool's result: which tool returned it. | none
function_call = The older name of `tool_choice`. | auto
ChatMessage.function_call = The older form of `tool_calls`. | none
reasoning_content = The reasoning in an earlier answer. | none
ChatMessage.reasoning = The reasoning in an earlier answer, under its newer name. | none
annotations = From an earlier answer; no effect. | none
ChatMessage.audio = Only null: answers are text. | null
refusal = From an earlier answer; no effect. | none
ContentPart.refusal = The text of a refusal in an earlier answer. | none
type = What kind of thing this is.
text = The text. | none
InputItem.type = What kind of item this is. | message
MessagesTool.type = Only custom: the client runs the tool. | custom
GenerateRequest.text = The text to continue, or several. | none; give `input_ids`
GenerateRequest.input_ids = The token ids to continue, or several lists of them. | none; give `text`
sampling_params = How tokens are drawn, and when the answer ends. | as each of its fields says
system = The system prompt. | none
instructions = The system prompt; not kept for the next response. | none
images = Only an empty list: images are not read. | none
image_url = Only null: only text is read. | null
input_audio = Only null: only text is read. | null
video_url = Only null: only text is read. | null
file = Only null: only text is read. | null
ChatRequest.modalities = Only text. | text
BatchChatRequest.modalities = Only text. | text
OllamaGenerateRequest.suffix = Only empty: text cannot be inserted before a suffix. | empty
raw = The prompt as it is, without the chat template. | false
options = How tokens are drawn, and when the answer ends. | as each of its fields says
format = The form of the answer. | text
OllamaChatRequest.format = `json`, or a JSON schema that the answer fits. | text
OllamaGenerateRequest.format = `json`, or a JSON schema that the answer fits. | text
think = Whether the model reasons first, or how much. | as the chat template decides
thinking = Whether the model reasons first, and how long. | no reasoning is shown
Block.thinking = The reasoning in an earlier answer. | none
OllamaMessage.thinking = The reasoning in an earlier answer. | none
budget_tokens = Most tokens of reasoning. | no limit
output_config = The form of the answer, and how much the model reasons. | text
output_format = The older name of `output_config.format`. | text
effort = How much the model reasons, in the words of its chat template; none: not at all. | as the template decides
reasoning_effort = How much the model reasons, in the words of its chat template; none: not at all. | as it decides
include_reasoning = Show the reasoning. | true
thinking_token_budget = Most tokens of reasoning; then it is closed and the answer begins. | no limit
chat_template_kwargs = Variables for the chat template, such as `enable_thinking`. | none
add_generation_prompt = The chat template opens the answer. | true
continue_final_message = The answer continues the last message. | false
return_token_strs = The tokens as the vocabulary writes them, too. | false
tokens = The token ids of a text, or lists of those of several.

tools = The functions that the model may call. | none
tool_choice = Whether a tool may, must or must not be called, or which. | auto
TokenizeRequest.tool_choice = none: the tools are not shown to the model. | auto
parallel_tool_calls = Several calls in one answer. | true
disable_parallel_tool_use = One call at most in one answer. | false
functions = The older name of `tools`. | none
function = The function.
ToolChoiceBody.function = The function that must be called. | none
allowed_tools = The tools that may be called. | all
mode = auto: one of them may be called; required: one must be.
ResponseToolChoice.mode = auto: one of these tools may be called; required: one must be. | auto
AllowedTools.tools = These tools.
ResponseToolChoice.tools = The tools that may be called. | all
name = The name.
MessagesToolChoice.name = The tool that must be called. | none
ResponseToolChoice.name = The function that must be called. | none
Block.name = Of a tool's call: the tool. | none
InputItem.name = Of a function's call: the function. | none
TextFormat.name = A name for the schema; no effect. | none
OllamaShowRequest.name = The older name of `model`. | none
description = What it is for, in words for the model. | none
TextFormat.description = What the schema is for; no effect. | none
parameters = The JSON schema of the function's arguments. | it takes none
input_schema = The JSON schema of the tool's input. | it takes none
arguments = The arguments of the call.
InputItem.arguments = Of a function's call: its arguments, as JSON in a string. | none
Block.id = Of a tool's call: its id. | none
Block.input = Of a tool's call: its arguments. | none
tool_use_id = Of a tool's result: which call it answers. | none

input = A text, or a list of items: messages, calls, results, reasoning. | none; needs `previous_response_id`
InputItem.id = The item's id; of a reference, the item that is meant. | none
call_id = Of a function's call or result: which call it is. | none
InputItem.output = Of a function's result: what it returned. | none
summary = No effect: summaries of reasoning are not made. | none
generate_summary = No effect: summaries of reasoning are not made. | none
InputItem.summary = Of reasoning: its text, where `content` has none. | none
InputItem.status = From an earlier answer; no effect. | none
previous_response_id = The stored response that this one continues. | none
TextOptions.format = What the text must look like. | text
ResponsesRequest.text = What the text must look like. | text
InputTokensRequest.text = What the text must look like. | text
verbosity = No effect. | none
reasoning = How much the model reasons. | as the chat template decides
truncation = auto: of what is too long the oldest turns are left out; disabled: it is refused. | disabled
conversation = Only null: use `previous_response_id`. | null
context_management = Only null: use `truncation`. | null
ResponsesRequest.prompt = Only null: there are no stored prompts. | null
ResponsesRequest.moderation = Only null: answers are not judged. | null
max_tool_calls = No effect: the server runs no tools. | no limit
include = `message.output_text.logprobs` reports log probabilities; other values have no effect. | nothing else
store = Keep the response for `previous_response_id` and GET. | true
metadata = Up to 16 pairs of strings that are kept with the response. | none
background = Answer at once, and make the response in the background. | false
thread = Refused, as Anthropic's servers refuse it: clients then send the whole history. | none
container = Only null: the server runs no tools. | null
mcp_servers = Only an empty list: the server runs no tools. | none
verbose = No effect. | false
"""

ANSWERS = """
id = The answer's id; the log has it, too.
object = What kind of object this is.
created = When it was made, in seconds since 1970.
created_at = When it was made, in seconds since 1970.
OllamaChatAnswer.created_at = When it was made.
OllamaGenerateAnswer.created_at = When it was made.
completed_at = When it ended, in seconds since 1970; null before.
model = The model's name.
choices = The answers; empty in a chunk that carries the usage alone.
usage = How many tokens were read and generated.
index = The number of the answer, counted from 0.
CallDelta.index = The number of the call, counted from 0.
MessagesEvent.index = The number of the block, counted from 0.
text = The text of the answer.
ResponseAnswer.text = What the request said about the text's form.
ResponseEvent.text = The whole text of the part that ended.
DetokenizeAnswer.text = The text; SGLang's name of it.
message = The answer.
GenerateFinish.message = What went wrong.
ResponseFailure.message = What went wrong, and what to change.
MessagesEvent.message = The answer, with what is known of it at its beginning.
Detail.message = What is wrong, and what to change.
MessagesErrorDetail.message = What is wrong, and what to change.
delta = What this chunk adds.
role = Always assistant.
content = The text; null if there is none.
ChatLogprobs.content = One entry for each token.
MessagesAnswer.content = The blocks of the answer: text, reasoning, calls of tools.
refusal = Always null: the server does not refuse on the model's behalf.
reasoning_content = The reasoning, apart from the answer.
reasoning = The same under its newer name.
ResponseAnswer.reasoning = What the request said about reasoning.
thinking = The reasoning, apart from the answer.
tool_calls = The calls of tools.
function_call = The call, where the request had `functions`.
function = The function and its arguments.
name = The function's name.
OllamaModel.name = A name of the model.
ResponseEvent.name = The function of a call that ended.
arguments = The arguments, as JSON in a string.
FunctionDelta.arguments = What this chunk adds to the arguments.
OllamaFunction.arguments = The arguments.
CallOfTool.id = The call's id, for the message with its result.
CallDelta.id = The call's id, in its first chunk.
type = What kind of thing this is.
GenerateFinish.type = Why it ended: stop, length or abort.
Detail.type = The kind of error, as OpenAI names it.
MessagesErrorDetail.type = The kind of error, as Anthropic names it.
finish_reason = Why it ended: stop, length, tool_calls, timeout or abort; null while it goes on.
stop_reason = The stop string or token that ended it, if one did.
MessagesAnswer.stop_reason = Why it ended, as Anthropic names it.
stop_sequence = The stop string that ended it, if one did.
matched = The stop string or token that ended it.
length = The limit that ended it.
token_ids = The ids of its tokens, where asked for.
prompt_token_ids = The ids of the prompt's tokens, where asked for.
prompt_logprobs = Log probabilities of the prompt's tokens, where asked for.
logprobs = Log probabilities of its tokens, where asked for.
tokens = The tokens as text.
TokenizeAnswer.tokens = The token ids.
token_logprobs = The log probability of each.
top_logprobs = The likeliest alternatives of each token.
ResponseAnswer.top_logprobs = How many alternatives were asked for.
text_offset = Where each token begins in the text.
token = The token as text.
logprob = Its log probability.
bytes = Its bytes, for tokens that are only a part of a letter.
rank = Its place among all tokens, counted from 1.
decoded_token = The token as text.
prompt_tokens = Tokens of the prompt.
completion_tokens = Tokens of the answer.
total_tokens = Both together.
prompt_tokens_details = Of the prompt's tokens, how many were found in the prefix cache.
cached_tokens = How many tokens of the prompt were found in the prefix cache.
cache_write_tokens = Always 0: writing to the cache is not counted.
input_tokens = Tokens of the prompt.
output_tokens = Tokens of the answer.
input_tokens_details = How many of them were found in the prefix cache.
output_tokens_details = How many of them are reasoning.
reasoning_tokens = Tokens of the reasoning, as the tokenizer counts its text.
cache_read_input_tokens = Tokens of the prompt that were found in the prefix cache.
cache_creation_input_tokens = Always 0: writing to the cache is not counted.
output_ids = The ids of the answer's tokens.
meta_info = Counts, times and log probabilities.
weight_version = Always default: weights do not change while a server runs.
e2e_latency = Seconds from the arrival to the end.
input_token_logprobs = Log probabilities of the prompt's tokens, where asked for.
output_token_logprobs = Log probabilities of the answer's tokens, where asked for.
input_top_logprobs = The likeliest alternatives of the prompt's tokens.
output_top_logprobs = The likeliest alternatives of the answer's tokens.
output_token_ids_logprobs = Log probabilities of the tokens that were asked for.
done = Whether this is the last object.
done_reason = Why it ended: stop or length.
response = The text that this object adds; all of it without streaming.
ResponseEvent.response = The response so far.
total_duration = Nanoseconds from the arrival to the end.
load_duration = Always 0: the model is loaded when the server starts.
prompt_eval_count = Tokens of the prompt.
prompt_eval_duration = Nanoseconds to the first token.
eval_count = Tokens of the answer.
eval_duration = Nanoseconds from the first token to the last.
status = How far it is.
Health.status = Whether requests are accepted.
error = What went wrong; null if nothing did.
incomplete_details = Why it is incomplete, if it is.
reason = Why it is incomplete.
code = A short name of the error, for programs.
param = The field that is wrong, if one is.
details = More about the error, for programs.
OllamaShow.details = The model in short.
OllamaModel.details = The model in short.
output = The items of the answer: messages, reasoning, calls of functions.
store = Whether it is kept.
background = Whether it is made in the background.
instructions = What the request said.
max_output_tokens = What the request said.
max_tool_calls = What the request said.
metadata = What the request said.
parallel_tool_calls = What the request said.
previous_response_id = What the request said.
service_tier = Always default.
temperature = What it was drawn with.
top_p = What it was drawn with.
tool_choice = What the request said.
tools = What the request said.
truncation = What the request said.
sequence_number = The number of the event, counted from 0.
output_index = Which item of the answer it belongs to.
content_index = Which part of the item it belongs to.
item_id = The item it belongs to.
item = The item.
part = The part.
ResponseEvent.delta = What this event adds to a text or to arguments.
content_block = The block that begins.
data = The list.
first_id = The id of the first item.
last_id = The id of the last item.
has_more = Whether there are more behind the last.
deleted = Always true.
count = How many tokens there are.
max_model_len = Most tokens of a prompt and its answer; null while no engine is up.
token_strs = The tokens as the vocabulary writes them, where asked for.
prompt = The text.
engines_down = Numbers of engines that are down, beside others that are up.
version = The server's version.
OllamaVersion.version = A version that Ollama's clients accept.
owned_by = Always shoal.
root = The first of the model's names.
ModelCard.id = A name of the model.
server_load = Requests that run or wait.
running = Requests that run.
waiting = Requests that wait.
served_models = The model's names.
engines = Numbers of the engines that are up.
vocab_size = How many tokens the vocabulary has.
kv_tokens = Tokens that the KV cache of an engine holds.
block_size = Tokens of a KV block.
dtype = The type of the weights.
device = What computes: cpu or cuda.
model_path = The first of the model's names.
tokenizer_path = The first of the model's names.
is_generation = Always true.
preferred_sampling_params = The model's own, for requests that have none.
tokenizer_class = The tokenizer's class, as Hugging Face names it.
special_tokens = Special tokens by their roles.
added_tokens = Tokens that are never split, and their ids.
model_max_length = The longest text that the tokenizer was made for.
chat_template = The template that messages are written with.
forgotten_blocks = KV blocks that no later prompt finds.
models = The model, under each of its names.
modified_at = When the server started.
size = Always 0.
digest = Always empty.
license = Always empty.
modelfile = Always empty.
parameters = Always empty.
template = Always empty; ask /tokenizer_info.
model_info = The longest context.
capabilities = What it can do: completion, tools, thinking.
parent_model = Always empty.
OllamaDetails.format = Always empty.
family = Always empty.
families = Always empty.
parameter_size = Always empty.
quantization_level = Always empty.
"""


class Meaning(NamedTuple):
    """The words about one field; `default` is empty where it must be given, or is part of an answer."""

    text: str
    default: str = ""


@cache
def meanings(table: str) -> Mapping[str, Meaning]:
    """The lines of a table, by their names."""
    found: dict[str, Meaning] = {}
    for line in filter(None, table.splitlines()):
        name, _, words = line.partition(" = ")
        text, _, default = words.partition(" | ")
        assert name not in found, f"{name} is explained twice"
        found[name] = Meaning(text, default)
    return found


def meaning_of(schema: str, name: str, of_request: bool) -> Meaning | None:
    """The words about a field; None: another API's."""
    tables = [meanings(table) for table in ((REQUESTS, ANSWERS) if of_request else (ANSWERS, REQUESTS))]
    apart: dict[str, str] = {}
    if of_request:
        apart |= {one: f"Only null: it {why.removesuffix('; remove it')}." for one, why in REFUSED.items()}
        apart |= {one: f"Only its default, which other servers' clients send: {WHY[one]}." for one in DEFAULT_ONLY}
    for table in tables:
        if f"{schema}.{name}" in table:
            return table[f"{schema}.{name}"]
    if name in apart:
        return Meaning(apart[name])
    return next((table[name] for table in tables if name in table), None)


def explain(schemas: Json, requests: Iterable[str]) -> None:
    """Give every field its words. `requests`: the schemas of bodies; all that they contain belongs to requests."""
    asked = contained(schemas, requests)
    for schema, described in schemas.items():
        for name, field in described.get("properties", {}).items():
            told = field.get("description", "")
            if told.startswith(("Ignored", "Only", "Refused")) or (schema in asked and name in DEFAULT_ONLY):
                field["x-no-effect"] = True
            if told and not told.startswith(("Only", "Refused")):
                continue
            if (meaning := meaning_of(schema, name, schema in asked)) is None:
                continue
            known = field.get("default") is not None or not meaning.default or schema not in asked
            must = name in described.get("required", ())
            field["description"] = meaning.text if known or must else f"{meaning.text} Default: {meaning.default}."


def contained(schemas: Json, names: Iterable[str]) -> set[str]:
    """These schemas and all that they refer to."""
    found: set[str] = set()
    left = list(names)
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += references(schemas[name])
    return found


def references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"].rpartition("/")[2]] if isinstance(value.get("$ref"), str) else []
        return own + [one for inner in value.values() for one in references(inner)]
    return [one for inner in value for one in references(inner)] if isinstance(value, list) else []
