"""The Chromium of a process: one browser for all its episodes, driven by Playwright in a thread.

Each episode has a `Tab`: a page in a context of its own, so that cookies, storage and cache are
its own, too. A browser that has died is replaced when the next tab is opened; the tabs that it had
fail. Methods of `Tab` are coroutines of the host's event loop: `BrowserHost.call` runs them.
"""

import asyncio
import atexit
import importlib.util
import json
import logging
import os
import shutil
import threading
from collections import defaultdict
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlinf_vl.errors import pip_install
from rlinf_vl.extras.browser.pages import PageSource

if TYPE_CHECKING:
    from playwright.async_api import Browser, Dialog, Page, Playwright, Route

log = logging.getLogger(__name__)

#: Programs that are looked for in PATH, unless CHROMIUM names one.
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
#: Names do not resolve, and what needs no name goes to a proxy that is not there.
NO_NETWORK = (
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--proxy-server=http://127.0.0.1:9",
    "--proxy-bypass-list=<-loopback>",
    "--webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--disable-quic",
)
#: A turn of the wheel then moves the page at once, not over several pictures.
_STEADY = ("--disable-smooth-scrolling",)
#: Seconds for starting a browser or opening a tab, and for closing either.
LAUNCH_S, _CLOSE_S = 30.0, 5.0
#: Characters of a dialog's text that are kept.
_MAX_DIALOG = 200
#: Replaces `Math.random` by a generator (mulberry32) with the episode's seed: a page that draws
#: from it looks alike for equal seeds. `Date` and other sources are the page's.
_SEEDED = """
(() => {
  let state = episode.seed >>> 0;
  Math.random = () => {
    state = (state + 0x6D2B79F5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296;
  };
})();
"""
T = TypeVar("T")


class TabFailure(Exception):
    """A page or the browser does not do what was asked: it crashed, hangs, or can't be loaded."""


@dataclass(frozen=True)
class TabSettings:
    """The page of an episode, and the size of its picture.

    Attributes:
        source: pages that may be loaded.
        address: the first of them.
        viewport: (width, height) of the picture in CSS pixels, from the page's upper left corner.
        window: (width, height) for which the page lays itself out; at least as large.
        scale: pixels of the picture for each of them.
        keep: whether the page stays loaded for a later episode, which its `startEpisode` begins.
        contract: JavaScript that runs before the page's own, and may define the functions of the
            contract for it.
    """

    source: PageSource
    address: str
    viewport: tuple[int, int]
    window: tuple[int, int]
    scale: float
    keep: bool
    contract: str = ""


