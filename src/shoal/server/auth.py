"""Who asks: API keys, and the salt that keeps their cached prefixes apart.

Owns the comparison; knows only hashes. Knows no routes; what a key may ask for is decided in the engine, by the key's
name, and who may see what is decided where it is shown.
"""

import base64
import hashlib
import hmac

from shoal.keys.api_key import ApiKey, KeySource, digest_of, no_keys
from shoal.server.errors import HttpError

_HOW = "send it as 'Authorization: Bearer KEY'"
BEARER, BASIC = b"Bearer", b'Basic realm="shoal", charset="UTF-8"'  # a browser asks its user for the second


class Keys:
    """The keys that may ask.

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
        """The key in an Authorization header; None where no keys are needed. Raises a 401 that says how to send it."""
        known = self._source()
        if not known:
            return None
        if header is None:
            raise _unauthorized(f"an API key is needed; {_HOW}", offers)
        given = _key_in(header)
        if given is None:
            raise _unauthorized(f"the Authorization header is not of the kind Bearer; {_HOW}", offers)
        digest = digest_of(given)
        found: ApiKey | None = None
        for key in known:  # to the end, whichever it is: the time must not tell
            if hmac.compare_digest(key.digest, digest):
                found = key
        if found is None:
            raise _unauthorized(f"this API key is not known; {_HOW}", offers)
        return found


def _key_in(header: bytes) -> bytes | None:
    """A bearer token, or the password of Basic, under any name: that is how a browser can send a key."""
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


def salt_of(secret: bytes, tenant: str, asked: str) -> str:
    """Which cached prefixes a request may share. Nobody can make another tenant's, whatever salt it asks for.

    `secret` is the server's own and new with every start, so that not even a known name and salt make it.

    >>> salt_of(b"secret", "alice", "") == salt_of(b"secret", "bob", "")
    False
    >>> salt_of(b"secret", "", "")  # no keys, no wish: all share
    ''
    """
    if not tenant and not asked:
        return ""
    return hmac.new(secret, f"{tenant}\0{asked}".encode(), hashlib.sha256).hexdigest()
