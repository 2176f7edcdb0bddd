"""Encrypted, authenticated sockets between machines: ZMQ's CURVE, with keys that live as long as the deployment.

    `shoal serve` ── makes one client key pair ──► its fronts, on standard input; engines get the public half alone
    an engine ────── makes its own server key pair; the secret half never leaves it ──► the public half, to the fronts

So each side proves itself to the other, and no secret crosses the network. An engine answers the one client key it was
given: its authenticator refuses every other key, and a socket whose authenticator is missing refuses all. Owns keys
and the options of such sockets. Knows no messages and no addresses.
"""

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import zmq
from zmq.utils import z85

from shoal.errors import BadConfig

log = logging.getLogger(__name__)

AUTHENTICATOR = "inproc://zeromq.zap.01"  # where libzmq asks whether a peer may connect (ZMTP's RFC 27)
DOMAIN = b"shoal"
# A process's death shows at once, a machine's only in its silence. I/O threads answer: a long pass is no silence.
HEARTBEAT_MS, SILENT_MS = 1000, 4000
LARGEST_MESSAGE = 2**26  # bytes that an engine takes from the network; a submitted job is far smaller


@dataclass(frozen=True)
class KeyPair:
    """A CURVE key pair, as z85 text. The secret half is not shown."""

    public: str
    secret: str = field(repr=False)

    @classmethod
    def fresh(cls) -> "KeyPair":
        """
        >>> len(KeyPair.fresh().public), KeyPair.fresh() == KeyPair.fresh()
        (40, False)
        """
        if not zmq.has("curve"):
            raise BadConfig(
                "this libzmq was built without CURVE, so engines cannot be reached over the network; "
                "install pyzmq from its wheels"
            )
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    @classmethod
    def from_json(cls, values: Mapping[str, str]) -> "KeyPair":
        return cls(values["public"], values["secret"])

    def as_json(self) -> dict[str, str]:
        """For the standard input of another process; for nothing that is logged or listed."""
        return {"public": self.public, "secret": self.secret}


def check_public(key: str) -> str:
    """The key, if it can be one. Raises BadConfig.

    >>> check_public("short")
    Traceback (most recent call last):
    shoal.errors.BadConfig: a public key of CURVE has 40 characters of z85, not 5
    """
    try:
        if len(key) == 40 and len(z85.decode(key)) == 32:
            return key
    except (KeyError, ValueError, OverflowError):
        pass
    raise BadConfig(f"a public key of CURVE has 40 characters of z85, not {len(key)}")


SocketOptions: TypeAlias = tuple[tuple[int, int | bytes], ...]  # names and values, as ZMQ's setsockopt takes them
_WATCHFUL: SocketOptions = (
    (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
    (zmq.HEARTBEAT_TIMEOUT, SILENT_MS),
    (zmq.HEARTBEAT_TTL, SILENT_MS),
)


def client_options(own: KeyPair, server_public: str) -> SocketOptions:
    """Of a socket that connects only to the engine that holds the other half of `server_public`."""
    return (
        (zmq.CURVE_SERVERKEY, check_public(server_public).encode()),
        (zmq.CURVE_PUBLICKEY, own.public.encode()),
        (zmq.CURVE_SECRETKEY, own.secret.encode()),
        *_WATCHFUL,
    )


def server_options(own: KeyPair) -> SocketOptions:
    """Of a socket that accepts only peers that the authenticator of its context lets in."""
    return (
        (zmq.CURVE_SERVER, 1),
        (zmq.CURVE_SECRETKEY, own.secret.encode()),
        (zmq.ZAP_DOMAIN, DOMAIN),
        (zmq.ZAP_ENFORCE_DOMAIN, 1),  # no authenticator: no connections, rather than any
        (zmq.MAXMSGSIZE, LARGEST_MESSAGE),
        *_WATCHFUL,
    )


class Authenticator:
    """Lets in the peers that hold one client key, on all secured sockets of one context. Runs in a thread until the
    context ends."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", client_public: str) -> None:
        self._allowed = z85.decode(check_public(client_public))
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(AUTHENTICATOR)  # before any secured socket is
        self._thread = threading.Thread(target=self._run, name="authenticator", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._socket:
            while True:
                try:
                    asked = self._socket.recv_multipart()
                    self._socket.send_multipart(self._answer(asked))
                except zmq.ContextTerminated:
                    return
                except zmq.ZMQError:
                    log.exception("the authenticator failed to answer; it goes on")

    def _answer(self, asked: list[bytes]) -> list[bytes]:
        """One answer for one question, of which libzmq is the only author."""
        version, number, domain, _, _, mechanism, *credentials = asked
        allowed = domain == DOMAIN and mechanism == b"CURVE" and credentials == [self._allowed]
        if not allowed:
            log.warning("refused a connection whose key is not this deployment's")
        status = (b"200", b"OK") if allowed else (b"400", b"not a key of this deployment")
        return [version, number, *status, b"", b""]
