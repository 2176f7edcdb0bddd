"""For the server's operators: what it is doing right now (GET /debug/requests), its latest passes (GET /debug/passes),
and restarting its engines one by one (POST /admin/restart).

Owns the access rule: an admin key where there are keys, else a direct connection from this machine. Shows no prompts or
answers. Knows the engines only as an EngineClient.
"""

import asyncio
import ipaddress
from typing import Any

from shoal.core.ports import EngineClient
from shoal.errors import EngineDown
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
        client = self.front.client
        front = {"active": self.front.active, "streams": len(self.front.streams), "draining": self.front.draining}
        if len(client.engines) == 1:
            state: dict[str, Any] = await client.ask("state")
            requests = state.pop("requests", [])
            await exchange.reply_json({"engine": state, "front": front, "requests": requests}, headers=NO_STORE)
            return
        states = await ask_engines(client, "state")
        requests = [{"engine": number, **one} for number, state in states.items() for one in state.pop("requests", ())]
        engines = [{"engine": one.number, "up": one.up, **states.get(one.number, {})} for one in client.engines]
        answer = {"engine": summed(states), "engines": engines, "front": front, "requests": requests}
        await exchange.reply_json(answer, headers=NO_STORE)

    async def passes(self, exchange: Exchange) -> None:
        """Sizes and times of the latest passes and requests of each engine, and what the engine is."""
        check_access(exchange)
        found = await ask_engines(self.front.client, "passes")
        if not found:
            raise EngineDown(self.front.client.trouble)
        engines = [{"engine": number, **seen} for number, seen in found.items()]
        await exchange.reply_json({"engines": engines}, headers=NO_STORE)

    async def restart(self, exchange: Exchange) -> None:
        check_access(exchange)
        await exchange.json_body()  # declared as JSON, it cannot come from a page of another site
        if self.front.restart_engines is None:
            raise HttpError(501, "this server has no supervisor that could restart its engines; restart it as a whole")
        self.front.restart_engines()
        await exchange.reply_json({"restarting": len(self.front.client.engines)}, 202)


async def ask_engines(client: EngineClient, what: str) -> dict[int, Any]:
    """The answer of each engine that gives one, by number."""

    async def ask(number: int) -> Any:
        try:
            return await client.ask(what, number)
        except EngineDown:
            return None

    numbers = [one.number for one in client.engines if one.up]
    answers = await asyncio.gather(*map(ask, numbers))
    return {number: answer for number, answer in zip(numbers, answers, strict=True) if answer is not None}


def summed(states: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """One state of all engines: numbers are added, parts too.

    >>> summed({0: {"running": 2, "blocks": {"held": 1}}, 1: {"running": 3, "blocks": {"held": 4}}})
    {'running': 5, 'blocks': {'held': 5}}
    """
    total: dict[str, Any] = {}
    for state in states.values():
        for name, value in state.items():
            if isinstance(value, dict):
                total[name] = summed({0: total.get(name, {}), 1: value})
            elif isinstance(value, int | float):
                total[name] = total.get(name, 0) + value
    return total


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
