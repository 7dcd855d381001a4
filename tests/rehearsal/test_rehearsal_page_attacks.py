"""Attacks on the web page of the rehearsal: by other pages, by addresses and by texts of jobs."""

import base64
import hashlib
import json
import random
import re
from types import SimpleNamespace
from urllib.parse import quote

import hostile_texts
import pytest
from page_site import (
    ORIGIN,
    TOKEN,
    running,
    site_of_jobs,  # noqa: F401  the fixture site
    with_query,
)
from test_rehearsal_report import HOSTILE_TEXT, Page, elements_of
from werkzeug.test import Client, TestResponse
from werkzeug.wrappers import Response

from sagemaker_rehearsal.web import access, stream

ROUTES = ["/", *(access.PATH + name for name in ("stream", "log", "file"))]
ORDERS = [access.PATH + name for name in ("interrupt", "stop")]


def check_nothing_revealed(response: TestResponse, status: int = 403) -> None:
    """Check that an answer says nothing of jobs."""
    assert response.status_code == status
    assert response.content_type.startswith("text/plain")
    assert "digits" not in response.text and TOKEN not in response.text


@pytest.mark.parametrize("path", ROUTES + ORDERS)
@pytest.mark.parametrize("token", [None, "", "x", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "ü"])
def test_without_the_token_nothing_is_answered_or_done(site, path, token):
    arn = site.add(running())
    if path in ORDERS:
        response = site.post(path, {}, token=token, job=arn)
    else:
        response = site.get(path, token=token, job=arn)
    check_nothing_revealed(response)
    assert "the address that the rehearsal has printed" in response.text
    assert (
        site.service.jobs[arn].control.messages.empty() and not site.service.jobs[arn].control.stop
    )


FOREIGN_HEADERS = {
    "another origin": {"Origin": "http://evil.com"},
    "another port": {"Origin": "http://127.0.0.1:8888"},
    "another scheme": {"Origin": "https://127.0.0.1:4571"},
    "its name in another's": {"Origin": "http://127.0.0.1:4571.evil.com"},
    "a file": {"Origin": "null"},
    "an empty one": {"Origin": ""},
    "another site": {"Origin": ORIGIN, "Sec-Fetch-Site": "cross-site"},
    "another port of the site": {"Origin": ORIGIN, "Sec-Fetch-Site": "same-site"},
    "another host": {"Origin": "http://evil.com:4571", "Host": "evil.com:4571"},
    "a name of its address": {
        "Origin": "http://127.0.0.1.nip.io:4571",
        "Host": "127.0.0.1.nip.io:4571",
        "Sec-Fetch-Site": "same-origin",
    },
    "no port": {"Origin": "http://127.0.0.1", "Host": "127.0.0.1"},
}


@pytest.mark.parametrize("path", ROUTES + ORDERS)
@pytest.mark.parametrize("case", FOREIGN_HEADERS)
def test_another_page_is_refused_even_with_the_token(site, case, path):
    arn = site.add(running())
    headers = FOREIGN_HEADERS[case]
    if path in ORDERS:
        response = site.post(path, {}, headers=headers, job=arn)
    else:
        response = site.get(path, headers=headers, job=arn)
    check_nothing_revealed(response)
    assert (
        site.service.jobs[arn].control.messages.empty() and not site.service.jobs[arn].control.stop
    )


@pytest.mark.parametrize("path", ORDERS)
def test_an_order_says_where_it_comes_from(site, path):
    arn = site.add(running())
    check_nothing_revealed(site.post(path, {}, headers={}, job=arn))
    for method in ("get", "put", "delete", "patch", "options"):
        response = site.client.open(
            path,
            method=method,
            base_url=ORIGIN,
            query_string={"token": TOKEN, "job": arn},
            headers={"Origin": ORIGIN},
        )
        check_nothing_revealed(response, 404)
    assert not site.service.jobs[arn].control.stop


def test_a_container_does_not_reach_the_page_by_the_bridge(site):
    site.add(running())
    response = site.client.get(
        "/",
        base_url="http://172.17.0.1:4571",
        query_string={"token": TOKEN},
        headers={"Accept": "text/html"},
    )
    check_nothing_revealed(response)


def test_a_large_form_is_refused(site):
    arn = site.add(running())
    form = {"host": "x" * 100_000}
    check_nothing_revealed(site.post(f"{access.PATH}interrupt", form, job=arn), 413)


@pytest.mark.parametrize(
    "name",
    [
        "../other/secret",
        "..%2Fother%2Fsecret",
        "/../../other/secret",
        "./model.tar.gz",
        "model.tar",
        "model.tar.gz/",
        "",
        "s3://bucket/other/secret",
        "\0",
        "\ud800",
    ],
)
@pytest.mark.parametrize("kind", ["artifacts", "checkpoints", "", "../artifacts", "output"])
def test_a_link_reaches_no_other_object(site, kind, name):
    arn = site.add(running())
    site.store.objects = {
        ("bucket", "out/digits/output/model.tar.gz"): b"weights",
        ("bucket", "other/secret"): b"treasure",
        ("bucket", "out/digits/other/secret"): b"treasure",
    }
    encoded = quote(name, errors="surrogatepass")
    address = f"{access.PATH}file?token={TOKEN}&job={quote(arn)}&kind={quote(kind)}&name={encoded}"
    response = site.client.get(address, base_url=ORIGIN)
    check_nothing_revealed(response, 404)


