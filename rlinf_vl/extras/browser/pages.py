"""The answers to what pages request: files of a folder, addresses of a list, and nothing else.

Chromium itself has no network. Every request of a page comes here (`PageSource.answer`): one for
`ORIGIN` is answered with a file of the folder, one that the list allows is fetched by Playwright,
any other is aborted and counted. What does not come here, such as a WebSocket, finds no network.
"""

import html
import re
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

if TYPE_CHECKING:
    from playwright.async_api import Route

#: Where the folder's pages are: a name that never resolves, so nothing is fetched from there.
ORIGIN = "https://pages.invalid"
_DEFAULT_PORTS = {"http": 80, "https": 443}
#: Addresses of one request, redirects followed.
_MAX_REDIRECTS = 10
#: The page in place of a redirect: the browser goes on by itself, and the new request comes here.
_FORWARD = '<!doctype html><meta http-equiv="refresh" content="0; url={}">'
#: Seconds for fetching one address.
_FETCH_S = 10.0


@dataclass(frozen=True)
class PageSource:
    """The pages that an episode may load.

    Attributes:
        folder: resolved path of the folder behind `ORIGIN`; None: no folder.
        allow: addresses whose pages may be loaded, with everything below their paths.
    """

    folder: Path | None
    allow: tuple[str, ...] = ()

    @classmethod
    def from_settings(cls, folder: str | None, allow: Iterable[str]) -> "PageSource":
        """Check the settings and return the source.

        Raises:
            ValueError: there is no such folder, or an address is none of http or https.
        """
        if isinstance(allow, str):
            raise ValueError(f"allow: {allow!r} must be a list of addresses; write ['{allow}']")
        for address in allow:
            if _parsed(address) is None:
                raise ValueError(
                    f"allow: {address!r} is no address; write http:// or https://, a host and "
                    "perhaps a path, as in https://example.org/shop/"
                )
        if folder is None:
            return cls(None, tuple(allow))
        # A worker's working directory is not the user's.
        if not Path(folder).is_absolute():
            raise ValueError(
                f"folder: {folder!r} is relative; write the whole path, as in "
                f"{Path(folder).resolve()}"
            )
        if not Path(folder).is_dir():
            raise ValueError(f"folder: {folder!r} is no folder on this machine")
        return cls(Path(folder).resolve(), tuple(allow))

    def address_of(self, url: str) -> str:
        """Return the whole address of a start page, a file of the folder or an allowed address.

        Raises:
            ValueError: it is neither.
        """
        if "://" in url:
            if self.allows(url):
                return url
            raise ValueError(
                f"url: {url!r} is not in allow={list(self.allow)}; add it there, or name a file of "
                "the folder"
            )
        if self.folder is None:
            raise ValueError(f"url: {url!r} is a file of a folder; give folder, or an address")
        address = f"{ORIGIN}/{url.lstrip('/')}"
        if self.file_of(address) is None:
            raise ValueError(f"url: there is no file {url!r} in the folder {self.folder}")
        return address

    def file_of(self, url: str) -> Path | None:
        """Return the file behind an address of `ORIGIN`; None if the folder has none."""
        address = _parsed(url)
        if (
            self.folder is None
            or address is None
            or f"{address.scheme}://{address.netloc}" != ORIGIN
        ):
            return None
        name = unquote(address.path).lstrip("/")
        if "\0" in name:
            return None
        try:
            path = (self.folder / name).resolve()
            path = path / "index.html" if path.is_dir() else path
            # Links are followed before the comparison: one that leads out of the folder is refused.
            is_inside = path.resolve().is_relative_to(self.folder) and path.is_file()
        except OSError:  # a name that is too long
            return None
        return path if is_inside else None

    def allows(self, url: str) -> bool:
        """Return whether the list holds an address, or one that it is below."""
        address = _parsed(url)
        # Servers read %2e%2e as "..", which would leave the allowed path.
        if address is None or ".." in re.split(r"[/\\]", unquote(unquote(address.path))):
            return False
        return any(_is_below(address, entry) for entry in map(_parsed, self.allow) if entry)

    async def answer(self, route: "Route") -> bool:
        """Answer a request of a page; return False if it was refused."""
        request = route.request
        if path := self.file_of(request.url):
            await route.fulfill(path=path)
        elif self.allows(request.url):
            return await self._fetch(route)
        else:
            await route.abort("blockedbyclient")
            return False
        return True

    async def _fetch(self, route: "Route") -> bool:
        """Answer with what an allowed address holds; follow only redirects that are allowed."""
        request, url = route.request, route.request.url
        for _ in range(_MAX_REDIRECTS):
            response = await route.fetch(url=url, max_redirects=0, timeout=_FETCH_S * 1000)
            is_redirect = HTTPStatus.MULTIPLE_CHOICES < response.status < HTTPStatus.BAD_REQUEST
            target = response.headers.get("location")
            if not is_redirect or target is None:
                await route.fulfill(response=response)
                return True
            target = urljoin(url, target)
            if not self.allows(target):
                break
            if request.is_navigation_request():
                await route.fulfill(
                    body=_FORWARD.format(html.escape(target)), content_type="text/html"
                )
                return True
            # The request's headers are for its own host.
            if _host(target) != _host(url):
                break
            url = target
        await route.abort("blockedbyclient")
        return False


def _parsed(url: str) -> SplitResult | None:
    """Return the parts of an http address without a user's name; None for anything else."""
    try:
        address = urlsplit(url)
        is_usable = address.scheme in _DEFAULT_PORTS and address.hostname and address.port != 0
    except ValueError:  # a port that is no number
        return None
    return address if is_usable and "@" not in address.netloc else None


def _host(url: str) -> tuple[str, str | None, int] | None:
    address = _parsed(url)
    if address is None:
        return None
    return address.scheme, address.hostname, address.port or _DEFAULT_PORTS[address.scheme]


def _is_below(address: SplitResult, entry: SplitResult) -> bool:
    path = entry.path.rstrip("/")
    is_below = address.path == path or address.path.startswith(path + "/") or not path
    return is_below and _host(address.geturl()) == _host(entry.geturl())
