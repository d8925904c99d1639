"""A Kubernetes API server on loopback for the real kubectl: it validates strictly, stores objects, and records every request.

Nothing acts on the objects: a test adds the pods, events and logs that it wants kubectl to find. Answered are apply, replace,
patch, get (lists with label and field selectors), delete and logs; not describe, watches, exec.
"""

from __future__ import annotations

import copy
import json
import re
import tempfile
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.lab.kube import schema
from tests.lab.kube.discovery import RESOURCES, Resource, document, prefix
from tests.lab.kube.patch import merged
from tests.lab.kube.selectors import selected
from tests.lab.kube.workload import Manifest

_BORN = "2025-01-01T00:00:00Z"
_APPLY, _STRATEGIC = "application/apply-patch+yaml", "application/strategic-merge-patch+json"


@dataclass(frozen=True)
class Request:
    """One request as it came, and the status code that it got."""

    verb: str
    path: str
    query: dict[str, str]
    content_type: str = ""
    body: Any = None
    code: int = 0


class ApiError(Exception):
    """Becomes a Status object."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


@dataclass
class KubeApi:
    """The server, for the time of a with block."""

    strict: bool = True  # answer 422 to what schema finds wrong, unless the client asks for no validation
    requests: list[Request] = field(default_factory=list)
    objects: dict[str, Manifest] = field(default_factory=dict)  # path -> object
    logs: dict[tuple[str, str, bool], str] = field(default_factory=dict)  # namespace, pod, previous -> text
    _revision: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> KubeApi:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads, self._server.block_on_close = True, False
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()
        self._home = tempfile.TemporaryDirectory(prefix="kube-api-")
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "lab", "cluster": {"server": f"http://127.0.0.1:{self._server.server_address[1]}"}}],
            "users": [{"name": "lab", "user": {}}],
            "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "lab"}}],
            "current-context": "lab",
        }
        Path(self._home.name, "config").write_text(json.dumps(config))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._home.cleanup()

    @property
    def environ(self) -> dict[str, str]:
        """What makes kubectl use this server; HOME because it caches there what a server can do."""
        return {"KUBECONFIG": str(Path(self._home.name, "config")), "HOME": self._home.name}

    def add(self, manifest: Manifest) -> None:
        """Store an object as it is: a Pod with its status, an Event, what a controller would have made."""
        with self._lock:
            self._store(_path_of(manifest), copy.deepcopy(manifest))

    def add_log(self, pod: str, text: str, namespace: str = "default", previous: bool = False) -> None:
        self.logs[namespace, pod, previous] = text

    def find(self, kind: str, name: str, namespace: str = "default") -> Manifest | None:
        """A stored object."""
        with self._lock:
            for found in self.objects.values():
                metadata = found["metadata"]
                if (found["kind"], metadata["name"]) == (kind, name) and metadata.get("namespace", namespace) == namespace:
                    return found
        return None

    def answer(self, request: Request) -> tuple[int, Any]:
        """Status code and body, which is text for logs."""
        try:
            told = document(request.path)
            if told is not None:
                return 200, told
            version, resource = _resource(request.path)
            if isinstance(request.body, bytes):
                raise ApiError(415, "UnsupportedMediaType", "this server reads JSON and YAML only; use kubectl apply")
            with self._lock:
                return self._on_object(request, version, resource)
        except ApiError as error:
            status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": str(error)}
            return error.code, status | {"reason": error.reason, "code": error.code}

    def _on_object(self, request: Request, version: str, resource: Resource) -> tuple[int, Any]:
        if request.verb == "GET":
            return 200, self._get(request, version, resource)
        if request.verb == "POST":
            self._check(request, request.body)
            path = f"{request.path}/{request.body['metadata']['name']}"
            if path in self.objects:
                raise ApiError(409, "AlreadyExists", f'{resource.name} "{path.rpartition("/")[2]}" already exists')
            return 201, self._write(request, path, request.body)
        old = self.objects.get(request.path)
        if request.verb == "PATCH" and request.content_type == _APPLY:
            made = merged(old or {}, request.body, strategic=True)
            self._check(request, made)
            return 200 if old else 201, self._write(request, request.path, made)
        if old is None:
            raise ApiError(404, "NotFound", f'{resource.name} "{request.path.rpartition("/")[2]}" not found')
        if request.verb == "DELETE":
            return 200, old if request.query.get("dryRun") else self.objects.pop(request.path)
        made = request.body if request.verb == "PUT" else merged(old, request.body, request.content_type == _STRATEGIC)
        self._check(request, made)
        return 200, self._write(request, request.path, made)

    def _get(self, request: Request, version: str, resource: Resource) -> Any:
        path = request.path
        if request.query.get("watch"):
            return ""  # nothing ever happens here
        if path in self.objects:
            return self.objects[path]
        log = re.fullmatch(r"/api/v1/namespaces/([^/]+)/pods/([^/]+)/log", path)
        if log:
            return self.logs.get((log[1], log[2], request.query.get("previous") == "true"), "")
        if path.rpartition("/")[2] != resource.name:
            raise ApiError(404, "NotFound", f'{resource.name} "{path.rpartition("/")[2]}" not found')
        everywhere = re.compile(re.escape(prefix(version)) + rf"(/namespaces/[^/]+)?/{resource.name}/[^/]+")
        wanted = re.compile(re.escape(path) + "/[^/]+") if "/namespaces/" in path else everywhere
        items = [found for key, found in self.objects.items() if wanted.fullmatch(key) and selected(found, request.query)]
        metadata = {"resourceVersion": str(self._revision)}
        return {"kind": f"{resource.kind}List", "apiVersion": version, "metadata": metadata, "items": items}

    def _check(self, request: Request, manifest: Manifest) -> None:
        if not self.strict or request.query.get("fieldValidation") == "Ignore":
            return
        errors = schema.check({key: value for key, value in manifest.items() if key != "status"})
        if errors:
            name = f'{manifest.get("kind")} "{manifest["metadata"].get("name")}"'
            raise ApiError(422, "Invalid", f"{name} is invalid: {'; '.join(errors)}")

    def _write(self, request: Request, path: str, manifest: Manifest) -> Manifest:
        if request.query.get("dryRun") == "All":
            return manifest
        return self._store(path, manifest)

    def _store(self, path: str, manifest: Manifest) -> Manifest:
        self._revision += 1
        namespace = re.search("/namespaces/([^/]+)/", path)
        known = {"uid": f"uid-{self._revision}", "creationTimestamp": _BORN, **({"namespace": namespace[1]} if namespace else {})}
        manifest["metadata"] = {**known, **manifest["metadata"], "resourceVersion": str(self._revision)}
        self.objects[path] = manifest
        return manifest


def _path_of(manifest: Manifest) -> str:
    version, metadata = manifest["apiVersion"], manifest["metadata"]
    resource = next(resource for resource in RESOURCES[version] if resource.kind == manifest["kind"])
    space = f"/namespaces/{metadata.get('namespace', 'default')}" if resource.namespaced else ""
    return f"{prefix(version)}{space}/{resource.name}/{metadata['name']}"


def _resource(path: str) -> tuple[str, Resource]:
    """What kind of object a path is about."""
    for version, resources in RESOURCES.items():
        if path.startswith(f"{prefix(version)}/"):
            words = path.removeprefix(f"{prefix(version)}/").split("/")
            name = words[2] if words[0] == "namespaces" and len(words) > 2 else words[0]
            for resource in resources:
                if resource.name == name:
                    return version, resource
    raise ApiError(404, "NotFound", "the server could not find the requested resource")


def _decoded(body: bytes) -> Any:
    """JSON, or YAML; some commands (kubectl create configmap) send protobuf, which stays bytes."""
    if not body:
        return None
    try:
        return json.loads(body)
    except ValueError:
        pass
    try:
        return yaml.safe_load(body)
    except yaml.YAMLError:
        return body


def _handler(api: KubeApi) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing: the test has the requests."""

        def _handle(self) -> None:
            url = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            came = Request(
                verb=self.command,
                path=url.path.rstrip("/"),
                query={key: values[0] for key, values in parse_qs(url.query, keep_blank_values=True).items()},
                content_type=self.headers.get("Content-Type") or "",
                body=_decoded(body),
            )
            code, answer = api.answer(came)
            api.requests.append(Request(came.verb, came.path, came.query, came.content_type, came.body, code))
            text = isinstance(answer, str)
            sent = answer.encode() if text else json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "text/plain" if text else "application/json")
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _handle

    return Handler
