"""Which Host headers a server without keys answers to.

A web page can give its own name the address 127.0.0.1 (DNS rebinding) and then read a local server's answers as its
own. The browser still sends the page's name as the Host, so a server that anyone may use answers only to its own names.
An address is never such a name. Knows no keys and no routes.
"""

import ipaddress

from shoal.server.errors import HttpError, shorten

ANY = "*"


class Hosts:
    """The names that a server answers to: localhost, addresses, the host it listens on, and those that were allowed."""

    def __init__(self, own: str, allowed: tuple[str, ...]) -> None:
        self._all = ANY in allowed
        self._names = {name_of(name) for name in ("localhost", *allowed)} | {own.lower().rstrip(".")}

    def check(self, header: bytes | None) -> None:
        """Refuse the Host of another site. A request without one does not come from a browser."""
        if self._all or header is None:
            return
        name = name_of(header.decode("latin-1"))
        if name not in self._names and not name.endswith(".localhost") and not is_address(name):
            raise HttpError(
                421,
                f"this server does not answer to the host name {shorten(name)!r}; use its address, or start it with "
                f"--allowed-hosts {shorten(name)}, or with API keys",
                code="host_not_allowed",
            )


def name_of(header: str) -> str:
    """The name in a Host header, without its port.

    >>> name_of("Example.org:8000"), name_of("[::1]:80"), name_of("a.")
    ('example.org', '::1', 'a')
    """
    text = header.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].rstrip(".")


def is_address(name: str) -> bool:
    """
    >>> is_address("127.0.0.1"), is_address("::1"), is_address("127.0.0.1.evil.example")
    (True, True, False)
    """
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
