"""The web tool against a real server on loopback: what it may ask, what it shows, what it refuses."""

import asyncio
import contextlib
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from agentrl.env.compose import ComposedEnv
from agentrl.errors import ConfigError
from agentrl.testing.policy import ScriptedPolicy, call, play
from agentrl.tools.html import html_to_text
from agentrl.tools.http import Http
from agentrl.types import Task

PAGE = b"""<html><head><title> The page </title><style>p {color: red}</style></head><body>
<h1>Hello</h1><script>alert("no")</script><p>One &amp; two,
three.</p><ul><li>a <a href="https://x.test/y">link</a></li><li>b</li></ul></body></html>"""


class Site(BaseHTTPRequestHandler):
    asked: list[str] = []  # noqa: RUF012

    def do_GET(self):
        Site.asked.append(f"{self.headers['Host']}{self.path}")
        path, _, query = self.path.partition("?")
        if path == "/to":
            return self.answer(b"", 302, location=query)
        if path == "/slow":
            time.sleep(0.5)
        if path == "/drip":
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(100):
                    self.wfile.write(b"x")
                    time.sleep(0.02)
            return None
        answers = {
            "/": (PAGE, "text/html; charset=utf-8"),
            "/big": (b"0123456789" * 1000, "text/plain"),
            "/huge": (b"y" * 5_000_000, "text/plain"),
            "/json": (b'{"a": 1}', "application/json"),
            "/latin": ("näh".encode("latin-1"), "text/plain; charset=iso-8859-1"),
            "/strange": (b"ok", "text/plain; charset=no-such"),
            "/image": (b"\x89PNG", "image/png"),
        }
        body, kind = answers.get(path, (b"nothing here", "text/plain"))
        headers = {"content-encoding": "gzip"} if path == "/packed" else {}
        return self.answer(body, 200 if path in answers or path == "/packed" else 404, kind, **headers)

    def answer(self, body, status, kind="text/plain", **headers):
        self.send_response(status)
        for name, value in {"content-type": kind, "content-length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def port():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def nothing_asked():
    Site.asked.clear()


def local(port, **options):
    return Http([f"127.0.0.1:{port}"], allow_private=True, **options)


@pytest.fixture
def names(monkeypatch):
    """A name service of our own: name to the addresses of one lookup after another."""
    book: dict[str, list[list[str]]] = {}
    lookups: list[str] = []

    async def getaddrinfo(self, host, port, **_):
        lookups.append(host)
        if host not in book:
            raise socket.gaierror(-2, "Name or service not known")
        answers = book[host]
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    book["lookups"] = lookups  # type: ignore[assignment]
    return book


async def test_a_page_is_read_as_text(port):
    text = await local(port).fetch(f"http://127.0.0.1:{port}/")
    assert text == "The page\n\nHello\n\nOne & two,\nthree.\n\n- a link (https://x.test/y)\n\n- b"
    assert await local(port).fetch(f"http://127.0.0.1:{port}/json") == '{"a": 1}'
    assert await local(port).fetch(f"http://127.0.0.1:{port}/latin") == "näh"
    assert await local(port).fetch(f"http://127.0.0.1:{port}/strange") == "ok"
    assert await local(port).fetch(f"http://127.0.0.1:{port}/gone") == "[status 404]\nnothing here"


async def test_a_long_page_is_read_in_parts_and_a_huge_one_is_cut(port):
    first = await local(port).fetch(f"http://127.0.0.1:{port}/big")
    assert first.endswith("789\n[... 2000 more characters: fetch again with start=8000]")
    assert await local(port).fetch(f"http://127.0.0.1:{port}/big", start=9995) == "56789"
    assert await local(port).fetch(f"http://127.0.0.1:{port}/big", start=99_999) == "[empty]"
    huge = await local(port, max_bytes=1000).fetch(f"http://127.0.0.1:{port}/huge")
    assert huge == "y" * 1000 + "\n[the rest was left out: the page has more than 1000 bytes]"


@pytest.mark.parametrize("path", ["/slow", "/drip"])
async def test_the_time_limit_holds_for_the_whole_answer(port, path):
    with pytest.raises(TimeoutError, match=r"no complete answer after 0\.2 s"):
        await local(port, timeout_s=0.2).fetch(f"http://127.0.0.1:{port}{path}")


@pytest.mark.parametrize(("path", "text"), [("/image", "image/png, not text"), ("/packed", "compressed")])
async def test_what_is_no_text_is_refused(port, path, text):
    with pytest.raises(ValueError, match=text):
        await local(port).fetch(f"http://127.0.0.1:{port}{path}")


@pytest.mark.parametrize("options", [{}, {"hosts": []}, {"hosts": "example.org"}])
def test_without_a_list_of_hosts_it_is_off(options):
    with pytest.raises(ConfigError, match="is off until hosts are listed"):
        ComposedEnv(tools=[{"use": "agentrl.tools.http:Http", "options": options}])


@pytest.mark.parametrize("host", ["", "*", "*.", "http://a.test", "a.test/x", "a.*.test", "u@a.test", "a:x", 3])
def test_an_entry_that_is_no_host_is_refused(host):
    with pytest.raises(ConfigError, match=r"host .*: write example\.org"):
        Http([host])


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("http://other.test/", PermissionError),
        ("http://wiki.test.evil.test/", PermissionError),
        ("http://evilwiki.test/", PermissionError),
        ("http://sub.test/", PermissionError),  # *.sub.test is what lies below it
        ("http://wiki.test:22/", PermissionError),
        ("https://wiki.test:80/", PermissionError),
        ("http://me:pw@wiki.test/", ValueError),
        ("http://wiki.test@other.test/", ValueError),
        ("ftp://wiki.test/", ValueError),
        ("file:///etc/passwd", ValueError),
        ("wiki.test", ValueError),
        ("http://[::1", ValueError),
        ("http://wiki.test:99999/", ValueError),
        ("", ValueError),
    ],
)
async def test_only_listed_hosts_and_ports_are_asked(names, url, error):
    with pytest.raises(error):
        await Http(["wiki.test", "*.sub.test"]).fetch(url)
    assert names["lookups"] == []