@pytest.mark.parametrize("host", ["../../secret", "algo-1/../secret", "algo-9", "", "/etc/passwd"])
@pytest.mark.parametrize("path", ["/", f"{access.PATH}log", f"{access.PATH}stream"])
def test_a_log_is_that_of_a_host(site, path, host):
    (site.folder / "secret.log").write_text("treasure\n")
    check_nothing_revealed(site.get(path, job=site.add(running()), host=host), 404)


@pytest.mark.parametrize("path", [*ROUTES[1:], *ORDERS])
def test_an_unknown_job_is_not_there(site, path):
    site.add(running())
    send = site.post if path in ORDERS else site.get
    arguments = ({},) if path in ORDERS else ()
    assert send(path, *arguments, job="arn:other").status_code == 404


def is_for_page(path: str = "/", *, method="GET", **headers: str) -> bool:
    """Return whether a request is taken for one of the page."""
    builder = {"base_url": ORIGIN, "method": method, "headers": headers}
    seen = []
    Client(lambda environ, start: seen.append(environ) or Response()(environ, start)).open(
        path, **builder
    )
    return access.is_for_page(with_query(seen[0]))


def test_clients_of_aws_keep_what_they_have():
    """A signed request does not come from the page, whatever else it has."""
    assert is_for_page(Accept="text/html") and is_for_page(access.PATH + "stream")
    assert not is_for_page() and not is_for_page(Accept="*/*")
    assert not is_for_page(Accept="text/html", Authorization="AWS4-HMAC-SHA256 ...")
    assert not is_for_page("/?X-Amz-Signature=x", Accept="text/html")
    assert not is_for_page("/bucket/key", Accept="text/html")
    assert not is_for_page("/Rehearsal/", Accept="text/html")
    assert not is_for_page(method="POST", Accept="text/html")
    assert is_for_page("/?find=X-Amz-Signature", Accept="text/html")


def test_texts_of_jobs_are_shown_as_they_are(site):
    """No text of a job makes an element, wherever it is shown."""
    record = running(f"name {HOSTILE_TEXT}", hosts=1)
    for attempt in record.attempts:
        attempt.instances[0].host = f"host {HOSTILE_TEXT}"
    record.transitions[-1].message = f"message {HOSTILE_TEXT}"
    arn = site.add(record)
    site.service.jobs[arn].hosts.append(SimpleNamespace(name="algo-1"))
    site.service.jobs[arn].logs.write("algo-1", f"line {HOSTILE_TEXT}")
    site.store.objects["bucket", f"ck/file {HOSTILE_TEXT}"] = b""
    texts = [
        site.get(job=arn, host="algo-1", find=HOSTILE_TEXT).text,
        site.get().text,
    ]
    parts = site.page.documents.job_parts(arn) | site.page.documents.list_parts()
    for text in (*texts, *parts.values()):
        page = Page(text)
        assert not elements_of(page, "img") and len(elements_of(page, "script")) <= 1
    for kind in ("name", "host", "message", "line", "file"):
        assert f"{kind} {HOSTILE_TEXT}" in Page(texts[0]).text, kind
    assert f"name {HOSTILE_TEXT}" in Page(texts[1]).text


@pytest.mark.parametrize("seed", range(20))
def test_hostile_lines_and_names_are_plain_text(site, seed):
    draw = random.Random(seed)
    arn = site.add(running())
    job = site.service.jobs[arn]
    for _ in range(5):
        job.logs.write("algo-1", hostile_texts.text(draw, 20_000))
        site.store.objects["bucket", f"ck/{hostile_texts.name(draw)}"] = b""
    text = site.get(job=arn, find=hostile_texts.text(draw, 3)).text
    Page(text)  # is well-formed
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    follower = stream.Follower(job.logs.path("algo-1"), 0, "")
    event = follower.event().decode()
    assert re.fullmatch(r"event: lines\nid: \d+\ndata: [^\n]*\n\n", event)
    lines = json.loads(event.splitlines()[2].removeprefix("data: "))
    assert all(letter.isprintable() or letter == "\n" for letter in lines)


def test_nothing_but_the_pages_own_script_and_style_runs(site):
    response = site.get(job=site.add(running()))
    policy = response.headers["Content-Security-Policy"]
    text = response.text
    for kind in ("script", "style"):
        (content,) = re.findall(f"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy and "base-uri 'none'" in policy
    assert not re.search(r"https?://|@import|\bsrc=|\son\w+=|\sstyle=", text)
    for name, value in (
        ("Cache-Control", "no-store"),
        ("X-Content-Type-Options", "nosniff"),
        ("Referrer-Policy", "same-origin"),
    ):
        assert response.headers[name] == value
    assert "Set-Cookie" not in response.headers
