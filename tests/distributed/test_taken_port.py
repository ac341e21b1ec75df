"""Tests the error of a rank whose port another run uses."""

import socket

import deepspeed
import pytest

from ppo_ds.distributed import world
from ppo_ds.errors import UserError


def test_a_taken_port_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed.ops, "__compatible_ops__", {}, raising=False)
    monkeypatch.setattr(world.dist, "is_initialized", lambda: False)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        launched = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        for name, value in {**launched, "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UserError, match=f"^MASTER_PORT={port}: the port is in use .* --master_port"):
            world.connect(5.0)
