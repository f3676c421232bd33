"""The server's address: bound before anything slow, inherited by the frontend, and listened on once that can answer."""

from __future__ import annotations

import errno
import ipaddress
import socket

from tpserve.settings import Settings, UserError

_BACKLOG = 2048


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address. Names other than localhost count as reachable."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def reserve(settings: Settings) -> socket.socket:
    """A socket bound to the host's address, the IPv4 one if it has both, which nobody else gets from now on.

    It does not listen: until `listen`, clients are refused, where otherwise they would hang as long as a download takes.
    Raises UserError if the address cannot be had, or the settings do not permit it.
    """
    host, port = settings.host, settings.port
    if not (is_loopback(host) or settings.allow_no_key or settings.api_key or settings.api_key_file):
        raise UserError(
            f"--host {host!r}: any client that reaches this machine could use the server;"
            " ask for keys with --api-key-file, permit that with --allow-no-key, or give 127.0.0.1"
        )
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        raise UserError(f"--host {host}: no such address") from None
    family, _, _, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
    bound = None
    try:
        bound = _bind(family, address)
        # The kernel lets several sockets with SO_REUSEADDR be bound to one address while none listens. That this one is
        # alone shows when another can listen there; it gives up that option meanwhile, and with it goes the sharing.
        with _bind(family, bound.getsockname()) as probe:
            probe.listen()
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        return bound
    except OSError as error:
        if bound is not None:
            bound.close()
        raise UserError(_reason(error, host, port)) from None


def listen(bound: socket.socket) -> None:
    """Take connections on a socket of `reserve`."""
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as in `_bind`
    bound.listen(_BACKLOG)


def _bind(family: int, address: object) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of a server that just ended must not block its port.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)  # type: ignore[arg-type]  # typeshed: the tuple or string of the family
        return bound
    except OSError:
        bound.close()
        raise


def _reason(error: OSError, host: str, port: int) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"--port {port}: taken by another program on {host}; stop it, or give another port (0 picks a free one)"
        case errno.EACCES | errno.EPERM:
            return f"--port {port}: only root may use it; give one from 1024 up (0 picks a free one)"
        case errno.EADDRNOTAVAIL:
            return f"--host {host}: not an address of this machine"
        case _:
            return f"--host {host} --port {port}: {error.strerror}"
