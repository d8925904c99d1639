#!/usr/bin/env bash
# PID 1 of one machine of the lab. $1: its name, $2: the lab's folder; sizes and shared paths come in the environment.
set -eu
name=$1
lab=$2
mount --make-rprivate /
hostname "$name"
sysctl -qw net.ipv6.conf.all.disable_ipv6=1 2>/dev/null || true
ip link set lo up

# private_tmpfs TARGET OPTIONS PATH...: a fresh tmpfs on TARGET, with the PATHs below it still visible
private_tmpfs() {
  local target=$1 options=$2 stage=$lab/m/$name/stage path
  shift 2
  mkdir -p "$stage"
  mount -t tmpfs -o "$options" tmpfs "$stage"
  for path in "$@"; do
    case "$path" in "$target"/*) ;; *) continue ;; esac
    [ -e "$path" ] || continue
    mkdir -p "$stage${path#"$target"}"
    mount --rbind "$path" "$stage${path#"$target"}"
  done
  mkdir -p "$stage/mount"
  mount -n --move "$stage" "$target" # -n: a fresh /run hides the mount table that mount would update
}

for file in hosts nsswitch.conf passwd group; do mount --bind "$lab/etc/$file" "/etc/$file"; done
echo "$name" >"$lab/m/$name/hostname"
if [ -e /etc/hostname ]; then mount --bind "$lab/m/$name/hostname" /etc/hostname; fi
mkdir -p /etc/slurm
mount --bind "$lab/etc/slurm" /etc/slurm
readarray -t shared <"$lab/shared"
private_tmpfs /dev/shm "mode=1777,size=$SHM_SIZE"
private_tmpfs /run mode=755,size=64m "$lab" "${shared[@]}"
if [ "$name" != login ]; then private_tmpfs /tmp "mode=1777,size=$TMP_SIZE" "$lab" "${shared[@]}"; fi

mkdir -p /run/munge /run/slurm /run/lock /run/gpu
echo "$name" >/run/slurmlab-machine
# fake GPUs: character devices in the machine's own /run, as gres.conf names them (a count without files drains the node)
for ((i = 0; i < GPUS; i++)); do mknod -m 666 "/run/gpu/nvidia$i" c 195 "$i"; done
munged --key-file="$lab/etc/munge.key" --socket=/run/munge/munge.socket.2 --num-threads=4 \
  --pid-file=/run/munge/munged.pid --log-file="$lab/m/$name/munged.log" --seed-file="$lab/m/$name/munged.seed"
: >"$lab/m/$name/booted"
trap 'exit 0' TERM
while :; do
  sleep 3600 &
  wait $! || true # this shell reaps the orphans
done
