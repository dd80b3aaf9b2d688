"""A listening socket, for every server of ours."""

from __future__ import annotations

import socket

from sparring.errors import ConfigError

__all__ = ["listen"]


def listen(host: str, port: int) -> socket.socket:
    """
    Args:
        port: 0 takes a free one.

    Raises:
        ConfigError: the port is in use, or there is none of that number, or the address is not this machine's.
    """
    if not 0 <= port <= 65_535:
        raise ConfigError(f"port {port} does not exist: choose one up to 65535, or 0 for a free one")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With its protocol named, as `socket.create_server` does not: asyncio sets TCP_NODELAY on no other connections, and
    # each answer would wait 40 ms for an acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
        return listener
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error}; choose another port, or 0 for any") from error
