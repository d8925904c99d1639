"""A real Slurm cluster on this machine: slurmctld on `login`, a slurmd on each node, fake GPUs, real faults.

    python -m tests.lab.slurm up [--nodes 2]     then put the folder that it prints first in PATH: sbatch, srun, squeue, ... work
    python -m tests.lab.slurm exec [-n node1] [-u alice] -- COMMAND
    python -m tests.lab.slurm off|on|heal|kill-slurmd|start-slurmd NODE     python -m tests.lab.slurm down

Needs root and the Debian packages that the Makefile lists (SLURM_PACKAGES). Without accounting. srun --container-image is a stand-in
for pyxis (spank_container.c): images are directories in FOLDER/images.
Seen with Slurm 22.05. Timers are short, so that faults show in seconds (SlurmdTimeout is 300 s by default).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.lab.machines import LOGIN, LabError, Machines, run, wait_for

CHECKOUT = (
    Path(__file__).resolve().parents[2]
)  # jobs run the kit from here; it may lie below /tmp, which nodes have for themselves
USER, UID = "alice", 20001
CONTAINER_PLUGIN = Path(__file__).with_name("spank_container.c")
CLIENTS = ["sbatch", "srun", "salloc", "squeue", "sacct", "scancel", "scontrol", "sinfo", "sstat", "sattach", "sdiag", "sbcast"]
_CPUS, _MEMORY_MB = 16, 64000  # declared, whatever this machine has

CONF = """\
ClusterName={name}
SlurmctldHost=login
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=/run/munge/munge.socket.2
StateSaveLocation={lab}/state
SlurmdSpoolDir={lab}/spool/%n
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
SlurmctldLogFile={lab}/log/slurmctld.log
SlurmdLogFile={lab}/log/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
PlugStackConfig=/etc/slurm/plugstack.conf
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
GresTypes=gpu
ReturnToService=2
SlurmdTimeout=15
MessageTimeout=5
KillWait=8
BatchStartTimeout=10
UnkillableStepTimeout=180
InactiveLimit=0
MinJobAge=300
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
PriorityType=priority/basic
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
JobAcctGatherType=jobacct_gather/none
NodeName=node[1-{nodes}] CPUs={cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory={memory} {gres}
PartitionName=DEFAULT Nodes=ALL State=UP OverSubscribe=NO DefaultTime=10
PartitionName=main Default=YES MaxTime=60 PriorityTier=10 PreemptMode=OFF
PartitionName=high MaxTime=60 PriorityTier=100 PreemptMode=OFF
PartitionName=low MaxTime=UNLIMITED PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
"""


def missing() -> str:
    """Why no cluster can be had here; empty if one can."""
    if os.geteuid() != 0:
        return "the Slurm lab needs root"
    path = f"{os.environ['PATH']}:/usr/sbin"
    absent = [name for name in ("slurmctld", "slurmd", "munged", "ip", "iptables", "gcc") if not shutil.which(name, path=path)]
    if not Path("/usr/include/slurm/spank.h").exists():
        absent.append("slurm/spank.h")
    return f"not installed: {', '.join(absent)} (make slurm-packages)" if absent else ""


class Cluster(Machines):
    """The machines of a lab with Slurm on them."""

    @property
    def bin(self) -> Path:
        """Slurm's client commands, for this host's PATH."""
        return self.folder / "bin"

    @property
    def images(self) -> Path:
        """The images that srun --container-image finds by name: a directory each, with / : # @ in its name as +."""
        return self.folder / "images"

    def up(self) -> None:
        """Bring the cluster up; what came of it so far is removed if that fails."""
        if self.folder.exists():
            raise LabError(f"{self.folder} exists; run down first")
        try:
            self._configure()
            self.wire()
            for machine in self.all:
                self.boot(machine)
            self.on(LOGIN, "slurmctld")
            for node in self.nodes:
                self.start_slurmd(node)
            wait_for(self.idle, 60, "idle nodes")
            self._make_clients()
        except BaseException:
            for log in sorted(self.folder.glob("log/*")):
                print(f"--- {log.name}\n{log.read_text()[-2000:]}", file=sys.stderr)
            self.down()
            raise

    def idle(self) -> bool:
        """Whether every node waits for work."""
        done = self.on(LOGIN, "sinfo", "-h", "-N", "-p", "main", "-o", "%T", check=False)
        return done.stdout.split() == ["idle"] * len(self.nodes)

    def start_slurmd(self, node: str) -> None:
        self.on(node, "slurmd", "-N", node)

    def kill_slurmd(self, node: str) -> None:
        """Only the daemon; running steps go on."""
        self.on(node, "sh", "-c", "kill -KILL $(cat /run/slurm/slurmd.pid)")

    def power_on(self, node: str) -> None:
        """After `off`: boot, and the daemon starts as a service manager would start it."""
        self.link(node, "up")
        self.boot(node)
        self.start_slurmd(node)

    def _configure(self) -> None:
        lab, slurm = self.folder, self.folder / "etc" / "slurm"
        for path in (
            "etc/slurm",
            "images",
            "state",
            "log",
            "bin",
            *(f"spool/{node}" for node in self.nodes),
            *(f"m/{m}" for m in self.all),
        ):
            (lab / path).mkdir(parents=True)
        lab.chmod(0o755)
        (lab / "lab.json").write_text(json.dumps({"nodes": len(self.nodes), "gpus": self.gpus}))
        (lab / "shared").write_text("".join(f"{path}\n" for path in [CHECKOUT, *self.shared]))
        (lab / "etc" / "munge.key").write_bytes(os.urandom(1024))
        (lab / "etc" / "munge.key").chmod(0o400)
        hosts = "".join(f"{self.address(machine)} {machine}\n" for machine in self.all)
        (lab / "etc" / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        (lab / "etc" / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")  # no DNS in here
        self._add_user()
        gres = f"Gres=gpu:h100:{self.gpus}" if self.gpus else ""
        facts = {"name": self.name, "lab": lab, "nodes": len(self.nodes), "cpus": _CPUS, "memory": _MEMORY_MB, "gres": gres}
        (slurm / "slurm.conf").write_text(CONF.format(**facts))
        if self.gpus:
            device = f"/run/gpu/nvidia[0-{self.gpus - 1}]"
            (slurm / "gres.conf").write_text(f"NodeName=node[1-{len(self.nodes)}] Name=gpu Type=h100 File={device}\n")
        (slurm / "plugstack.conf").write_text(f"required {lab}/container.so images={self.images}\n")
        run("gcc", "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", lab / "container.so", CONTAINER_PLUGIN)
        (slurm / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")  # autodetection fails here

    def _add_user(self) -> None:
        """A plain user, known to the machines only."""
        home = self.folder / "home" / USER
        home.mkdir(parents=True)
        os.chown(home, UID, UID)
        users, groups = Path("/etc/passwd").read_text(), Path("/etc/group").read_text()
        if not re.search(rf"^{USER}:", users, re.MULTILINE):
            users += f"{USER}:x:{UID}:{UID}::{home}:/bin/bash\n"
            groups += f"{USER}:x:{UID}:\n"
        (self.folder / "etc" / "passwd").write_text(users)
        (self.folder / "etc" / "group").write_text(groups)

    def _make_clients(self) -> None:
        for name in CLIENTS:
            # Jobs inherit this PATH: inside the lab the wrapper is the plain command. Without -p nsenter does not fork, so that
            # signals reach the command itself.
            enter = f'nsenter -t {self.pid(LOGIN)} -m -u -i -n --wd="$PWD"'
            plain = f'[ -e /run/slurmlab-machine ] && exec /usr/bin/{name} "$@"'
            (self.bin / name).write_text(f'#!/bin/sh\n{plain}\nexec {enter} /usr/bin/{name} "$@"\n')
            (self.bin / name).chmod(0o755)


def existing(folder: Path) -> Cluster:
    """The cluster that `up` brought up there."""
    try:
        facts = json.loads((folder / "lab.json").read_text())
    except OSError:
        raise LabError(f"no lab in {folder}; run up first") from None
    return Cluster(folder, facts["nodes"], facts["gpus"], [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/var/lib/slurmlab"))
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up")
    up.add_argument("--nodes", type=int, default=2)
    up.add_argument("--gpus", type=int, default=8)
    up.add_argument("--share", type=Path, action="append", default=[], help="a folder below /tmp or /run that all machines see")
    execute = commands.add_parser("exec")
    execute.add_argument("-n", "--node", default=LOGIN)
    execute.add_argument("-u", "--user", default="root")
    execute.add_argument("argv", nargs=argparse.REMAINDER)
    for name in ("down", "status"):
        commands.add_parser(name)
    actions = {
        "off": Cluster.off,
        "on": Cluster.power_on,
        "heal": Cluster.heal,
        "kill-slurmd": Cluster.kill_slurmd,
        "start-slurmd": Cluster.start_slurmd,
    }
    for name in actions:
        commands.add_parser(name).add_argument("node")
    arguments = parser.parse_args()
    if arguments.command == "up":
        cluster = Cluster(arguments.folder, arguments.nodes, arguments.gpus, arguments.share)
        cluster.up()
        print(f"export PATH={cluster.bin}:$PATH")
    elif arguments.command == "down":
        Cluster(arguments.folder, 0, 0, []).down()
    elif arguments.command == "status":
        print(existing(arguments.folder).on(LOGIN, "sinfo", "-N", check=False).stdout, end="")
    elif arguments.command == "exec":
        argv = arguments.argv[1:] if arguments.argv[:1] == ["--"] else arguments.argv
        enter = existing(arguments.folder).enter(arguments.node, arguments.user, os.getcwd())
        sys.exit(subprocess.run([*enter, *argv]).returncode)
    else:
        actions[arguments.command](existing(arguments.folder), arguments.node)


if __name__ == "__main__":
    try:
        main()
    except LabError as error:
        sys.exit(f"error: {error}")
