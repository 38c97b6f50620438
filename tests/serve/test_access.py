"""Who is let in: by key, by the name that was asked for, by the page that asks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from running_server import RunningServer

from strata.config import ServerOptions, StrataConfig, read_config
from strata.errors import ConfigError
from strata.serve.auth import Access, access_of
from strata.serve.errors import ApiError
from strata.serve.origins import Hosts

PROMPT = {"prompt": "x"}
ADMIN_ROUTES = [
    ("GET", "/cache"),
    ("GET", "/scheduler"),
    ("POST", "/cache/flush"),
    ("POST", "/cache/demote"),
    ("POST", "/cache/resize"),
    ("POST", "/cache/disk/attach"),
    ("POST", "/cache/disk/detach"),
]
USER_ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/load"),
    ("GET", "/metrics"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def status(served: RunningServer, method: str, path: str, headers: dict[str, str]) -> int:
    """What comes back without touching what the route needs: the body is one that no route takes."""
    body = {} if method == "POST" else None
    return served.http.request(method, path, json=body, headers=headers).status_code


@pytest.fixture(scope="module")
def keyed() -> Iterator[RunningServer]:
    server = RunningServer({"api_key": "one, two", "admin_api_key": "boss"})
    yield server
    server.stop()


class TestKeys:
    """Several keys for users, one for operators."""

    @pytest.mark.parametrize("key", ["one", "two", "boss"])
    @pytest.mark.parametrize(("method", "path"), USER_ROUTES)
    def test_every_key_opens_the_routes_of_users(
        self, keyed: RunningServer, key: str, method: str, path: str
    ) -> None:
        assert status(keyed, method, path, bearer(key)) in (200, 400)

    @pytest.mark.parametrize(("method", "path"), [*USER_ROUTES, *ADMIN_ROUTES, ("GET", "/no/such/route")])
    def test_nothing_opens_without_one(self, keyed: RunningServer, method: str, path: str) -> None:
        for headers in (
            {},
            bearer("on"),
            bearer("one, two"),
            {"Authorization": "Bearer"},
            {"Authorization": "Basic one"},
        ):
            assert status(keyed, method, path, headers) == 401
        assert keyed.engine.calls == [] and keyed.engine.streams == []

    @pytest.mark.parametrize(("method", "path"), ADMIN_ROUTES)
    def test_operators_routes_take_only_their_key(self, keyed: RunningServer, method: str, path: str) -> None:
        assert status(keyed, method, path, bearer("one")) == 401
        assert keyed.engine.calls == []
        assert status(keyed, method, path, bearer("boss")) in (200, 400)
        keyed.engine.reset()

    def test_a_users_key_is_not_called_wrong_where_an_operators_is_needed(self, keyed: RunningServer) -> None:
        def message(key: str) -> str:
            answer = keyed.http.get("/cache", headers=bearer(key))
            return str(answer.json()["error"]["message"])

        assert (
            message("two")
            == "this key is good for the routes of users alone; for this route send one of --admin-api-key"
        )
        assert message("three").startswith("the API key is missing or wrong")

    def test_the_scheme_is_spelled_as_one_likes(self, keyed: RunningServer) -> None:
        assert status(keyed, "GET", "/v1/models", {"Authorization": "bearer  one"}) == 200

    def test_health_is_open(self, keyed: RunningServer) -> None:
        assert keyed.http.get("/health").status_code == 200

    def test_without_a_key_of_their_own_operators_use_the_users(
        self, serve: Callable[..., RunningServer]
    ) -> None:
        served = serve(api_key="one")
        assert status(served, "POST", "/cache/flush", {}) == 401
        assert status(served, "POST", "/cache/flush", bearer("one")) == 200

    def test_an_operators_key_alone_leaves_users_free(self, serve: Callable[..., RunningServer]) -> None:
        served = serve(admin_api_key="boss")
        assert status(served, "GET", "/v1/models", {}) == 200
        assert status(served, "POST", "/cache/flush", {}) == 401

    def test_keys_are_in_no_log_and_no_answer(
        self, serve: Callable[..., RunningServer], caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        logging.getLogger("strata").setLevel(logging.DEBUG)
        served = serve(api_key="s3cr3t-user", admin_api_key="s3cr3t-boss")
        texts = [
            served.http.request(method, path, json={}, headers=bearer(key)).text
            for method, path in [*USER_ROUTES, *ADMIN_ROUTES]
            for key in ("s3cr3t-user", "s3cr3t-boss", "s3cr3t-wrong")
        ]
        logged = [record.getMessage() for record in caplog.records if record.name != "httpx"]
        assert not any("s3cr3t" in text for text in [*texts, *logged])


def test_every_route_is_somebodys(served: RunningServer) -> None:
    """A new route must be listed here as well as in auth.py, or it is an operator's."""
    paths = set(served.http.get("/openapi.json").json()["paths"])
    assert paths
    for path in paths:
        wanted = Access.ADMIN if path.startswith(("/cache", "/scheduler", "/status")) else Access.USER
        if path in ("/", "/health", "/livez", "/ready", "/readyz"):
            wanted = Access.ANYONE
        assert access_of(path) is wanted, path