@dataclass(eq=False)
class Tab:
    """One page in a context of its own, and what happened in it since the episode began."""

    settings: TabSettings
    page: "Page"
    dialogs: list[str] = field(default_factory=list)
    blocked: int = 0
    popups: int = 0
    has_crashed: bool = False

    async def begin(self, episode: dict[str, Any], is_loaded: bool) -> None:
        """Load the page, or draw it afresh, and call its `startEpisode` if it has one."""
        self.dialogs, self.blocked, self.popups = [], 0, 0
        # A column may hold values that JSON has not, such as a date: those become text.
        script = f"window.episode = {json.dumps(episode, default=str)};{_SEEDED}"
        if is_loaded:
            await self.page.evaluate(script)
        else:
            await self.page.add_init_script(script + self.settings.contract)
            await self.page.goto(self.settings.address)
            # `back` must not lead to the blank page on which a tab is opened.
            session = await self.page.context.new_cdp_session(self.page)
            await session.send("Page.resetNavigationHistory")
            await session.detach()
        await self.ask("startEpisode(episode)")

    async def ask(self, call: str) -> Any:
        """Return what a function of the page returns, as JSON has it; None if there is none."""
        name = call.partition("(")[0]
        return await self._evaluate(f"typeof {name} === 'function' ? {call} : null")

    async def _evaluate(self, expression: str) -> Any:
        try:
            return await self.page.evaluate(expression)
        except Exception as error:
            # The action may have led to another page: ask that one, once it is loaded.
            if "context was destroyed" not in str(error):
                raise
        await self.page.wait_for_load_state()
        return await self.page.evaluate(expression)

    async def has(self, name: str) -> bool:
        """Return whether the page has a function of this name."""
        return await self._evaluate(f"typeof {name} === 'function'")

    async def picture(self) -> bytes:
        """Return a picture of the viewport as PNG."""
        width, height = self.settings.viewport
        return await self.page.screenshot(
            type="png",
            scale="device",
            clip={"x": 0, "y": 0, "width": width, "height": height},
        )

    async def note_dialog(self, dialog: "Dialog") -> None:
        """Record a dialog and dismiss it: a page stands still until somebody does."""
        # The question whether to leave the page: staying would make `back` and links wait for ever.
        if dialog.type == "beforeunload":
            await dialog.accept()
            return
        self.dialogs.append(f"{dialog.type}: {dialog.message[:_MAX_DIALOG]}")
        await dialog.dismiss()

    async def note_popup(self, page: "Page") -> None:
        """Record a second page of the context and close it: pictures show the first one."""
        self.popups += 1
        await page.close()

    def note_crash(self, _: "Page") -> None:
        """Record that the page's process has ended."""
        self.has_crashed = True

    async def answer(self, route: "Route") -> None:
        """Answer a request of the page, and count it if it is refused."""
        try:
            self.blocked += not await self.settings.source.answer(route)
        except Exception as error:
            # Fetching failed, or the page is gone: for the page, the network failed.
            log.debug("%s: %s", route.request.url, error)
            with suppress(Exception):
                await route.abort("failed")


class BrowserHost:
    """The browser of this process, started for the first tab and replaced when it has died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._launch: asyncio.Task[None] | None = None
        self._playwright: Playwright | None = None
        self._browser: Browser | None = None
        self._idle: defaultdict[TabSettings, list[Tab]] = defaultdict(list)

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine in the host's thread and return its result.

        Raises:
            TabFailure: it did not end in time.
            Exception: what it raised.
        """
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                # The errors of a driver that was killed reach those who wait for it.
                self._loop.set_exception_handler(lambda _, context: log.debug("%s", context))
                threading.Thread(target=self._loop.run_forever, name="browser", daemon=True).start()
                # Before the interpreter's own threads end, so that Chromium leaves no files.
                atexit.register(self.close)
        future = asyncio.run_coroutine_threadsafe(_in_time(coroutine, timeout_s), self._loop)
        return future.result()

    async def open(self, settings: TabSettings, episode: dict[str, Any], timeout_s: float) -> Tab:
        """Return a tab in which the episode has begun, for which the page has `timeout_s`."""
        tab = self._idle_tab(settings)
        is_loaded = tab is not None
        if tab is None:
            tab = await self._new_tab(settings)
        try:
            await _in_time(tab.begin(episode, is_loaded), timeout_s)
        except BaseException:
            await self.shut(tab)
            raise
        return tab

    async def shut(self, tab: Tab, is_reusable: bool = False) -> None:
        """End a tab, or keep it for an episode with the same settings."""
        is_first_page = tab.page.url == tab.settings.address
        if tab.settings.keep and is_reusable and is_first_page and not tab.has_crashed:
            self._idle[tab.settings].append(tab)
            return
        # The browser may be gone, and its tabs with it.
        with suppress(Exception):
            async with asyncio.timeout(_CLOSE_S):
                await tab.page.context.close()

    def close(self) -> None:
        """End the browser; a later tab starts another one."""
        if self._loop is not None:
            with suppress(Exception):
                self.call(self._stop(), 2 * _CLOSE_S)

    def _idle_tab(self, settings: TabSettings) -> Tab | None:
        idle = self._idle[settings]
        while idle:
            tab = idle.pop()
            if not tab.page.is_closed() and not tab.has_crashed:
                return tab
        return None

    async def _new_tab(self, settings: TabSettings) -> Tab:
        """Open a tab, in a new browser if this one opens none."""
        browser = await self._running_browser()
        try:
            return await _in_time(_open_tab(browser, settings), LAUNCH_S)
        except Exception as error:
            log.warning("the browser opens no page and is replaced: %s", error)
        return await _open_tab(await self._running_browser(replace=browser), settings)

    async def _running_browser(self, replace: "Browser | None" = None) -> "Browser":
        """Return the browser, a new one if there is none or it is `replace`."""
        browser = self._browser
        # Several episodes may find the same browser dead: the first of them replaces it.
        if self._launch is None and (
            browser is None or browser is replace or not browser.is_connected()
        ):
            self._launch = asyncio.ensure_future(self._replace())
        if self._launch is not None:
            # Shielded: a launch that is given up half-way would leave its processes behind, and
            # the next episode waits for the same one.
            await asyncio.shield(self._launch)
        assert self._browser is not None
        return self._browser

    async def _replace(self) -> None:
        """End the browser if there is one, and start another."""
        from playwright.async_api import async_playwright

        try:
            await self._stop()
            self._playwright = playwright = await async_playwright().start()
            self._browser = await playwright.chromium.launch(
                executable_path=find_program(), args=[*NO_NETWORK, *_STEADY]
            )
        finally:
            self._launch = None

    async def _stop(self) -> None:
        # Taken away first: nobody opens a tab in what is being closed.
        browser, self._browser = self._browser, None
        playwright, self._playwright = self._playwright, None
        self._idle.clear()
        # Whatever does not answer is killed with the driver, by its own process's end.
        with suppress(Exception):
            async with asyncio.timeout(_CLOSE_S):
                if browser is not None:
                    await browser.close()
        with suppress(Exception):
            async with asyncio.timeout(_CLOSE_S):
                if playwright is not None:
                    await playwright.stop()


