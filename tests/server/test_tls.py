"""HTTPS between the server, agents and people, with certificates of a private certificate
authority."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from click.testing import CliRunner

from paceline_cli.main import main
from paceline_server.app import UvicornServer
from paceline_server.store.signals import CommitSignals
from paceline_wire.local_token import find_token
from tests.server.conftest import ServerProcess

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")

NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Authority:
    """A certificate authority of the test."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.certificate = directory / "ca.pem"
        self._openssl(
            *(
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:prime256v1",
                "-nodes",
            ),
            *("-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=test authority"),
        )

    def issue(self, name: str) -> tuple[Path, Path]:
        """Return the files of a certificate for this machine, and of its key."""
        self._openssl(
            *(
                "req",
                *NEW_KEY,
                "-keyout",
                f"{name}.key",
                "-out",
                f"{name}.csr",
                "-subj",
                f"/CN={name}",
            ),
        )
        (self.directory / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        self._openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key"),
            *("-CAcreateserial", "-out", f"{name}.pem", "-days", "2", "-extfile", "names"),
        )
        return self.directory / f"{name}.pem", self.directory / f"{name}.key"

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.directory, check=True, capture_output=True)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def serve(tmp_path: Path, authority: Authority) -> Iterator[Callable[..., str]]:
    """Start a server process with a certificate; return its URL."""
    started: list[ServerProcess] = []

    def run(*options: str) -> str:
        certificate, key = authority.issue("server")
        words = ["--port", "0", "--tls-cert", str(certificate), "--tls-key", str(key), *options]
        process = ServerProcess(f"sqlite:///{tmp_path}/p.db", tmp_path / "server.log", *words)
        started.append(process)
        return process.wait_until_up().split()[-1]

    yield run
    for process in started:
        process.process.kill()
        process.process.wait()


def cli(url: str, *words: str, **environment: str) -> Any:
    return CliRunner().invoke(main, [*words, "--server", url], env=environment)


def test_the_command_line_checks_the_servers_certificate(
    serve: Callable[..., str], authority: Authority
) -> None:
    url = serve()
    assert url.startswith("https://127.0.0.1:")
    trusted = cli(url, "jobs", PACELINE_TLS_CA=str(authority.certificate))
    assert trusted.exit_code == 0, trusted.output
    unknown = cli(url, "jobs")
    assert unknown.exit_code == 1
    assert "certificate verify failed" in unknown.output
    missing = cli(url, "jobs", PACELINE_TLS_CA="/nonexistent.pem")
    assert "cannot use the certificates of PACELINE_TLS_CA" in missing.output


def test_plain_http_reaches_nothing_at_an_https_server(serve: Callable[..., str]) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(serve().replace("https:", "http:") + "/healthz", trust_env=False, timeout=60)


@pytest.mark.parametrize("asks", [False, True])
def test_an_agent_sends_over_tls_and_shows_its_certificate_if_asked(
    serve: Callable[..., str],
    authority: Authority,
    tmp_path: Path,
    wait_for: Callable[..., Any],
    asks: bool,
) -> None:
    ca = str(authority.certificate)
    url = serve(*(["--tls-client-ca", ca] if asks else []))
    certificate, key = authority.issue("agent")
    shown = ["--tls-cert", str(certificate), "--tls-key", str(key)] if asks else []
    context = ssl.create_default_context(cafile=ca)
    if asks:
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/healthz", verify=context, trust_env=False, timeout=60)
        context.load_cert_chain(certificate, key)
    log = (tmp_path / "agent.log").open("wb")
    agent = subprocess.Popen(
        [
            *(sys.executable, "-m", "paceline_agent", "--server", url, "--tls-ca", ca, *shown),
            *("--agent-id", "node-7", "--node-directory", str(tmp_path / "node"), "--no-metrics"),
        ],
        stdout=log,
        stderr=log,
    )
    try:
        headers = {"Authorization": f"Bearer {find_token(url, 'operator', os.environ)}"}
        with httpx.Client(verify=context, trust_env=False, headers=headers, timeout=60) as client:

            def names() -> list[str]:
                found = client.get(f"{url}/api/v1/nodes").raise_for_status().json()["items"]
                return [node["id"] for node in found]

            wait_for(lambda: names() == ["node-7"], "the agent")
    finally:
        agent.terminate()
        agent.wait(60)
        log.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tls-cert", "/nonexistent.pem"], "cannot use the certificate /nonexistent.pem"),
        (["--tls-key", "/nonexistent.key"], "--tls-key and --tls-client-ca need --tls-cert"),
        (["--tls-cert", "CERT", "--tls-key", "OTHER"], "key values mismatch"),
        (["--tls-cert", "BOTH", "--tls-client-ca", "/none"], "cannot use /none"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_at_the_start(
    authority: Authority, options: list[str], message: str
) -> None:
    certificate, key = authority.issue("first")
    _, other = authority.issue("second")
    both = authority.directory / "both.pem"
    both.write_text(certificate.read_text() + key.read_text())
    files = {"CERT": str(certificate), "BOTH": str(both), "OTHER": str(other)}
    words = ["server", *(files.get(word, word) for word in options)]
    found = subprocess.run(
        [sys.executable, "-m", "paceline_server", *words], capture_output=True, text=True
    )
    assert found.returncode == 2
    assert message in found.stderr
    assert "Traceback" not in found.stderr


def test_a_renewed_certificate_is_used_for_new_connections(authority: Authority) -> None:
    certificate, key = authority.issue("server")
    config = uvicorn.Config("none:none", ssl_certfile=certificate, ssl_keyfile=key)
    config.ssl = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    config.ssl.load_cert_chain(certificate, key)
    server = UvicornServer(config, CommitSignals())
    before = _served(config.ssl)
    authority.issue("server")  # overwrites the same files
    server.renew_certificate()
    after = _served(config.ssl)
    assert before != after
    key.write_text("no key")
    server.renew_certificate()
    assert _served(config.ssl) == after, "an unusable one changes nothing"


def _served(context: ssl.SSLContext) -> bytes:
    """Return the certificate that a client with this context receives."""
    ours, theirs = socket.socketpair()
    client = ssl.create_default_context()
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE

    def answer() -> None:
        with context.wrap_socket(theirs, server_side=True) as end:
            end.recv(1)

    thread = threading.Thread(target=answer)
    thread.start()
    with client.wrap_socket(ours) as end:
        found = end.getpeercert(binary_form=True)
        end.send(b"x")
    thread.join()
    assert found is not None
    return found
