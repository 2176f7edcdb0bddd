"""Where an engine listens: a socket file in the private folder, or a TCP port with CURVE.

Owns how the engine's socket is made and bound, and what others must know to reach it. TCP without a client key is
refused: nothing listens in clear on a network. Knows no messages.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import zmq

from shoal.engine import wire
from shoal.engine.curve import Authenticator, KeyPair, check_public, server_options
from shoal.errors import BadConfig

LISTENING = "listening"  # a file in the engine's private folder: how to reach it
Inbox: TypeAlias = "zmq.Socket[bytes]"


@dataclass(frozen=True)
class Reach:
    """How to reach an engine."""

    address: str
    server_key: str = ""  # public; "" for a socket that only this user can reach

    def write(self, folder: Path) -> None:
        (folder / LISTENING).write_text(json.dumps({"address": self.address, "server_key": self.server_key}))

    @classmethod
    def read(cls, folder: Path) -> "Reach":
        return cls(**json.loads((folder / LISTENING).read_text()))


class Listening(Protocol):
    """The engine's socket. It is made early and bound late: fronts must not reach an engine that cannot answer."""

    socket: Inbox

    def bind(self) -> Reach: ...

    def close(self) -> None: ...


class PrivateListening:
    """In a folder that only this user can enter."""

    def __init__(self, folder: Path) -> None:
        (folder / wire.ADDRESS).unlink(missing_ok=True)
        self._address = f"ipc://{folder / wire.ADDRESS}"
        self.socket = router(zmq.Context.instance())

    def bind(self) -> Reach:
        self.socket.bind(self._address)
        return Reach(self._address)

    def close(self) -> None:
        self.socket.close(linger=0)


class NetworkListening:
    """On a TCP port, for holders of the deployment's client key. The engine's own keys are made here."""

    def __init__(self, address: str, client_key: str) -> None:
        """`address`: tcp://HOST:PORT, or tcp://HOST:* for any free port."""
        self._address = address
        check_public(client_key)
        self._keys = KeyPair.fresh()
        self._context = zmq.Context()  # its own: a context has one authenticator
        self._authenticator = Authenticator(self._context, client_key)
        self.socket = router(self._context)
        self.socket.setsockopt(zmq.IPV6, int("[" in address))
        for name, value in server_options(self._keys):
            self.socket.setsockopt(name, value)

    def bind(self) -> Reach:
        try:
            self.socket.bind(self._address)
        except zmq.ZMQError as error:
            raise BadConfig(f"an engine cannot listen on {self._address}: {error.strerror}") from error
        return Reach(self.socket.getsockopt_string(zmq.LAST_ENDPOINT), self._keys.public)

    def close(self) -> None:
        self.socket.close(linger=0)
        self._context.term()  # ends the authenticator


def listening_of(config: Mapping[str, Any], home: Path) -> Listening:
    """As the config of an engine's process says: `listen` is an address, and `client_key` the key it answers. Without
    an address, the engine listens in its home."""
    address = config.get("listen")
    if address is None:
        return PrivateListening(home)
    if not str(address).startswith("tcp://"):
        raise BadConfig(f"an engine listens on tcp://HOST:PORT, not on {address!r}")
    if not config.get("client_key"):
        raise BadConfig(
            f"an engine that listens on {address} needs the public client key of its deployment (client_key); "
            f"without one, anyone on the network could use it"
        )
    return NetworkListening(address, config["client_key"])


def host_of(address: str) -> str:
    """
    >>> host_of("tcp://10.0.0.1:*"), host_of("tcp://[::1]:4000")
    ('10.0.0.1', '[::1]')
    """
    return address.removeprefix("tcp://").rpartition(":")[0]


def router(context: "zmq.Context[Any]") -> Inbox:
    """A socket that knows its peers by name."""
    socket: Inbox = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an error when a front is gone
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a front that reconnects under its name keeps it
    socket.setsockopt(zmq.SNDHWM, 100_000)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    return socket
