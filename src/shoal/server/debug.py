"""What the server is doing right now, for those who run it: GET /debug/requests.

Owns who may look: an admin key where there are keys, else only this machine itself. Shows no prompts and no answers.
Knows the front it belongs to, and the engine only as an EngineClient.
"""

import ipaddress
from typing import Any

from shoal.server.errors import HttpError
from shoal.server.exchange import Exchange
from shoal.server.front_view import FrontView

FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-real-ip")  # somebody asks through a proxy on this machine
NEVER_KEPT = ((b"cache-control", b"no-store"),)


class Debug:
    """The handler."""

    def __init__(self, front: FrontView) -> None:
        self.front = front

    async def requests(self, exchange: Exchange) -> None:
        check_may_look(exchange)
        state: dict[str, Any] = await self.front.client.ask("state")
        requests = state.pop("requests", [])
        front = {"active": self.front.active, "streams": len(self.front.streams), "draining": self.front.draining}
        await exchange.reply_json({"engine": state, "front": front, "requests": requests}, headers=NEVER_KEPT)


def check_may_look(exchange: Exchange) -> None:
    if exchange.key is not None:
        if not exchange.key.admin:
            raise _forbidden("this API key may not see it; use one with 'admin: true' in the key file")
    elif not is_local(exchange):
        raise _forbidden(
            "without API keys only this machine itself may see it, and not through a proxy; ask from 127.0.0.1, or "
            "start the server with --api-keys-file and an admin key"
        )


def is_local(exchange: Exchange) -> bool:
    """Whether it came from a program on this machine, straight."""
    if any(name in exchange.headers for name in FORWARDED):
        return False
    try:
        address = ipaddress.ip_address((exchange.scope.get("client") or ("",))[0])
    except ValueError:
        return False
    return bool((getattr(address, "ipv4_mapped", None) or address).is_loopback)


def _forbidden(message: str) -> HttpError:
    return HttpError(403, message, type="permission_error", code="not_admin")
