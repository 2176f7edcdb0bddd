"""Sending a whole answer: composed in pieces, off the event loop where it is large, and sent as the client reads it.

Owns how much of an answer exists as bytes at a time. What the pieces are is the dialect's. Knows no engine.
"""

from collections.abc import Iterator

from shoal.server.exchange import JSON, Exchange, Header
from shoal.server.jobs import Call
from shoal.server.workers import PYTHON, off_loop

SMALL = 2048  # logprobs, or eight times as many tokens; an answer of so many is composed on the event loop
BATCH_BYTES = 128 * 2**10  # composed at a time, and sent before the next
WHOLE_BYTES = 512 * 2**10  # answers up to this size are sent with their length, in one write


async def send_whole(exchange: Exchange, call: Call, pieces: Iterator[bytes], headers: tuple[Header, ...]) -> None:
    """Send the answer to a call that is over. A client that reads slowly slows the composing, too."""
    size, begun, more = size_of(call), list[bytes](), True
    known_length = exchange.scope.get("http_version") == "1.0"  # which has no chunks
    while more and (known_length or sum(map(len, begun)) < WHOLE_BYTES):
        batch, more = await off_loop(size, lambda: take(pieces), PYTHON, SMALL)
        begun.append(batch)
    body = b"".join(begun)
    del begun
    if not more:
        await exchange.reply(200, body, headers=headers)
        return
    await exchange.start(200, [(b"content-type", JSON), *headers])
    while more and not call.gone:
        await exchange.send({"type": "http.response.body", "body": body, "more_body": True})
        body, more = await off_loop(size, lambda: take(pieces), PYTHON, SMALL)
    await exchange.send({"type": "http.response.body", "body": body, "more_body": False})


def take(pieces: Iterator[bytes]) -> tuple[bytes, bool]:
    """The next pieces as one, and whether more may follow.

    >>> take(iter([b"a", b"b"]))
    (b'ab', False)
    """
    found: list[bytes] = []
    size = 0
    for piece in pieces:
        found.append(piece)
        size += len(piece)
        if size >= BATCH_BYTES:
            return b"".join(found), True
    return b"".join(found), False


def size_of(call: Call) -> int:
    """How much work it is to write the answer, in logprobs."""
    outputs, logprobs, tokens = call.outputs, 0, call.outputs.output_tokens
    for number, (job, samples, prompt) in enumerate(
        zip(outputs.jobs, outputs.samples, outputs.prompt_logprobs, strict=True)
    ):
        logprobs += sum(sample.logprobs.entries for sample in samples) + len(samples) * prompt.entries
        tokens += len(samples) * len(job.prompt) if call.prepared.token_ids else 0
        tokens += len(samples) * len(call.prepared.echo[number]) // 4 if call.prepared.echo else 0
    return logprobs + tokens // 8
