"""The listening socket, and why there is none."""

from __future__ import annotations

import socket

import pytest

from tpserve.listen import is_loopback, listen
from tpserve.settings import UserError


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_loopback_addresses_are_known(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "example.org", "localhost.example.org"])
def test_other_addresses_are_beyond_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_listening_socket_takes_connections_and_is_inherited(host: str) -> None:
    with listen(host, 0) as listening:
        assert listening.get_inheritable()
        with socket.create_connection(listening.getsockname()[:2], timeout=5):
            pass


@pytest.mark.parametrize("other", ["listens", "is another server"])
def test_taken_port_is_refused_by_name(other: str) -> None:
    with listen("127.0.0.1", 0) if other == "is another server" else socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"^--port {port}: taken "):
            listen("127.0.0.1", port)


def test_port_is_free_again_after_its_socket_is_closed() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), first.accept()[0]:
            pass  # the connection's end stays in TIME_WAIT
    listen("127.0.0.1", port).close()


def test_privileged_port_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: socket.socket, address: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", denied)  # root may bind it
    with pytest.raises(UserError, match=r"^--port 80: only root .*1024"):
        listen("127.0.0.1", 80)


@pytest.mark.parametrize("host", ["203.0.113.7", "no.such.host.invalid"])
def test_address_that_is_not_here_is_refused_by_name(host: str) -> None:
    with pytest.raises(UserError, match=rf"^--host {host}: "):
        listen(host, 0)
