"""Names without the name server."""

from __future__ import annotations

import re
import socket
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from trainer import names

netns = pytest.mark.netns


@netns
def test_a_name_server_that_never_answers_delays_no_node() -> None:
    """Each lookup would cost 10 s, and all nodes would pay for all."""
    script = "from bench.rollcall import without_name_server; print(without_name_server(6))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    found = re.search(r"6 nodes with a name server that never answers: ([\d.]+) s", done.stdout)
    assert found and float(found[1]) < 10, done.stdout + done.stderr


def test_names_from_files_still_resolve_and_the_rest_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    look_in = names._look_in
    monkeypatch.setattr(names, "_look_in", lambda sources: (said.append(sources), look_in(sources))[0])
    with names.without_dns():
        assert socket.gethostbyname("localhost") == "127.0.0.1"
    assert said == ["files", names._configured()]
