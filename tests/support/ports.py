"""Provides ports that stay reserved until they are used."""

from __future__ import annotations

import socket

_reserved: list[socket.socket] = []


def reserved_port() -> int:
    """Returns a local port that this process keeps reserved until it ends.

    A bound socket that does not listen keeps the kernel from giving the port to any other process. A server
    that sets SO_REUSEADDR, as torch's TCPStore does, can still listen on it.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _reserved.append(holder)
    return holder.getsockname()[1]
