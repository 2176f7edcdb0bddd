"""The wire between fronts and the engine: what is said, and how it is packed.

Fronts connect to one ZMQ socket of the engine, over ipc in a folder that only this user can enter. Messages are msgspec
structs packed as msgpack arrays, never pickles. A front says what it wants; the engine answers with one message for
each pass in which something happened to that front's jobs. Knows no scheduling and no text.

A job travels under a number of its front's choice, its samples under key = number * 256 + sample.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeAlias

import msgspec

from shoal.core.job import GrammarSpec, Job
from shoal.core.params import MAX_SAMPLES, SamplingParams
from shoal.core.request import Logprobs

ADDRESS = "engine.ipc"  # the socket's file in the private folder
GIVEN_UP = "given-up"  # a file there, written when the engine will not be started again
SAMPLES = 256  # keys of one job
assert MAX_SAMPLES <= SAMPLES

# a token, its logprob and rank, the likeliest alternatives and their logprobs
PackedLogprobs: TypeAlias = tuple[int, float, int, tuple[int, ...], tuple[float, ...]]


class Message(msgspec.Struct, array_like=True, tag=True):
    """Anything that is said."""


# ---- what a front says


class Hello(Message):
    """A front is there. The engine answers Ready."""


class Ping(Message):
    """It still is; a front that is silent for long is taken for dead, and its jobs are aborted."""


class Submit(Message):
    """A job, or what is left of it after the engine was restarted."""

    number: int
    id: str
    prompt: list[int]
    params: dict[str, Any]  # only what differs from the defaults
    seed: int
    stop_ids: list[int]
    tenant: str
    salt: str
    priority: int
    tier: str
    timeout_s: float | None
    grammar: tuple[str, str] | None
    # resumed: sample → what it has said so far, for the samples that have not ended
    said: dict[int, list[int]] | None = None


class Abort(Message):
    """Nobody waits for this job any more."""

    number: int


class FinishAt(Message):
    """A stop string ends this sample after so many output tokens."""

    key: int
    outputs: int


class Ask(Message):
    """A question: metrics, or state."""

    number: int
    what: str


FrontMessage: TypeAlias = Hello | Ping | Submit | Abort | FinishAt | Ask


# ---- what the engine says


class Ready(Message):
    """The engine is up; as core.job.EngineInfo."""

    epoch: int
    max_model_len: int
    vocab_size: int
    kv_tokens: int
    dtype: str
    device: str


class Pass(Message):
    """What one pass (or what happened between two) meant for the jobs of one front. Parallel lists, one per token."""

    epoch: int
    keys: list[int]
    tokens: list[int]
    indexes: list[int]  # tokens[i] is output number indexes[i] of keys[i]
    logprobs: list[tuple[int, PackedLogprobs]]  # (place in keys, …)
    prompt_logprobs: list[tuple[int, int, list[PackedLogprobs]]]  # (key, position of the first, …)
    # (key, reason, stop token, cached tokens, preemptions, queue_s, error)
    ended: list[tuple[int, str, int | None, int, int, float, str]]
    refused: list[tuple[int, str, str, float | None]]  # (key, kind, message, retry_after_s)


class Answer(Message):
    """To an Ask: text, or JSON."""

    number: int
    what: str
    text: bytes


EngineMessage: TypeAlias = Ready | Pass | Answer

_encoder = msgspec.msgpack.Encoder()
_front_decoder: msgspec.msgpack.Decoder[FrontMessage] = msgspec.msgpack.Decoder(FrontMessage)
_engine_decoder: msgspec.msgpack.Decoder[EngineMessage] = msgspec.msgpack.Decoder(EngineMessage)


def pack(message: Message) -> bytes:
    return _encoder.encode(message)


def read_front(data: bytes) -> FrontMessage:
    """What a front said; raises msgspec.DecodeError for anything else."""
    return _front_decoder.decode(data)


def read_engine(data: bytes) -> EngineMessage:
    return _engine_decoder.decode(data)


# ---- the words of core, packed


def pack_params(params: SamplingParams) -> dict[str, Any]:
    """Only what differs from the defaults.

    >>> pack_params(SamplingParams(top_k=3))
    {'top_k': 3}
    """
    packed: dict[str, Any] = {}
    for item in fields(params):
        value = getattr(params, item.name)
        if item.default is MISSING or value != item.default:
            packed[item.name] = dict(value) if isinstance(value, Mapping) else value
    return packed


def pack_job(number: int, job: Job, said: dict[int, list[int]] | None = None) -> Submit:
    return Submit(
        number,
        job.id,
        job.prompt,
        pack_params(job.params),
        job.seed,
        list(job.stop_ids),
        job.tenant,
        job.salt,
        job.priority,
        job.tier,
        job.timeout_s,
        (job.grammar.kind, job.grammar.text) if job.grammar else None,
        said,
    )


def unpack_job(said: Submit) -> Job:
    """Raises BadParameter where the parameters mean nothing."""
    return Job(
        id=said.id,
        prompt=said.prompt,
        params=SamplingParams.from_mapping(said.params),
        seed=said.seed,
        stop_ids=frozenset(said.stop_ids),
        tenant=said.tenant,
        salt=said.salt,
        priority=said.priority,
        tier=said.tier,
        timeout_s=said.timeout_s,
        grammar=GrammarSpec(*said.grammar) if said.grammar else None,
    )


def pack_logprobs(one: Logprobs) -> PackedLogprobs:
    return (one.token, one.logprob, one.rank, one.top_tokens, one.top_logprobs)


def unpack_logprobs(packed: PackedLogprobs) -> Logprobs:
    return Logprobs(*packed)
