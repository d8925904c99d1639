"""Whether the kernel has killed for memory: what the counters of this node's memory cgroups say, before the ranks and after."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from trainer.process import CGROUPS, OWN_CGROUPS, memory_limit, own_cgroups


class MemoryKills:
    """Kills in this process's cgroup and those above it, since this was made."""

    def __init__(self, cgroups: Path = CGROUPS, own: Path = OWN_CGROUPS) -> None:
        self._folders = list(own_cgroups("memory", cgroups, own))
        self._before = list(map(_kills, self._folders))

    def words(self) -> str | None:
        """What has been killed and why, or None: `the memory limit of 4.0 GiB was reached (oom_kill 1)`."""
        for folder, before in zip(self._folders, self._before, strict=True):
            if (count := _kills(folder) - before) > 0:
                limit = min(filter(None, (memory_limit(each) for each in self._folders)), default=None)
                what = (
                    f"the memory limit of {limit / (1 << 30):.1f} GiB was reached" if limit else "the machine's memory was full"
                )
                return f"{what} (oom_kill {count})"
        return None


def _kills(folder: Path) -> int:
    """Kills by memory.events (v2) or memory.oom_control (v1), cgroups(7)."""
    for name in ("memory.events", "memory.oom_control"):
        with suppress(OSError):
            if found := re.search(r"^oom_kill (\d+)", (folder / name).read_text(), re.MULTILINE):
                return int(found[1])
    return 0
