"""What the server is doing right now, for its operators: GET /debug/requests.

Owns the access rule: an admin key where there are keys, else a direct connection from this machine. Shows no prompts or
answers. Knows the engine only as an EngineClient.
"""

import ipaddress
from typing import Any

from shoal.server.errors import HttpError
from shoal.server.exchange import Exchange
from shoal.server.front_view import FrontView

FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-real-ip")  # set by a proxy
NO_STORE = ((b"cache-control", b"no-store"),)


class Debug:
    """The handler."""

    def __init__(self, front: FrontView) -> None:
        self.front = front

    async def requests(self, exchange: Exchange) -> None:
        check_access(exchange)
        state: dict[str, Any] = await self.front.client.ask("state")
        requests = state.pop("requests", [])
        front = {"active": self.front.active, "streams": len(self.front.streams), "draining": self.front.draining}
        await exchange.reply_json({"engine": state, "front": front, "requests": requests}, headers=NO_STORE)


def check_access(exchange: Exchange) -> None:
    if exchange.key is not None:
        if not exchange.key.admin:
            raise _forbidden("this needs an admin API key; use one with 'admin: true' in the key file")
    elif not is_local(exchange):
        raise _forbidden(
            "without API keys this is served only to direct connections from this machine; connect to 127.0.0.1, or "
            "start the server with --api-keys-file and an admin key"
        )


def is_local(exchange: Exchange) -> bool:
    """Whether the request came directly from this machine."""
    if any(name in exchange.headers for name in FORWARDED):
        return False
    try:
        address = ipaddress.ip_address((exchange.scope.get("client") or ("",))[0])
    except ValueError:
        return False
    return bool((getattr(address, "ipv4_mapped", None) or address).is_loopback)


def _forbidden(message: str) -> HttpError:
    return HttpError(403, message, type="permission_error", code="not_admin")