async def _open_tab(browser: "Browser", settings: TabSettings) -> Tab:
    """Open a tab in a context of its own."""
    width, height = settings.window
    context = await browser.new_context(
        viewport={"width": width, "height": height},
        device_scale_factor=settings.scale,
        accept_downloads=False,
        service_workers="block",  # their requests would not be seen here
    )
    tab = Tab(settings, await context.new_page())
    await context.route("**/*", tab.answer)
    tab.page.on("dialog", tab.note_dialog)
    tab.page.on("crash", tab.note_crash)
    context.on("page", tab.note_popup)
    return tab


async def _in_time(coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await coroutine
    except TimeoutError as error:
        if limit.expired():
            raise TabFailure(f"the page did not react within {timeout_s:g} s") from error
        raise


@cache
def find_program() -> str | None:
    """Return the path of the Chromium to start; None for the one that Playwright has installed."""
    named = os.environ.get("CHROMIUM")
    return named or next(filter(None, map(shutil.which, PROGRAMS)), None)


def check_installed() -> None:
    """Raise ImportError if there is no Playwright or no Chromium."""
    if importlib.util.find_spec("playwright") is None:
        raise ImportError(f"Playwright is not installed; {pip_install('rlinf_vl[browser]')}")
    program = find_program()
    if program is None and not list(_playwright_browsers().glob("chromium-*")):
        raise ImportError(
            f"no browser: neither does CHROMIUM name one nor is {', '.join(PROGRAMS)} in PATH; "
            "install Chromium, or run `playwright install chromium`"
        )
    if program is not None and shutil.which(program) is None:
        raise ImportError(f"CHROMIUM={program} is no program")


def _playwright_browsers() -> Path:
    default = Path.home() / ".cache" / "ms-playwright"
    return Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or default)


#: The browser of this process.
HOST = BrowserHost()
