"""Fetching of images that rows name by URL.

Images are fetched from listed hosts only, within limits of time and size, once per machine.
"""

import time
import urllib.request
from collections.abc import Callable, Sequence
from hashlib import sha256
from http.client import HTTPException
from multiprocessing import TimeoutError as NotInTime
from multiprocessing.pool import ThreadPool
from pathlib import Path
from urllib.parse import urlsplit

from rlinf_vl.data.cache import build_once, cache_root
from rlinf_vl.data.unusable import NOT_FETCHED, ImageError, shorten

#: Time limit for a whole image, from the lookup of its host to its last byte, in seconds.
TIMEOUT_S = 30.0


def fetch(
    url: str, hosts: Sequence[str], max_bytes: int, check: Callable[[bytes], object]
) -> bytes:
    """Return the content of an http(s) URL of one of `hosts`.

    The content is cached under `cache_root()` if `check` accepts it.

    Raises:
        ImageError: the host of the URL, or of a redirect, is not listed (case and port don't
            matter); or there is no complete answer within `TIMEOUT_S`; or it exceeds `max_bytes`.
    """
    _check_host(url, hosts)

    def build(path: Path) -> None:
        # In a thread, since the time-out of a socket restarts with every byte that a host sends.
        with ThreadPool(1) as thread:
            try:
                data = thread.apply_async(_read, (url, hosts, max_bytes)).get(TIMEOUT_S)
            except NotInTime:
                raise _not_fetched(url, f": not complete after {TIMEOUT_S:g} s") from None
        check(data)
        path.write_bytes(data)

    name = sha256(url.encode(errors="surrogatepass")).hexdigest()
    return build_once(cache_root() / "fetched" / name, build).read_bytes()


def _not_fetched(url: str, reason: str) -> ImageError:
    return ImageError(NOT_FETCHED, f"{shorten(url)!r}{reason}")


def _check_host(url: str, hosts: Sequence[str]) -> None:
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError as e:
        raise _not_fetched(url, f" is no URL: {e}") from e
    if parts.scheme not in ("http", "https") or host not in [listed.lower() for listed in hosts]:
        allowed = f"images and videos are fetched from the hosts in data.image_hosts only, which are {', '.join(hosts) or 'none'}"
        raise _not_fetched(
            url, f": {allowed}; list it there, or download the file beside the data set"
        )
    # Parsers disagree on the host of such a URL: the check could see another host than the client.
    if "@" in parts.netloc or "\\" in parts.netloc:
        raise _not_fetched(url, ": a URL with a user in it is not fetched")


def _read(url: str, hosts: Sequence[str], max_bytes: int) -> bytes:
    # The client follows redirects by itself: each target must be a listed host, too.
    class RedirectToListed(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, req, fp, code, msg, headers, newurl):
            _check_host(newurl, hosts)
            return super().redirect_request(req, fp, code, msg, headers, newurl)

    deadline = time.monotonic() + TIMEOUT_S
    data = bytearray()
    try:
        with urllib.request.build_opener(RedirectToListed).open(url, timeout=TIMEOUT_S) as response:
            while (
                time.monotonic() < deadline
                and len(data) <= max_bytes
                and (chunk := response.read1(2**16))
            ):
                data += chunk
            missing_bytes = response.length
    except ImageError:  # raised by a redirect
        raise
    except (OSError, HTTPException, ValueError) as e:
        raise _not_fetched(url, f" can't be fetched: {e}") from e
    if len(data) > max_bytes:
        raise _not_fetched(url, f": more than {max_bytes:,} bytes")
    if missing_bytes:
        raise _not_fetched(url, f": the connection ended {missing_bytes} bytes early")
    return bytes(data)
