"""PyTorchJob (kubeflow.org/v1) as training-operator 1.9 expands it.

The environment is appended to every container's own, so it wins over a user's entry of the same name; init containers get none.
"""

from __future__ import annotations

import copy
import re

from tests.lab.kube.workload import TRAINING_LABEL, Manifest, ManifestError, Pod, Workload, namespace_of, with_port_protocols

CONTAINER, PORT_NAME, PORT = "pytorch", "pytorchjob-port", 23456
INIT_CONTAINER = "init-pytorch"
_ELASTIC_FIELDS = {"maxRestarts": "PET_MAX_RESTARTS", "nProcPerNode": "PET_NPROC_PER_NODE", "rdzvId": "PET_RDZV_ID"}


def expand(manifest: Manifest) -> Workload:
    """The pods of a PyTorchJob, the Master's first."""
    job = with_defaults(manifest)
    spec, policy = job["spec"], job["spec"].get("runPolicy") or {}
    replicas = spec["pytorchReplicaSpecs"]
    kinds = sorted(replicas)  # Master, Worker
    pods = [_pod(job, kind, index) for kind in kinds for index in range(replicas[kind]["replicas"])]
    return Workload(
        kind="PyTorchJob",
        name=job["metadata"]["name"],
        pods=() if policy.get("suspend") else tuple(pods),
        namespace=namespace_of(job),
        suspended=bool(policy.get("suspend")),
        backoff_limit=policy.get("backoffLimit"),
        active_deadline_seconds=policy.get("activeDeadlineSeconds"),
        clean_pod_policy=policy.get("cleanPodPolicy") or "None",
        elastic=spec.get("elasticPolicy") is not None,
    )


def services(manifest: Manifest) -> list[Manifest]:
    """The headless Service of each pod, named as the pod; it does not publish addresses before their pod is ready."""
    job = with_defaults(manifest)
    found = []
    for pod in expand(manifest).pods:
        labels = _labels(job, pod.replica_type, pod.index)
        ports = [port | {"port": port["containerPort"], "targetPort": port["containerPort"]} for port in _main(pod.spec)["ports"]]
        for port in ports:
            del port["containerPort"]
        found.append(
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": pod.name, "namespace": namespace_of(job), "labels": labels},
                "spec": {"clusterIP": "None", "selector": labels, "ports": ports},
            }
        )
    return found


def with_defaults(manifest: Manifest) -> Manifest:
    """The defaults that the operator sets (the CRD's text says otherwise of restartPolicy)."""
    job = copy.deepcopy(manifest)
    spec = job["spec"]
    replicas = spec["pytorchReplicaSpecs"]
    for replica in replicas.values():
        replica.setdefault("replicas", 1)
        replica.setdefault("restartPolicy", "OnFailure")
        ports = _main(replica["template"]["spec"]).setdefault("ports", [])
        if not any(port.get("name") == PORT_NAME for port in ports):
            ports.append({"name": PORT_NAME, "containerPort": PORT})
        with_port_protocols(replica["template"]["spec"]["containers"])
    elastic = spec.get("elasticPolicy")
    if elastic is not None:
        workers = replicas["Worker"]["replicas"]
        low, high = elastic.get("minReplicas"), elastic.get("maxReplicas")
        elastic["minReplicas"], elastic["maxReplicas"] = low or high or workers, high or low or workers
    if "nprocPerNode" not in spec and not (elastic or {}).get("nProcPerNode"):
        spec["nprocPerNode"] = "auto"
    return job


def _main(pod_spec: Manifest) -> Manifest:
    for container in pod_spec["containers"]:
        if container["name"] == CONTAINER:
            found: Manifest = container
            return found
    raise ManifestError(f"no container is named {CONTAINER}")


def _labels(job: Manifest, kind: str, index: int) -> dict[str, str]:
    return {
        f"{TRAINING_LABEL}/operator-name": "pytorchjob-controller",
        f"{TRAINING_LABEL}/job-name": job["metadata"]["name"],
        f"{TRAINING_LABEL}/replica-type": kind.lower(),
        f"{TRAINING_LABEL}/replica-index": str(index),
    }


