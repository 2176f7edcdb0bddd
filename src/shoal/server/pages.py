"""The static pages: the chat page, the API's documentation and what they load.

Owns which files may be served: exactly those beside it in static/, read once. Knows no API.
"""

import hashlib
from dataclasses import dataclass
from importlib.resources import files

KINDS = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
    "png": b"image/png",
    "ico": b"image/x-icon",
    "woff2": b"font/woff2",
}
PAGES = {"/": "index.html", "/docs": "docs.html", "/live": "live.html"}
# Pages run only scripts of this server and connect only to it.
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    b"font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True)
class Page:
    body: bytes
    kind: bytes
    tag: bytes

    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        return (
            (b"etag", self.tag),
            (b"cache-control", b"no-cache"),  # revalidate each time; the etag makes that cheap
            (b"content-security-policy", POLICY),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
        )


def load_pages() -> dict[str, Page]:
    """Path → page."""
    found: dict[str, Page] = {}
    folder = files("shoal.server") / "static"
    if not folder.is_dir():
        return found
    for file in folder.iterdir():
        ending = file.name.rpartition(".")[2]
        if ending in KINDS and file.is_file():
            body = file.read_bytes()
            tag = b'"%b"' % hashlib.sha256(body).hexdigest()[:32].encode()
            found[f"/static/{file.name}"] = Page(body, KINDS[ending], tag)
    for path, name in PAGES.items():
        if f"/static/{name}" in found:
            found[path] = found[f"/static/{name}"]
    return found
