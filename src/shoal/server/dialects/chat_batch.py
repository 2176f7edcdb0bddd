"""vLLM's /v1/chat/completions/batch: several conversations with the same parameters, one answer to each.

Owns that body; the answer is that of a chat, with a choice for each conversation. Not streamed, and without tools.
Knows the Preparer and a Call; no HTTP.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from shoal.keys.api_key import ApiKey
from shoal.output.sample import Sample
from shoal.server.bodies import MOST_MESSAGES, ChatMessage, read
from shoal.server.chat_body import ChatRequest, prepare_chats
from shoal.server.dialects.base import Operation
from shoal.server.dialects.chat import Chat, ChatAnswer, ChatChunk
from shoal.server.dialects.common import answer_pieces, usage_of
from shoal.server.errors import BadField
from shoal.server.jobs import Call
from shoal.server.prepared import PreparedRequest

MOST_CHATS = 256
Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MOST_MESSAGES)]
Chats = Annotated[list[Messages], Meta(min_length=1, max_length=MOST_CHATS)]
REFUSED_HERE = ("stream", "tools", "functions", "echo", "continue_final_message", "prompt_logprobs")

if TYPE_CHECKING:

    class BatchChatRequest(ChatRequest):
        """POST /v1/chat/completions/batch: the fields of a chat, with a list of conversations."""
else:
    BatchChatRequest = msgspec.defstruct(
        "BatchChatRequest",
        [("messages", Chats)],
        bases=(ChatRequest,),
        kw_only=True,
        forbid_unknown_fields=True,
        namespace={"__doc__": "POST /v1/chat/completions/batch: the fields of a chat, with a list of conversations."},
    )


class ChatBatch(Chat):
    """Several chats at once."""

    path = "/v1/chat/completions/batch"
    operation = Operation(
        "Answer several chats",
        BatchChatRequest,
        ChatAnswer,
        ChatChunk,
        {"messages": [[{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Bye"}]], "max_tokens": 16},
        {},
    )

    async def prepare(self, body: bytes, id: str, key: ApiKey | None) -> PreparedRequest:
        request = await read(BatchChatRequest, body)
        for name in REFUSED_HERE:
            if getattr(request, name) not in (None, False, []):
                raise BadField(name, f"{name} cannot be used in a batch of chats; send single ones")
        if request.n not in (None, 1):
            raise BadField("n", "n may only be 1 in a batch of chats; repeat a conversation instead")
        chats: list[list[ChatMessage]] = request.messages  # type: ignore[assignment]  # as Chats says
        return await prepare_chats(self.preparer, request, chats, len(body), id, key)

    def whole(self, call: Call, id: str, created: int) -> Iterator[bytes]:
        prepared = call.prepared
        answer = ChatAnswer(id, "chat.completion", created, prepared.model, [], usage_of(call))
        samples: Iterator[Sample] = (sample for job in call.outputs.samples for sample in job)
        return answer_pieces(answer, (self._choice(prepared, sample) for sample in samples))
