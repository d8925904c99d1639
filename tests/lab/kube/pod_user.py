"""securityContext: who a container runs as."""

from __future__ import annotations

import pwd
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from tests.lab.kube.workload import Manifest

SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"  # of the lab's own tools, whatever the container's PATH is


class User:
    """The user of one container: root unless runAsUser says otherwise."""

    def __init__(self, pod: Manifest, container: Manifest) -> None:
        context = {**(pod.get("securityContext") or {}), **(container.get("securityContext") or {})}
        self.uid = int(context.get("runAsUser") or 0)
        self._gid = int(context.get("runAsGroup") or 0)
        groups = [*(context.get("supplementalGroups") or []), *([context["fsGroup"]] if "fsGroup" in context else [])]
        self._groups = [str(group) for group in groups]
        self._limited = context.get("allowPrivilegeEscalation") is False
        self._as_root = False

    @property
    def home(self) -> str:
        try:
            return pwd.getpwuid(self.uid).pw_dir
        except KeyError:
            return "/"

    @property
    def prefix(self) -> list[str]:
        """The start of a command that runs as this user."""
        options = ["--no-new-privs"] if self._limited else []
        if self.uid and not self._as_root:
            groups = f"--groups={','.join(self._groups)}" if self._groups else "--clear-groups"
            options += [f"--reuid={self.uid}", f"--regid={self._gid}", groups, "--inh-caps=-all"]
        return [shutil.which("setpriv", path=SYSTEM_PATH) or "setpriv", *options, "--"] if options else []

    def needs(self, program: str, path: str, note: Callable[[str], None]) -> list[str]:
        """Folders to open (in the view only) so that this user reaches the program; who may not read it stays root."""
        if not self.uid:
            return []
        files = _program_files(shutil.which(program, path=path))
        shut = [file for file in files if ~stat.S_IMODE(file.stat().st_mode) & (stat.S_IROTH | stat.S_IXOTH)]
        if shut:
            note(f"runAsUser {self.uid} is ignored: only root may read {shut[0]}")
            self._as_root = True
        folders = {folder for file in files for folder in file.parents}
        return sorted(str(folder) for folder in folders if not folder.stat().st_mode & stat.S_IXOTH)


def _program_files(program: str | None) -> list[Path]:
    """A program and, of a script, its interpreter."""
    if program is None:
        return []
    file = Path(program).resolve()
    with open(file, "rb") as opened:
        line = opened.readline(4096)
    words = line[2:].decode(errors="replace").split() if line.startswith(b"#!") else []
    return [file, *([Path(words[0]).resolve()] if words else [])]