@pytest.mark.parametrize(
    "path", ["//v1/models", "/V1/models", "/cache", "/v1", "/healthy", "/page", "/v1x/a"]
)
def test_a_path_that_is_nearly_another_is_an_operators(path: str) -> None:
    assert access_of(path) is Access.ADMIN


class TestHost:
    """Against DNS rebinding: a name that somebody else owns, and that leads here."""

    @pytest.mark.parametrize(
        "host", ["localhost", "localhost:9", "127.0.0.1:8000", "[::1]:8000", "LOCALHOST.", "127.1.2.3"]
    )
    def test_this_machines_names_are_fine_on_loopback(self, served: RunningServer, host: str) -> None:
        assert served.http.get("/v1/models", headers={"Host": host}).status_code == 200

    @pytest.mark.parametrize(
        "host", ["evil.example", "localhost.evil.example:8000", "10.0.0.7", "a@localhost@b", "[::2]", "", "x"]
    )
    @pytest.mark.parametrize(
        ("method", "path"), [("POST", "/cache/flush"), ("GET", "/health"), ("POST", "/v1/completions")]
    )
    def test_others_are_refused_on_every_route(
        self, served: RunningServer, host: str, method: str, path: str
    ) -> None:
        answer = served.http.request(method, path, headers={"Host": host})
        assert answer.status_code == 403 and answer.json()["error"]["code"] == "host_not_allowed"
        assert "--allowed-hosts" in answer.json()["error"]["message"]
        assert served.engine.calls == []

    def test_elsewhere_the_bound_name_and_addresses_are_fine(self) -> None:
        hosts = Hosts(ServerOptions(host="0.0.0.0", insecure=True, allowed_hosts=("llm.example",)))
        for fine in (
            b"10.0.0.7:8000",
            b"[2001:db8::1]:80",
            b"localhost",
            b"llm.example:8000",
            b"LLM.example.",
        ):
            hosts.check(fine)
        for other in (b"evil.example", b"sub.llm.example", b"\xff"):
            with pytest.raises(ApiError):
                hosts.check(other)

    def test_any_name_can_be_allowed(self, serve: Callable[..., RunningServer]) -> None:
        served = serve(allowed_hosts="*")
        assert served.http.get("/v1/models", headers={"Host": "evil.example"}).status_code == 200


