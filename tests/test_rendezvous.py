import socket

import pytest

from trainer.errors import ExitCode, FaultError
from trainer.node.identity import Identity
from trainer.node.rendezvous import LISTENER, listen, reach


def node(port: int, address: str = "127.0.0.1", node_rank: int = 1) -> Identity:
    return Identity(2, node_rank, 1, address, port, "PET_*")


def test_a_busy_port_is_refused_at_once() -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        with pytest.raises(FaultError, match=r"FAULT A3 .* port \d+ is already in use") as error:
            listen(node(other.getsockname()[1], node_rank=0))
    assert error.value.exit_code == ExitCode.REFUSED


def test_the_launchers_bound_port_is_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    given = socket.socket()
    given.bind(("127.0.0.1", 0))
    port = given.getsockname()[1]
    monkeypatch.setenv(LISTENER, str(given.detach()))
    with listen(node(1, node_rank=0)) as listener:
        assert listener.getsockname()[1] == port


@pytest.mark.parametrize(
    ("address", "code", "words"),
    [
        ("127.0.0.1", "A1", "connection refused"),
        ("no-such-host.invalid", "A2", "'no-such-host.invalid' (port {port}) does not resolve"),
    ],
)
def test_what_cannot_be_reached_is_told_apart(address: str, code: str, words: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(FaultError) as error:
        reach(node(port, address))
    line = error.value.fault.line()
    assert line.startswith(f"FAULT {code} ") and words.format(port=port) in line and str(port) in line
    assert error.value.exit_code == ExitCode.JOIN


def test_a_port_that_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, reach(node(listener.getsockname()[1])) as connection:
        assert connection.getpeername() == listener.getsockname()
