"""The listening socket, and why there is none."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from tpserve.listen import is_loopback, listen, reserve
from tpserve.settings import Settings, UserError


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_loopback_addresses_are_known(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "example.org", "localhost.example.org"])
def test_other_addresses_are_beyond_loopback(host: str) -> None:
    assert not is_loopback(host)


def reserved(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    return reserve(Settings(host=host, port=port))


def connect(bound: socket.socket) -> None:
    with socket.create_connection(bound.getsockname()[:2], timeout=5):
        pass


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_clients_are_refused_until_somebody_listens(host: str) -> None:
    with reserved(host) as bound:
        with pytest.raises(ConnectionRefusedError):
            connect(bound)
        listen(bound)
        connect(bound)


@pytest.mark.parametrize("listens", [False, True])
@pytest.mark.parametrize("other", ["tpserve", "that reuses addresses", "that does not", "of all addresses"])
def test_reserved_port_is_nobody_elses(other: str, listens: bool) -> None:
    with reserved() as bound, socket.socket() as late:
        if listens:
            listen(bound)
        port = bound.getsockname()[1]
        if other == "tpserve":
            with pytest.raises(UserError, match=rf"^--port {port}: taken "):
                reserved(port=port)
            return
        late.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, other != "that does not")
        with pytest.raises(OSError, match="in use"):
            late.bind(("0.0.0.0" if other == "of all addresses" else "127.0.0.1", port))


@pytest.mark.parametrize("listens", [False, True])
def test_taken_port_is_refused_by_name(listens: bool) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if listens:
            taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"^--port {port}: taken "):
            reserved(port=port)


def test_port_is_free_again_after_its_socket_is_closed() -> None:
    with reserved() as first:
        listen(first)
        port = first.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), first.accept()[0]:
            pass  # the connection's end stays in TIME_WAIT
    with reserved(port=port) as second:
        with pytest.raises(UserError, match=rf"^--port {port}: taken "):
            reserved(port=port)
        listen(second)
        connect(second)


def test_privileged_port_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: socket.socket, address: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", denied)  # root may bind it
    with pytest.raises(UserError, match=r"^--port 80: only root .*1024"):
        reserved(port=80)


@pytest.mark.parametrize("host", ["203.0.113.7", "no.such.host.invalid"])
def test_address_that_is_not_here_is_refused_by_name(host: str) -> None:
    with pytest.raises(UserError, match=rf"^--host {host}: "):
        reserve(Settings(host=host, port=0, allow_no_key=True))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "203.0.113.7"])
def test_host_beyond_loopback_needs_the_flag_that_permits_it(host: str) -> None:
    with pytest.raises(UserError, match="--allow-no-key"):
        reserved(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
@pytest.mark.parametrize("permit", [{"allow_no_key": True}, {"api_key": ("sesame",)}, {"api_key_file": "keys"}])
def test_host_beyond_loopback_is_bound_where_it_is_permitted(host: str, permit: dict[str, Any]) -> None:
    reserve(Settings(host=host, port=0, **permit)).close()