class TestOrigin:
    """A page elsewhere can neither run a prompt nor flush."""

    @pytest.mark.parametrize(
        "headers",
        [
            {"Origin": "https://evil.example"},
            {"Origin": "null"},
            {"Origin": "http://localhost:3000"},
            {"Origin": "file://"},
            {"Sec-Fetch-Site": "cross-site"},
            {"Sec-Fetch-Site": "same-site"},
        ],
    )
    @pytest.mark.parametrize(
        "path", ["/cache/flush", "/cache/disk/detach", "/v1/completions", "/v1/chat/completions"]
    )
    def test_a_page_elsewhere_is_refused(
        self, served: RunningServer, path: str, headers: dict[str, str]
    ) -> None:
        answer = served.http.post(path, json=PROMPT, headers=headers)
        assert answer.status_code == 403 and answer.json()["error"]["code"] == "origin_not_allowed"
        assert "access-control-allow-origin" not in answer.headers
        assert served.engine.calls == [] and served.engine.streams == []

    def test_its_preflight_is_refused(self, served: RunningServer) -> None:
        asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
        answer = served.http.options("/v1/completions", headers=asked)
        assert answer.status_code == 403 and not cors_of(answer)

    def test_reading_is_refused_where_an_origin_is_told(self, served: RunningServer) -> None:
        assert served.http.get("/cache", headers={"Origin": "https://evil.example"}).status_code == 403
        assert served.http.get("/cache", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 200, (
            "a link"
        )

    @pytest.mark.parametrize("headers", [{}, {"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"}])
    def test_the_servers_own_page_and_plain_clients_may(
        self, served: RunningServer, headers: dict[str, str]
    ) -> None:
        own = {"Origin": served.url} if headers else {}
        assert served.http.post("/v1/completions", json=PROMPT, headers=headers | own).status_code == 200
        assert served.http.post("/cache/flush", headers=headers | own).status_code == 200

    @pytest.mark.parametrize(
        ("host", "origin", "fine"),
        [
            ("localhost", "http://localhost", True),
            ("localhost", "http://localhost:80", True),
            ("localhost:443", "https://localhost", True),
            ("localhost:8000", "https://LOCALHOST:8000", True),
            ("localhost:8000", "http://localhost", False),
            ("localhost:8000", "ftp://localhost:8000", False),
        ],
    )
    def test_an_origin_is_the_servers_if_host_and_port_are(
        self, served: RunningServer, host: str, origin: str, fine: bool
    ) -> None:
        headers = {"Host": host, "Origin": origin}
        wanted = 200 if fine else 403
        assert served.http.post("/v1/completions", json=PROMPT, headers=headers).status_code == wanted

    def test_the_own_page_works_with_a_key(self, serve: Callable[..., RunningServer]) -> None:
        served = serve(api_key="one")
        headers = {"Origin": served.url, "Sec-Fetch-Site": "same-origin", **bearer("one")}
        assert served.http.post("/cache/flush", headers=headers).status_code == 200


def cors_of(answer: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name.startswith("access-control")}


class TestAllowedOrigins:
    """With `--allowed-origins` a browser is told so, and nobody else is let in."""

    ORIGIN = "https://chat.example.com"

    @pytest.fixture
    def open_to_chat(self, serve: Callable[..., RunningServer]) -> RunningServer:
        return serve(allowed_origins=self.ORIGIN, api_key="one")

    def test_preflight_needs_no_key(self, open_to_chat: RunningServer) -> None:
        answer = open_to_chat.http.options(
            "/v1/chat/completions",
            headers={
                "Origin": self.ORIGIN,
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
            },
        )
        assert answer.status_code == 200
        assert cors_of(answer)["access-control-allow-origin"] == self.ORIGIN
        assert "x-stainless-lang" in cors_of(answer)["access-control-allow-headers"]

    @pytest.mark.parametrize(("origin", "status"), [(ORIGIN, 200), ("https://evil.example", 400)])
    def test_it_may_reach_a_private_address_and_others_may_not(
        self, open_to_chat: RunningServer, origin: str, status: int
    ) -> None:
        asked = {
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Private-Network": "true",
        }
        answer = open_to_chat.http.options("/v1/chat/completions", headers=asked)
        assert answer.status_code == status
        let_in = "access-control-allow-origin" in cors_of(answer)
        assert let_in == (status == 200)
        if let_in:
            assert cors_of(answer)["access-control-allow-private-network"] == "true"

    def test_its_requests_are_answered_and_readable_even_when_refused(
        self, open_to_chat: RunningServer
    ) -> None:
        for headers, wanted in ((bearer("one"), 200), ({}, 401)):
            headers = {"Origin": self.ORIGIN, **headers}
            answer = open_to_chat.http.post("/v1/completions", json=PROMPT, headers=headers)
            assert answer.status_code == wanted
            assert cors_of(answer)["access-control-allow-origin"] == self.ORIGIN

    def test_it_may_be_given_in_capitals(self, serve: Callable[..., RunningServer]) -> None:
        served = serve(allowed_origins="https://Chat.Example.com")
        answer = served.http.post("/v1/completions", json=PROMPT, headers={"Origin": self.ORIGIN})
        assert answer.status_code == 200
        assert cors_of(answer)["access-control-allow-origin"] == self.ORIGIN

    def test_others_stay_out(self, open_to_chat: RunningServer) -> None:
        headers = {"Origin": "https://evil.example", **bearer("one")}
        answer = open_to_chat.http.post("/v1/completions", json=PROMPT, headers=headers)
        assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers

    @pytest.mark.parametrize("origin", ["chat.example.com", "https://chat.example.com/", "https://a b"])
    def test_what_is_no_origin_is_said_at_start(self, origin: str) -> None:
        with pytest.raises(ConfigError, match="is no origin"):
            StrataConfig.of(allowed_origins=origin)


@pytest.mark.parametrize(
    "content_type", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
@pytest.mark.parametrize("path", ["/v1/completions", "/cache/demote"])
def test_a_body_that_a_form_could_send_is_refused(
    served: RunningServer, path: str, content_type: str
) -> None:
    headers = {"Content-Type": content_type} if content_type else {}
    content = b'{"prompt": "x", "tiers": ["device"]}'
    answer = served.http.post(path, content=content, headers=headers)
    assert answer.status_code == 415 and "application/json" in answer.json()["error"]["message"]
    assert served.engine.calls == [] and served.engine.streams == []


def test_json_may_name_its_charset(served: RunningServer) -> None:
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert served.http.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers).status_code == 200


class TestSettings:
    """Keys come by a flag each, by commas, from the environment, or as a list."""

    @pytest.mark.parametrize(
        "flags",
        [("--api-key", "a,b"), ("--api-key=a", "--api-key", "b"), ("--api-key", "a", "--api-key", "b")],
    )
    def test_several_keys(self, flags: tuple[str, ...]) -> None:
        config = read_config([*flags, "--port", "9000"], {"STRATA_DISK_CAPACITY": "0"})
        assert config.server.api_key == ("a", "b") and config.server.port == 9000

    def test_from_elsewhere(self, tmp_path: Any) -> None:
        file = tmp_path / "strata.toml"
        file.write_text('api-key = ["a", "b"]\nallowed-hosts = "x"\n', encoding="utf-8")
        config = read_config(["--config", str(file)], {"STRATA_DISK_CAPACITY": "0"})
        assert (config.server.api_key, config.server.allowed_hosts) == (("a", "b"), ("x",))
        config = read_config([], {"STRATA_DISK_CAPACITY": "0", "STRATA_API_KEY": "a, b,"})
        assert config.server.api_key == ("a", "b")

    def test_salts_need_keys(self) -> None:
        with pytest.raises(ConfigError, match="--salt-per-key"):
            StrataConfig.of(salt_per_key=True)
        with pytest.raises(ConfigError, match="give --admin-api-key"):
            StrataConfig.of(salt_per_key=True, api_key="one,two")
        assert StrataConfig.of(salt_per_key=True, api_key="one").server.salt_per_key
