"""What breaks an Indexed Job: its indexes, its headless Service, and the variables that nobody but the manifest sets.

C.1-C.3 are sections of the project's notes on the real controllers, A13-J1 entries of its fault catalogue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from trainer.launch.lint.fields import Container
from trainer.launch.lint.jobs import Job


def _indexed(job: Job) -> Iterator[str]:
    """C.3: an Indexed Job has as many pods at once as indexes."""
    if job.kind != "Job" or job.nodes < 2:
        return
    mode, completions, parallelism = (job.top["spec"][key] for key in ("completionMode", "completions", "parallelism"))
    if mode.text != "Indexed":
        yield mode.line("the pods get no index and no host names", "write Indexed")
    if (completions.number or 1) != (parallelism.number or 1):
        wrong = f"completions {completions.text or 'missing'}, parallelism {parallelism.text or 'missing, so 1'}"
        yield parallelism.line(f"not all nodes run at once: {wrong}", f"write {job.nodes} for both")


def _service(job: Job) -> Iterator[str]:
    """C.3, J1: pods find node 0 by a headless Service that knows them before they are ready."""
    if job.kind != "Job" or job.nodes < 2:
        return
    template = job.pods[0].template
    subdomain = template.at("spec.subdomain")
    if not subdomain.text:
        yield subdomain.line("the pods have no DNS names", "write the name of a headless Service")
        return
    space = job.top.at("metadata.namespace").text
    named = [s for s in job.documents("Service") if s.at("metadata.name").text == subdomain.text]
    service = next((s for s in named if s.at("metadata.namespace").text == space), None)
    if service is None:
        other = f"; it is in namespace {named[0].at('metadata.namespace').text or 'default'}" if named else ""
        yield subdomain.line(f"no Service of this name in these files{other}", "add a headless Service with clusterIP: None")
        return
    spec = service["spec"]
    if spec["clusterIP"].text != "None":
        yield spec["clusterIP"].line("pods get DNS names by a headless Service only", "write clusterIP: None")
    if spec["publishNotReadyAddresses"].value is not True:
        yield spec["publishNotReadyAddresses"].line("a pod's name is unknown until it is ready", "write true")
    own = {"job-name": job.name, "batch.kubernetes.io/job-name": job.name}
    labels = own | {label.key: label.value for label in template.at("metadata.labels").each()}
    selector = spec["selector"]
    wrong = [e for e in selector.each() if labels.get(e.key) != e.value] if isinstance(selector.value, dict) else []
    if not selector.value:
        yield selector.line("selects no pods", f"write job-name: {job.name}")
    for entry in wrong:
        yield entry.line("no pod of the job has this label", f"write job-name: {job.name}, or label the pod template so")


def _identity(job: Job) -> Iterator[str]:
    """C.3, A13, A15, A16: nobody but the manifest tells the pods of an Indexed Job who they are."""
    main = job.pods[0].main if job.kind == "Job" and job.nodes > 1 else None
    if main is None or main.launcher not in ("trainer", "torchrun") or main.own["envFrom"].value:
        return
    given = {entry["name"].text for entry in main.env} | set(main.flags)
    wanted = [("PET_NNODES", "nnodes"), ("PET_NODE_RANK", "node-rank"), ("PET_MASTER_ADDR", "master-addr")]
    if main.launcher == "trainer":
        wanted[2:] = [("PET_MASTER_ADDR", "MASTER_ADDR"), ("PET_MASTER_PORT", "MASTER_PORT")]
    elif {"PET_RDZV_ENDPOINT", "rdzv-endpoint"} & given:
        wanted = wanted[:1]
    missing = [name for name, other in wanted if not {name, other} & given]
    if missing:
        fix = "set them; PET_NODE_RANK by fieldRef metadata.labels['batch.kubernetes.io/job-completion-index']"
        yield main.own["env"].line(f"nobody tells the pods {', '.join(missing)}", fix)
    yield from _counts(job, main)


def _counts(job: Job, main: Container) -> Iterator[str]:
    for entry in main.env:
        number = entry["value"].number
        if entry["name"].text == "PET_NNODES" and number not in (None, job.nodes):
            yield entry["value"].line(f"the Job has {job.nodes} pods", f'write "{job.nodes}"')
        if entry["name"].text == "WORLD_SIZE" and number is not None and (number < job.nodes or number % job.nodes):
            yield entry["value"].line(f"does not fit {job.nodes} pods", "remove it; the launcher sets it")


RULES: list[Callable[[Job], Iterator[str]]] = [_indexed, _service, _identity]
