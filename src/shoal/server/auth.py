"""Authentication: API keys, and the salt that keeps the cached prefixes of tenants apart.

Owns the comparison of keys; knows only their hashes. Knows no routes. A key's limits are enforced by the ledger
(limits.py), its right to set priorities in rules.py, and access to admin pages where they are served.
"""

import base64
import hashlib
import hmac
from collections.abc import Mapping

from shoal.keys.api_key import ApiKey, KeySource, digest_of, no_keys
from shoal.server.errors import HttpError

_HOW = "send it as 'Authorization: Bearer KEY'"
BEARER, BASIC = b"Bearer", b'Basic realm="shoal", charset="UTF-8"'  # browsers prompt for a password on the second


class Keys:
    """The API keys in force.

    >>> keys = Keys(lambda: [ApiKey(name="alice", digest=digest_of("sk-12345678"))])
    >>> keys.find(b"Bearer sk-12345678").name
    'alice'
    """

    def __init__(self, source: KeySource = no_keys) -> None:
        self._source = source

    @property
    def needed(self) -> bool:
        return bool(self._source())

    def find(self, header: bytes | None, offers: bytes = BEARER) -> ApiKey | None:
        """The key in an Authorization header; None where no keys are needed. Raises a 401 with how to send one."""
        known = self._source()
        if not known:
            return None
        if header is None:
            raise _unauthorized(f"an API key is required; {_HOW}", offers)
        given = _key_in(header)
        if given is None:
            raise _unauthorized(f"the Authorization header does not use the Bearer scheme; {_HOW}", offers)
        digest = digest_of(given)
        found: ApiKey | None = None
        for key in known:  # always all of them, so that the time taken does not reveal which one matched
            if hmac.compare_digest(key.digest, digest):
                found = key
        if found is None:
            raise _unauthorized(f"unknown API key; {_HOW}", offers)
        return found


def sent_key(headers: Mapping[bytes, bytes]) -> bytes | None:
    """The Authorization header, or Anthropic's own as one.

    >>> sent_key({b"x-api-key": b"sk-12345678"})
    b'Bearer sk-12345678'
    """
    own = headers.get(b"x-api-key")
    return headers.get(b"authorization") or (None if own is None else b"Bearer " + own)


def _key_in(header: bytes) -> bytes | None:
    """A bearer token, or the password of Basic with any user name, which is how a browser can send a key."""
    scheme, _, rest = header.partition(b" ")
    if scheme.lower() == b"bearer":
        return rest.strip()
    if scheme.lower() == b"basic":
        try:
            return base64.b64decode(rest.strip(), validate=True).partition(b":")[2]
        except ValueError:
            return None
    return None


def _unauthorized(message: str, offers: bytes) -> HttpError:
    return HttpError(
        401, message, type="authentication_error", code="invalid_api_key", headers=((b"www-authenticate", offers),)
    )


def salt_of(secret: bytes, tenant: str, requested: str) -> str:
    """Which cached prefixes a request may share. No requested salt yields another tenant's.

    `secret` is random per start, so a known tenant name and salt are not enough to compute it.

    >>> salt_of(b"secret", "alice", "") == salt_of(b"secret", "bob", "")
    False
    >>> salt_of(b"secret", "", "")  # no keys and no salt: all requests share
    ''
    """
    if not tenant and not requested:
        return ""
    return hmac.new(secret, f"{tenant}\0{requested}".encode(), hashlib.sha256).hexdigest()
