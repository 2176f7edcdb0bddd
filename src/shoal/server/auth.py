"""Who asks: API keys.

Owns the comparison; keeps only hashes. Knows no routes and no limits: those belong to the engine, by the key's name.
"""

import hashlib
import hmac

from shoal.server.errors import HttpError

_HOW = "send it as 'Authorization: Bearer KEY'"


class Keys:
    """The keys that may ask.

    >>> Keys((("alice", "sk-12345678"),)).tenant(b"Bearer sk-12345678")
    'alice'
    """

    def __init__(self, keys: tuple[tuple[str, str], ...]) -> None:
        self._known = [(name, hashlib.sha256(key.encode()).digest()) for name, key in keys]

    def tenant(self, header: bytes | None) -> str:
        """The name of the key in an Authorization header; "" where no keys are needed. Raises a 401."""
        if not self._known:
            return ""
        if header is None:
            raise _unauthorized(f"an API key is needed; {_HOW}")
        scheme, _, key = header.partition(b" ")
        if scheme.lower() != b"bearer":
            raise _unauthorized(f"the Authorization header is not of the kind Bearer; {_HOW}")
        digest = hashlib.sha256(key.strip()).digest()
        found = None
        for name, known in self._known:  # to the end, whichever it is: the time must not tell
            if hmac.compare_digest(known, digest):
                found = name
        if found is None:
            raise _unauthorized(f"this API key is not known; {_HOW}")
        return found


def _unauthorized(message: str) -> HttpError:
    return HttpError(
        401, message, type="authentication_error", code="invalid_api_key", headers=((b"www-authenticate", b"Bearer"),)
    )