PRIVATE = [
    "127.0.0.1", "10.1.2.3", "192.168.1.1", "172.16.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
    "::1", "::", "fe80::1", "fc00::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::",
]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
async def test_a_listed_name_that_points_inside_is_refused(names, address):
    names["wiki.test"] = [["93.184.216.34", address]]
    with pytest.raises(PermissionError, match=r"wiki\.test is not on the public internet"):
        await Http(["wiki.test"]).fetch("http://wiki.test/")


async def test_loopback_by_number_needs_both_the_list_and_the_permission(port):
    with pytest.raises(PermissionError, match="not on the public internet"):
        await Http([f"127.0.0.1:{port}"]).fetch(f"http://127.0.0.1:{port}/")
    for other in ("http://localhost", "http://[::1]", "http://2130706433"):  # other spellings of the same place
        with pytest.raises(PermissionError, match="is not allowed"):
            await local(port).fetch(f"{other}:{port}/")
    assert Site.asked == []


async def test_a_redirect_is_checked_like_a_first_request(port, names):
    names["wiki.test"], names["127.0.0.1"] = [["127.0.0.1"]], [["127.0.0.1"]]
    http = Http([f"wiki.test:{port}"], allow_private=True)
    assert await http.fetch(f"http://wiki.test:{port}/to?/json") == '{"a": 1}'
    assert Site.asked == [f"wiki.test:{port}/to?/json", f"wiki.test:{port}/json"]
    with pytest.raises(PermissionError, match=rf"127\.0\.0\.1:{port} is not allowed"):
        await http.fetch(f"http://wiki.test:{port}/to?http://127.0.0.1:{port}/json")
    with pytest.raises(ValueError, match="write http"):
        await http.fetch(f"http://wiki.test:{port}/to?file:///etc/passwd")
    loop = f"http://wiki.test:{port}/to?/to?/to?/to?/to?/to?/to?/json"
    with pytest.raises(ValueError, match="more than 2 redirects"):
        await Http([f"wiki.test:{port}"], allow_private=True, max_redirects=2).fetch(loop)


async def test_the_checked_address_is_the_one_that_is_asked(port, names):
    # The second answer of the name service leads elsewhere; nobody asks for it.
    names["wiki.test"] = [["127.0.0.1"], ["192.0.2.1"]]
    http = Http([f"wiki.test:{port}"], allow_private=True, timeout_s=2)
    assert await http.fetch(f"http://wiki.test:{port}/json") == '{"a": 1}'
    assert names["lookups"] == ["wiki.test"]
    assert Site.asked == [f"wiki.test:{port}/json"]


async def test_a_host_that_is_not_there_is_an_observation_listed_or_not(names):
    http = Http(["gone.test", "*.wiki.test"])
    with pytest.raises(ConnectionError, match=r"there is no host gone\.test"):
        await http.fetch("http://gone.test/")
    names["gone.test"] = names["deep.wiki.test"] = [["127.0.0.1"]]
    closed = Http(["gone.test:1", "*.wiki.test:1"], allow_private=True)
    with pytest.raises(ConnectionError, match=r"gone\.test:1: no connection"):
        await closed.fetch("http://gone.test:1/")
    with pytest.raises(ConnectionError, match=r"deep\.wiki\.test:1: no connection"):
        await closed.fetch("http://deep.wiki.test:1/")
    with pytest.raises(ConnectionError, match=r"there is no host made-up\.wiki\.test"):
        await http.fetch("http://made-up.wiki.test/")


async def test_the_policy_reads_what_went_wrong(port):
    entry = {
        "use": "agentrl.tools.http:Http",
        "options": {"hosts": [f"127.0.0.1:{port}"], "allow_private": True},
    }
    script = [
        call("fetch", url=f"http://127.0.0.1:{port}/json"),
        call("fetch", url="http://elsewhere.test/"),
        call("fetch", url="http://\x00/"),
    ]
    episode = await play(ComposedEnv(tools=[entry]), Task("t", {"prompt": "Read."}), ScriptedPolicy(script))
    results = [turn.observation[0].content for turn in episode.turns[:3]]
    assert results[0] == '{"a": 1}'
    assert results[1].startswith(
        "Error: PermissionError: elsewhere.test:80 is not allowed; the hosts are: 127.0.0.1"
    )
    assert results[2].startswith("Error: ")


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("plain", "plain"),
        ("<p>a<p>b<br>c", "a\nb\nc"),
        ("<table><tr><td>1<td>2</table>", "| 1 | 2"),
        ("<div><svg><title>x</title></svg>seen</div>", "x\nseen"),
        ("<script>if (a < b) {}</script>after", "after"),
        ("<a href='#x'>here</a> <a>there", "here there"),
        ("<img alt='a cat'><!-- gone -->", "[a cat]"),
        ("<p <b>&#x1F642; &nosuch;", "🙂 &nosuch;"),
        ("<html><head><meta charset=utf-8><title>T</title><body><p>text</html>", "T\n\ntext"),
        ("<head><title>T</title><style>p {}</style><h1>text</h1>", "T\n\ntext"),
    ],
)
def test_bad_html_is_read_all_the_same(page, text):
    assert html_to_text(page) == text