def _pod(job: Manifest, kind: str, index: int) -> Pod:
    replicas = job["spec"]["pytorchReplicaSpecs"]
    template = copy.deepcopy(replicas[kind]["template"])
    metadata, spec = template.get("metadata") or {}, template["spec"]
    name = f"{job['metadata']['name']}-{kind.lower()}-{index}"
    master = f"{job['metadata']['name']}-master-0" if "Master" in replicas else ""
    added = [{"name": n, "value": v} for n, v in _environment(job, kind, index)]
    for container in spec["containers"]:
        container["env"] = [*(container.get("env") or []), *added]
    if kind == "Worker" and master:
        spec["initContainers"] = [*(spec.get("initContainers") or []), _init_container(master)]
    policy = replicas[kind]["restartPolicy"]
    spec["restartPolicy"] = "Never" if policy == "ExitCode" else policy
    role = {f"{TRAINING_LABEL}/job-role": "master"} if kind == "Master" or (not master and index == 0) else {}
    return Pod(
        name=name,
        index=index,
        replica_type=kind,
        restart_policy=policy,
        labels={**(metadata.get("labels") or {}), **_labels(job, kind, index), **role},
        annotations=metadata.get("annotations") or {},
        spec=spec,
        hostname=spec.get("hostname") or name,
        dns_names=(name,),
        waits_for=master if kind == "Worker" else "",
    )


def _environment(job: Manifest, kind: str, index: int) -> list[tuple[str, str]]:
    spec, name = job["spec"], job["metadata"]["name"]
    replicas, elastic, per_node = spec["pytorchReplicaSpecs"], spec.get("elasticPolicy"), spec.get("nprocPerNode")
    nodes = sum(replica["replicas"] for replica in replicas.values())
    found = [("PYTHONUNBUFFERED", "1")]
    if "Master" in replicas:
        port, rank = str(_port(replicas["Master"])), str(index + 1 if kind == "Worker" else index)
        world_size = nodes * (int(per_node) if re.fullmatch(r"[+-]?\d+", per_node or "") else 1)
        found += [(f"{prefix}MASTER_PORT", port) for prefix in ("", "PET_")]
        found += [(f"{prefix}MASTER_ADDR", f"{name}-master-0") for prefix in ("", "PET_")]
        found += [("WORLD_SIZE", str(world_size)), ("RANK", rank), ("PET_NODE_RANK", rank)]  # a node's rank in both
    if per_node is not None:
        found.append(("PET_NPROC_PER_NODE", per_node))
    return found + ([("PET_NNODES", str(nodes))] if elastic is None else _elastic_environment(job, elastic))


def _elastic_environment(job: Manifest, elastic: Manifest) -> list[tuple[str, str]]:
    host = elastic.get("rdzvHost") or f"{job['metadata']['name']}-worker-0"
    port = elastic.get("rdzvPort") or _port(job["spec"]["pytorchReplicaSpecs"]["Worker"])
    found = [
        ("PET_RDZV_ENDPOINT", f"{host}:{port}"),
        ("PET_RDZV_BACKEND", elastic.get("rdzvBackend") or "c10d"),
        ("PET_NNODES", f"{elastic['minReplicas']}:{elastic['maxReplicas']}"),
    ]
    found += [(variable, str(elastic[key])) for key, variable in _ELASTIC_FIELDS.items() if key in elastic]
    if elastic.get("rdzvConf"):
        found.append(("PET_RDZV_CONF", ",".join(f"{pair['key']}={pair['value']}" for pair in elastic["rdzvConf"])))
    if elastic.get("standalone"):
        found.append(("PET_STANDALONE", ""))
    return found


def _port(replica: Manifest) -> int:
    ports = _main(replica["template"]["spec"])["ports"]
    return next(int(port["containerPort"]) for port in ports if port.get("name") == PORT_NAME)


def _init_container(master: str) -> Manifest:
    look_up = f"if nslookup {master}; then err=0 && break; fi;echo waiting for master; sleep 2;"
    return {
        "name": INIT_CONTAINER,
        "image": "alpine:3.10",
        "command": ["sh", "-c", f"err=1;for i in $(seq 100); do {look_up} done; exit $err"],
        "resources": {"limits": {"cpu": "100m", "memory": "20Mi"}, "requests": {"cpu": "50m", "memory": "10Mi"}},
    }
