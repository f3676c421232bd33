"""The listening socket: bound once, before anything slow, and inherited by the frontend."""

from __future__ import annotations

import errno
import ipaddress
import socket

from tpserve.settings import UserError

_BACKLOG = 2048


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address. Names other than localhost count as reachable."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on the host's address, the IPv4 one if it has both. Raises UserError if that cannot be."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        raise UserError(f"--host {host}: no such address") from None
    family, _, _, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
    listening = None
    try:
        listening = socket.socket(family, socket.SOCK_STREAM)
        # Connections of a server that just ended must not block its port.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)  # only a socket that listens keeps others from the port
        listening.set_inheritable(True)
        return listening
    except OSError as error:
        if listening is not None:
            listening.close()
        raise UserError(_reason(error, host, port)) from None


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
