"""Images that rows name by URL: fetched from listed hosts only, within a time and a size, once per machine."""

import time
import urllib.request
from collections.abc import Callable, Sequence
from hashlib import sha256
from http.client import HTTPException
from multiprocessing import TimeoutError as NotInTime
from multiprocessing.pool import ThreadPool
from pathlib import Path
from urllib.parse import urlsplit

from rlinf_vl.data import shorten
from rlinf_vl.data.cache import build_once, cache_root

#: Seconds for a whole image, from looking up its host to its last byte.
TIMEOUT_S = 30.0


class FetchError(Exception):
    """A URL that isn't fetched, or couldn't be."""


def fetch(url: str, hosts: Sequence[str], max_bytes: int, check: Callable[[bytes], object]) -> bytes:
    """The content of an http(s) URL of one of `hosts`, from `cache_root()` after the first time; cached if `check` accepts it.

    Raises:
        FetchError: the host of the URL, or of one that it redirects to, is not listed (case and port don't matter); no
            complete answer within `TIMEOUT_S`, or one above `max_bytes`.
    """
    _check_host(url, hosts)

    def build(path: Path) -> None:
        # In a thread, as the time-out of a socket begins anew with every byte that a host sends.
        with ThreadPool(1) as thread:
            try:
                data = thread.apply_async(_read, (url, hosts, max_bytes)).get(TIMEOUT_S)
            except NotInTime:
                raise FetchError(f"{_shown(url)}: not complete after {TIMEOUT_S:g} s") from None
        check(data)
        path.write_bytes(data)

    name = sha256(url.encode(errors="surrogatepass")).hexdigest()
    return build_once(cache_root() / "fetched" / name, build).read_bytes()


def _check_host(url: str, hosts: Sequence[str]) -> None:
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError as e:
        raise FetchError(f"{_shown(url)} is no URL: {e}") from e
    if parts.scheme not in ("http", "https") or host not in [listed.lower() for listed in hosts]:
        raise FetchError(
            f"{_shown(url)}: images are fetched from the hosts in data.image_hosts only, which are "
            f"{', '.join(hosts) or 'none'}; list it there, or download the images beside the dataset"
        )
    if "@" in parts.netloc or "\\" in parts.netloc:  # which part is the host is read in more than one way
        raise FetchError(f"{_shown(url)}: a URL with a user in it is not fetched")


def _read(url: str, hosts: Sequence[str], max_bytes: int) -> bytes:
    class RedirectToListed(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, req, fp, code, msg, headers, newurl):
            _check_host(newurl, hosts)
            return super().redirect_request(req, fp, code, msg, headers, newurl)

    opener = urllib.request.build_opener(RedirectToListed)
    deadline = time.monotonic() + TIMEOUT_S
    data = bytearray()
    try:
        with opener.open(url, timeout=TIMEOUT_S) as response:
            while time.monotonic() < deadline and (chunk := response.read1(2**16)):
                data += chunk
                if len(data) > max_bytes:
                    raise FetchError(f"{_shown(url)}: more than {max_bytes:,} bytes")
            if response.length:
                raise FetchError(f"{_shown(url)}: the connection ended {response.length} bytes early")
    except (OSError, HTTPException, ValueError) as e:
        raise FetchError(f"{_shown(url)} can't be fetched: {e}") from e
    return bytes(data)


def _shown(url: str) -> str:
    return repr(shorten(url))
