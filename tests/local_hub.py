"""A Hub on 127.0.0.1: the part of its HTTP API by which `huggingface_hub`, `transformers` and `datasets` describe,
download, create and upload to repositories. Weights come by Git LFS, not by Xet. Nothing is kept on disk.

`conftest.py` opens it at the address that HF_ENDPOINT has for the whole session; the fixture `hub` has it answer.
"""

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_owner"
GATED = {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to this repository is restricted"}


def contents(folder: Path) -> dict[str, bytes]:
    """The files below a folder, by name."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def commit_of(files: dict[str, bytes]) -> str:
    """40 hexadecimal digits that name a state of all files."""
    digest = hashlib.sha1()
    for name, content in sorted(files.items()):
        digest.update(name.encode() + hashlib.sha1(content).digest())
    return digest.hexdigest()


@dataclass
class Repository:
    gated: bool = False
    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def add(self, files: dict[str, bytes], revision: str = "main") -> str:
        commit = commit_of(files)
        self.commits[commit] = files
        self.refs[revision] = commit
        return commit

    def commit(self, revision: str) -> str | None:
        return self.refs.get(revision, revision if revision in self.commits else None)


class LocalHub(ThreadingHTTPServer):
    """`repositories`: (models or datasets, name) -> `Repository`. `requests`: what was asked for. `cuts`: so many
    commits are cut off."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        self.clear()

    def clear(self) -> None:
        self.repositories, self.objects, self.requests, self.cuts = {}, {}, [], 0

    @cached_property
    def thread(self) -> threading.Thread:
        """Answers from when it is first asked for."""
        thread = threading.Thread(target=self.serve_forever, daemon=True)
        thread.start()
        return thread

    def put(self, name: str, source: Path | dict[str, bytes], kind: str = "models", **options: bool) -> str:
        """A new commit of a repository, with the files of a folder; returns its name."""
        source = contents(source) if isinstance(source, Path) else source
        return self.repositories.setdefault((kind, name), Repository(**options)).add(source)

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        repository = self.repositories["models", name]
        return repository.commits[repository.refs[revision]]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: LocalHub

    def do_GET(self):
        path, query = self.request_path()
        if path == "/api/whoami-v2":
            return self.answer({"type": "user", "name": "user"} if self.is_owner else {"error": "Invalid token"}, 200)
        if path.startswith("/api/"):
            kind, *rest = path.removeprefix("/api/").split("/")
            return self.describe(kind, "/".join(rest[:2]), rest[2:], query.get("recursive") in (["True"], ["true"]))
        kind = "datasets" if path.startswith("/datasets/") else "models"
        user, _, rest = path.removeprefix("/datasets").removeprefix("/").partition("/")
        name, action, *rest = [*rest.split("/"), ""]
        repository = self.repository(kind, f"{user}/{name}")
        if repository is None or action != "resolve":
            return self.missing("Repo")
        rest.pop()
        if repository.gated and not self.is_owner:
            return self.answer({"error": GATED["X-Error-Message"]}, 401, GATED)
        commit, file = repository.commit(rest[0]), "/".join(rest[1:])
        if commit is None:
            return self.missing("Revision")
        if file not in repository.commits[commit]:
            return self.missing("Entry", {"X-Repo-Commit": commit})
        self.send_file(repository.commits[commit][file], commit)

    do_HEAD = do_GET

    def describe(self, kind, name, rest, recursive):
        repository = self.repository(kind, name)
        if repository is None:
            return self.missing("Repo")
        if rest[:1] == ["auth-check"]:
            refused = repository.gated and not self.is_owner
            return self.answer({"error": GATED["X-Error-Message"]}, 403, GATED) if refused else self.answer({})
        commit = repository.commit(rest[1] if rest else "main")
        if commit is None:
            return self.missing("Revision")
        files = repository.commits[commit]
        if rest[:1] == ["tree"]:
            below = "".join(f"{part}/" for part in rest[2:])
            entries = [tree_entry for tree_entry in tree(files) if tree_entry["path"].startswith(below)]
            if below and not entries:
                return self.missing("Entry")
            deep = [one for one in entries if "/" in one["path"].removeprefix(below)]
            return self.answer([one for one in entries if recursive or one not in deep])
        siblings = [{"rfilename": path} for path in files]
        flags = {"private": repository.private, "gated": "manual" if repository.gated else False}
        self.answer({"id": name, "sha": commit, "siblings": siblings, "lastModified": None, "tags": [], **flags})

    def do_POST(self):
        body, (path, _) = self.body(), self.request_path()
        _, _, kind, *parts = path.split("/")
        if path == "/api/validate-yaml":
            if b"license: MIT" not in body:
                return self.answer({"errors": [], "warnings": []})
            return self.answer({"errors": [{"message": '"license" must be one of [mit]'}], "warnings": []}, 400)
        if parts[2:3] == ["paths-info"]:
            files = self.repository(kind, "/".join(parts[:2])).commits[parts[3]]
            wanted = parse_qs(body.decode())["paths"] if body[:1] != b"{" else json.loads(body)["paths"]
            return self.answer([one for one in tree(files) if one["path"] in wanted])
        if not self.is_owner:
            return self.answer({"error": "Invalid credentials in Authorization header"}, 401)
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'user'}/{asked['name']}"
            if not name.startswith("user/"):
                return self.answer({"error": "You don't have the rights to create a model under this namespace"}, 403)
            private = asked.get("private") or asked.get("visibility") == "private"
            repository = self.server.repositories.setdefault(("models", name), Repository(private=bool(private)))
            repository.refs or repository.add({})
            return self.answer({"url": f"{self.server.address}/{name}", "id": name, "name": name})
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = [{k: asked[k] for k in ("oid", "size")} for asked in json.loads(body)["objects"]]
            for one in objects:
                if one["oid"] not in self.server.objects:
                    one["actions"] = {"upload": {"href": f"{self.server.address}/objects/{one['oid']}"}}
            return self.answer({"transfer": "basic", "objects": objects})
        name, (action, *rest) = "/".join(parts[:2]), parts[2:]
        repository = self.server.repositories["models", name]
        if action == "preupload":
            paths = [file["path"] for file in json.loads(body)["files"]]
            modes = {path: "lfs" if path.endswith(".safetensors") else "regular" for path in paths}
            files = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
            return self.answer({"files": files})
        assert action == "commit", path
        if self.server.cuts:
            self.server.cuts -= 1
            self.close_connection = True
            return self.connection.close()
        files = dict(repository.commits[repository.commit(rest[0])])
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
        commit = repository.add(files, rest[0])
        address = f"{self.server.address}/{name}/commit/{commit}"
        self.answer({"success": True, "commitUrl": address, "commitOid": commit})

    def do_PUT(self):
        body, oid = self.body(), Path(self.request_path()[0]).name
        if hashlib.sha256(body).hexdigest() != oid:
            return self.answer({"error": "the content does not have this hash"}, 400)
        self.server.objects[oid] = body
        self.answer({})

    @property
    def is_owner(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def repository(self, kind: str, name: str) -> Repository | None:
        """The repository, unless it is private and another's."""
        repository = self.server.repositories.get((kind, name))
        return None if repository is None or (repository.private and not self.is_owner) else repository

    def request_path(self):
        parts = urlsplit(self.path)
        self.server.requests.append(f"{self.command} {unquote(parts.path)}")
        return unquote(parts.path), parse_qs(parts.query)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def missing(self, what, headers=None):
        # As the Hub does: whether a repository is private is not told
        status = 401 if what == "Repo" and not self.is_owner else 404
        self.answer({"error": f"{what} not found"}, status, {"X-Error-Code": f"{what}NotFound", **(headers or {})})

    def send_file(self, content: bytes, commit: str):
        size, status = len(content), 200
        headers = {
            "X-Repo-Commit": commit,
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "Accept-Ranges": "bytes",
        }
        if asked := self.headers.get("Range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            first, last = int(first), min(int(last or size), size - 1)
            content, status = content[first : last + 1], 206
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        self.send(content, status, {"Content-Type": "application/octet-stream", **headers})

    def answer(self, content, status=200, headers=None):
        self.send(json.dumps(content).encode(), status, {"Content-Type": "application/json", **(headers or {})})

    def send(self, data, status, headers):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_):
        pass


def tree(files: dict[str, bytes]) -> list[dict]:
    """The entries of all files and folders."""
    folders = {str(parent) for path in files for parent in Path(path).parents} - {"."}
    entries = [
        {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
        for path, content in files.items()
    ]
    return entries + [{"type": "directory", "path": folder, "oid": "0"} for folder in sorted(folders)]
