"""The wire between fronts and engines: the messages, and how they are packed.

Fronts connect to one ZMQ socket of each engine, over ipc in a folder that only this user can enter. Messages are
msgspec structs packed as msgpack arrays, never pickles; the records of core (Job, EngineInfo, Logprobs, Ending, …)
travel inside them as maps of their own fields. For each pass the engine sends one message to every front whose jobs it
changed. Knows no scheduling and no text.

A job travels under a number that its front chose; a sample of it under key = number * 256 + sample.
"""

from dataclasses import fields
from pathlib import Path
from typing import TypeAlias

import msgspec

from shoal.core.job import Ending, EngineInfo, Job, Refusal
from shoal.core.live import LiveBatch
from shoal.core.params import MAX_SAMPLES, SamplingParams
from shoal.core.report import EngineReport
from shoal.core.request import Logprobs
from shoal.errors import BadParameter, BadRequest

ADDRESS = "engine.ipc"  # the socket's file in the private folder
GIVEN_UP = "given-up"  # a file there, written when the engine will not be started again
SAMPLES = 256  # keys of one job
DIGEST_BYTES = 32  # of a block's name
assert MAX_SAMPLES <= SAMPLES


class Message(msgspec.Struct, array_like=True, tag=True):
    """Any message, in either direction."""


# ---- from a front to the engine


class Hello(Message):
    """A front has connected and has no jobs here. The engine answers Ready."""


class Watch(Message):
    """The front chooses among several engines, so it wants Reports; the first one is a snapshot."""


class Follow(Message):
    """The front keeps the engine's passes for the live page, so it wants LiveBatches."""


class Ping(Message):
    """The front is alive; the engine aborts the jobs of a front that has been silent for too long."""


class Submit(Message):
    """A job, or what is left of it after the engine was restarted."""

    number: int
    packed: msgspec.Raw  # the job, unpacked apart: a bad one is refused by its number, not dropped
    outputs: dict[int, list[int]] | None = None  # resumed: sample → its tokens so far, for samples that have not ended
    leave: bool = False  # compute one token, then end as "handed": another engine goes on

    @classmethod
    def of(cls, number: int, job: Job, outputs: dict[int, list[int]] | None = None, leave: bool = False) -> "Submit":
        return cls(number, msgspec.Raw(_encoder.encode(job)), outputs, leave)

    def job(self) -> Job:
        """Raises BadParameter that names the field where the job is malformed or a value is out of range.

        >>> Submit.of(1, Job(id="a", prompt=[1], params=SamplingParams(top_k=3), seed=0)).job().params.top_k
        3
        """
        try:
            job = _job_decoder.decode(self.packed)
            _check_names(_check_names(self.packed, _JOB_FIELDS)["params"], _PARAMS_FIELDS)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            if isinstance(error.__cause__, BadRequest):
                raise error.__cause__ from None
            raise BadParameter(f"the job cannot be read: {error}") from error
        return job


class Abort(Message):
    """The results of these jobs are no longer needed."""

    numbers: list[int]


class FinishAt(Message):
    """A stop string ends this sample after so many output tokens."""

    key: int
    outputs: int


class Ask(Message):
    """A question, by its name: metrics, state, live, load, passes, or reset_prefix_cache, which is also a change."""

    number: int
    what: str


class Elsewhere(Message):
    """What another engine has computed for each tenant that has requests there; passed on by every front."""

    engine: int
    epoch: int
    number: int  # every front has the same ones, so that none is counted twice
    service: dict[str, float]


class Arriving(Message):
    """Blocks of a job that will be submitted here are in the outbox of another engine, or will be soon."""

    number: int
    peer: str  # the outbox's address
    names: bytes  # of DIGEST_BYTES each
    slots: list[int]  # their places in the outbox


FrontMessage: TypeAlias = Hello | Watch | Follow | Ping | Submit | Abort | FinishAt | Ask | Elsewhere | Arriving


# ---- from the engine to a front


class Ready(Message):
    """The engine is up."""

    info: EngineInfo


