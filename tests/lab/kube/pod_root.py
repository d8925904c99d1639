"""A container's root: a copy-on-write view of this machine's files, with the pod's own /etc/hosts, /dev/shm and volumes.

The view stands in for the image: a path that is not here is made in the view only, and what the container writes outside its
volumes goes with it. Mounts happen in the container's own mount namespace, so that nothing has to be undone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.lab.kube.cluster_dns import DOMAIN
from tests.lab.kube.pod_spec import Identity, Objects, Volume
from tests.lab.kube.sandbox import GATEWAY
from tests.lab.kube.workload import Manifest
from tests.lab.machines import run

_SYSTEM_MOUNTS = ("/proc", "/sys", "/dev", "/run")


@dataclass(frozen=True)
class Image:
    """What an image would bring: its environment, PATH among it, and its working directory."""

    environ: dict[str, str]
    folder: str = "/"


@dataclass(frozen=True)
class Room:
    """What the containers of one pod share."""

    folder: Path
    sandbox: int  # the process that holds the pod's network, host name and IPC
    identity: Identity
    known: Objects
    volumes: dict[str, Path]
    image: Image
    note: Callable[[str], None]


def host_mounts() -> list[str]:
    """File systems of this machine besides / that hold files a container may want: a view of / alone does not show them."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    plain = [p for p in points if p != "/" and not set(p) & set(":,\\") and Path(p).is_dir()]
    return sorted({p for p in plain if not any(p == s or p.startswith(f"{s}/") for s in _SYSTEM_MOUNTS)})


def root_commands(folder: Path, room: Room, spec: Manifest, opened: list[str]) -> list[list[str]]:
    """The commands that make a container's root, in order."""
    root = str(folder / "root")
    commands = [["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", str(folder)]]
    commands += _view(folder, "/", root)
    for place, point in enumerate(host_mounts()):
        tolerant = ["sh", "-c", '"$@" 2>/dev/null || true', "sh"]  # one that cannot be had is missing in the view, no more
        commands += [[*tolerant, *words] for words in _view(folder, point, f"{root}{point}", str(place))]
    commands += [["chmod", "o+x", f"{root}{path}"] for path in opened]
    commands += [["cp", "-a", "--remove-destination", f"{room.folder}/etc/.", f"{root}/etc/"]]
    commands += [
        ["mount", "--bind", "/dev", f"{root}/dev"],
        ["mount", "-t", "devpts", "-o", "newinstance,ptmxmode=0666", "devpts", f"{root}/dev/pts"],
        ["mount", "--bind", f"{room.folder}/shm", f"{root}/dev/shm"],
        ["mount", "-t", "proc", "proc", f"{root}/proc"],
        ["mount", "-t", "sysfs", "sysfs", f"{root}/sys"],
    ]
    if Path("/sys/fs/cgroup").is_dir():
        commands.append(["mount", "--rbind", "/sys/fs/cgroup", f"{root}/sys/fs/cgroup"])
    for mount in sorted(spec.get("volumeMounts") or [], key=lambda mount: str(mount["mountPath"])):
        commands += _volume_mount(root, room.volumes[mount["name"]], mount)
    commands.append(["mkdir", "-p", f"{root}{spec.get('workingDir') or room.image.folder}"])
    if (spec.get("securityContext") or {}).get("readOnlyRootFilesystem"):
        commands.append(["mount", "-o", "remount,ro", root])
    return commands


def _view(folder: Path, lower: str, target: str, name: str = "") -> list[list[str]]:
    """Copy-on-write: what is written stays in the container's folder."""
    upper, work = f"{folder}/upper{name}", f"{folder}/work{name}"
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    return [
        ["mkdir", "-p", upper, work, target],
        ["chmod", f"--reference={lower}", upper],
        ["mount", "-t", "overlay", "-o", options, "overlay", target],
    ]


def _volume_mount(root: str, source: Path, mount: Manifest) -> list[list[str]]:
    if mount.get("subPath"):
        source = source / mount["subPath"]
    target = f"{root}{Path(mount['mountPath']).resolve()}"  # a link would lead out of the root
    make = ["install", "-D", "/dev/null"] if source.is_file() else ["mkdir", "-p", str(source)]  # it makes a missing subPath, too
    commands = [[*make, target], ["mount", "--bind", str(source), target]]
    return [*commands, ["mount", "-o", "remount,bind,ro", target]] if mount.get("readOnly") else commands


def write_etc(etc: Path, identity: Identity) -> None:
    """What the kubelet puts into a pod's /etc."""
    etc.mkdir(parents=True)
    hostname, subdomain = identity.pod.hostname, identity.pod.spec.get("subdomain")
    names = [f"{hostname}.{subdomain}.{identity.namespace}.{DOMAIN}"] if subdomain else []
    (etc / "hosts").write_text(f"127.0.0.1\tlocalhost\n::1\tlocalhost\n{identity.address}\t{' '.join([*names, hostname])}\n")
    search = f"{identity.namespace}.{DOMAIN} {DOMAIN} cluster.local"
    (etc / "resolv.conf").write_text(f"nameserver {GATEWAY}\nsearch {search}\noptions ndots:5\n")
    (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n")
    (etc / "hostname").write_text(f"{hostname}\n")


def make_volume(volume: Volume, own: Path, group: int | None) -> Path:
    """A volume's folder: its own, unless it is one of the host's."""
    folder = volume.folder or own
    folder.mkdir(parents=True, exist_ok=True)
    if volume.tmpfs_bytes:
        mount_tmpfs(folder, volume.tmpfs_bytes)
    elif volume.folder is None and volume.files is None:
        folder.chmod(0o777)  # an emptyDir
    for path, text in (volume.files or {}).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    if volume.keeps_group and group is not None:
        os.chown(folder, -1, group)
        folder.chmod(folder.stat().st_mode | 0o2770)
    return folder


def mount_tmpfs(folder: Path, size: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    run("mount", "-t", "tmpfs", "-o", f"size={size},mode=1777", "tmpfs", folder)
