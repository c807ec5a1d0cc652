"""Which addresses lead to files of the folder, and which are allowed; settings that are refused."""

import os

import pytest

from rlinf_vl.extras.browser.pages import ORIGIN, PageSource


@pytest.fixture
def source(tmp_path) -> PageSource:
    folder = tmp_path / "pages"
    (folder / "sub").mkdir(parents=True)
    for name in ("index.html", "a b.html", "sub/index.html", "sub/x.js"):
        (folder / name).write_text("")
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "out.txt").symlink_to(tmp_path / "secret.txt")
    (folder / "up").symlink_to(tmp_path)
    (folder / "in.js").symlink_to(folder / "sub" / "x.js")
    return PageSource.from_settings(str(folder), ["https://Example.org/shop/", "http://a.test:81"])


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/", "index.html"),
        ("", "index.html"),
        ("/index.html?seed=1#top", "index.html"),
        ("/a%20b.html", "a b.html"),
        ("/sub", "sub/index.html"),
        ("/sub/../index.html", "index.html"),
        ("/in.js", "sub/x.js"),
        ("/none.html", None),
        ("/../secret.txt", None),
        ("/%2e%2e/secret.txt", None),
        ("/..%2fsecret.txt", None),
        ("//etc/passwd", None),
        ("/%2fetc%2fpasswd", None),
        ("/out.txt", None),
        ("/up/secret.txt", None),
        ("/up/pages/index.html", "index.html"),
        ("/%00", None),
        ("/" + "x" * 5000, None),
    ],
)
def test_files_of_the_folder_and_none_outside(source: PageSource, path: str, name) -> None:
    file = source.file_of(ORIGIN + path)
    assert file == (None if name is None else source.folder / name) or (
        file is not None and os.path.samefile(file, source.folder / name)
    )


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "http://pages.invalid/index.html",
        "https://pages.invalid:8000/index.html",
        "https://user@pages.invalid/index.html",
        "https://pages.invalid.evil.test/index.html",
        "https://pages.invalid:x/index.html",
    ],
)
def test_other_origins_are_no_folder(source: PageSource, url: str) -> None:
    assert source.file_of(url) is None


@pytest.mark.parametrize(
    ("url", "is_allowed"),
    [
        ("https://example.org/shop", True),
        ("https://example.org/shop/", True),
        ("https://example.org:443/shop/cart?x=1", True),
        ("http://a.test:81/anything/below", True),
        ("https://example.org/shopping", False),
        ("https://example.org/", False),
        ("http://example.org/shop/", False),
        ("https://example.org:8443/shop/", False),
        ("https://example.org/shop/../admin", False),
        ("https://example.org/shop/%2e%2e/admin", False),
        ("https://example.org/shop/%252e%252e/admin", False),
        ("https://example.org/shop/..%5cadmin", False),
        ("https://x@example.org/shop/", False),
        ("https://example.org.evil.test/shop/", False),
        ("http://a.test/anything", False),
        ("ftp://example.org/shop/", False),
        ("file:///shop/", False),
    ],
)
def test_the_list_allows_what_is_below_its_entries(
    source: PageSource, url: str, is_allowed
) -> None:
    assert source.allows(url) == is_allowed


def test_a_start_page_is_a_file_or_an_allowed_address(source: PageSource) -> None:
    assert source.address_of("sub/index.html") == f"{ORIGIN}/sub/index.html"
    assert source.address_of("index.html?level=2") == f"{ORIGIN}/index.html?level=2"
    assert source.address_of("https://example.org/shop/1") == "https://example.org/shop/1"
    for url, reason in (
        ("none.html", "there is no file 'none.html'"),
        ("../secret.txt", "there is no file"),
        ("https://elsewhere.org/", "is not in allow="),
        ("file:///etc/passwd", "is not in allow="),
    ):
        with pytest.raises(ValueError, match=reason):
            source.address_of(url)
    with pytest.raises(ValueError, match="give folder"):
        PageSource(None).address_of("index.html")


@pytest.mark.parametrize(
    ("folder", "allow", "reason"),
    [
        ("pages", (), "'pages' is relative; write the whole path, as in /"),
        ("/no/such/folder", (), "is no folder on this machine"),
        (
            None,
            "https://example.org",
            r"must be a list of addresses; write \['https://example.org'\]",
        ),
        (None, ["example.org"], "'example.org' is no address; write http://"),
        (None, ["file:///etc"], "is no address"),
        (None, ["https://me@example.org"], "is no address"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(folder, allow, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        PageSource.from_settings(folder, allow)