class PromptLogprobs(msgspec.Struct, array_like=True):
    """Logprobs of a sample's prompt tokens from position `first` on."""

    key: int
    first: int
    values: tuple[msgspec.Raw, ...]  # packed Logprobs, unpacked one by one: there may be thousands of them


class OutboxBlocks(msgspec.Struct, array_like=True):
    """Blocks of a job that go to the engine's outbox."""

    number: int
    names: bytes
    slots: list[int]


class Pass(Message):
    """What one pass, or the time between two, changed for the jobs of one front."""

    epoch: int
    # one entry per token: tokens[i] is output number indexes[i] of the sample keys[i]
    keys: list[int] = []
    tokens: list[int] = []
    indexes: list[int] = []
    logprobs: dict[int, msgspec.Raw] = {}  # of tokens[i], by i; packed, too
    prompt_logprobs: list[PromptLogprobs] = []
    ended: list[tuple[int, Ending]] = []  # by key
    refused: list[tuple[int, Refusal]] = []  # by key
    blocks: list[OutboxBlocks] = []  # of jobs that leave


class Reply(Message):
    """To an Ask: text, or JSON."""

    number: int
    what: str
    text: bytes


class Report(Message):
    """The engine's load and prefix cache, for fronts that watch; at most one per pass."""

    epoch: int
    report: EngineReport


class Passes(Message):
    """What the engine did lately, for fronts that follow; at most ten a second."""

    epoch: int
    batch: LiveBatch


class Leaving(Message):
    """The engine is about to end: fronts should move their jobs to another one, if there is one."""


EngineMessage: TypeAlias = Ready | Pass | Reply | Report | Passes | Leaving


# ---- packing

_encoder = msgspec.msgpack.Encoder()
_front_decoder: msgspec.msgpack.Decoder[FrontMessage] = msgspec.msgpack.Decoder(FrontMessage)
_engine_decoder: msgspec.msgpack.Decoder[EngineMessage] = msgspec.msgpack.Decoder(EngineMessage)
_logprobs_decoder = msgspec.msgpack.Decoder(Logprobs)
_job_decoder = msgspec.msgpack.Decoder(Job)
_map_decoder = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_JOB_FIELDS = frozenset(item.name for item in fields(Job))
_PARAMS_FIELDS = frozenset(item.name for item in fields(SamplingParams))


def is_given_up(folder: Path | None) -> bool:
    """Whether the engine of this folder, if it is known, will not be started again."""
    return folder is not None and (folder / GIVEN_UP).exists()


def split_digests(joined: bytes) -> list[bytes]:
    """
    >>> [len(name) for name in split_digests(bytes(64))]
    [32, 32]
    """
    return [joined[at : at + DIGEST_BYTES] for at in range(0, len(joined), DIGEST_BYTES)]


def pack(message: Message) -> bytes:
    return _encoder.encode(message)


def pack_logprobs(one: Logprobs) -> msgspec.Raw:
    """
    >>> read_logprobs(pack_logprobs(Logprobs(5, -0.5, 1, (5,), (-0.5,)))).top_tokens
    (5,)
    """
    return msgspec.Raw(_encoder.encode(one))


def read_logprobs(packed: msgspec.Raw) -> Logprobs:
    return _logprobs_decoder.decode(packed)


def read_front(data: bytes) -> FrontMessage:
    """A message from a front; raises msgspec.DecodeError for anything else."""
    return _front_decoder.decode(data)


def read_engine(data: bytes) -> EngineMessage:
    return _engine_decoder.decode(data)


def _check_names(packed: msgspec.Raw, known: frozenset[str]) -> dict[str, msgspec.Raw]:
    """The parts of a packed record; refuses names it does not have, which msgspec would skip in silence."""
    parts = _map_decoder.decode(packed)
    unknown = parts.keys() - known
    if unknown:
        raise BadParameter(f"unknown field {min(unknown)!r} in a job; known: {', '.join(sorted(known))}")
    return parts
