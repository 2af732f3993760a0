"""A server that speaks the part of the Hub's HTTP API that `huggingface_hub` uses to create, upload to, describe and
download a model repository. It keeps everything on disk, `user/name/revision` with every commit whole; weights come by
Git LFS, as the Hub takes them, not by Xet."""

import base64
import hashlib
import json
import shutil
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from huggingface_hub import ModelCard
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers.pipelines import get_supported_tasks
from yaml import YAMLError

TOKEN = "hf_owner"


class Hub(ThreadingHTTPServer):
    """`fail_uploads` and `fail_commits`: so many of them are cut off. `private`: repository -> whether it is."""

    def __init__(self, root: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.root, self.objects = root / "repositories", root / "objects"
        self.root.mkdir()
        self.objects.mkdir()
        self.private, self.fail_uploads, self.fail_commits = {}, 0, 0

    def repositories(self) -> list[str]:
        return sorted(str(path.relative_to(self.root)) for path in self.root.glob("*/*"))

    def folder(self, repository: str, revision: str) -> Path:
        return self.root / repository / quote(revision, safe="")

    def files(self, repository: str, revision: str = "main") -> dict[str, bytes] | None:
        """Path -> content; None if there is no such branch, pull request or commit."""
        folders = [self.folder(repository, revision), *(self.root / repository).glob("*")]
        for number, folder in enumerate(folders):
            if folder.is_dir():
                files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
                if number == 0 or commit(files) == revision:
                    return files
        return None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_POST(self):
        body, path = self.body(), unquote(urlsplit(self.path).path)
        if path == "/api/validate-yaml":
            errors = [{"message": problem} for problem in problems_of_card(json.loads(body)["content"])]
            return self.answer({"errors": errors, "warnings": []}, 400 if errors else 200)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer({"error": "Invalid credentials in Authorization header"}, 401)
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        if path.endswith(".git/info/lfs/objects/batch"):
            return self.describe_uploads(json.loads(body))
        _, _, _, user, name, action, *rest = path.split("/")
        repository = f"{user}/{name}"
        if action == "branch":
            if not self.server.folder(repository, rest[0]).exists():
                shutil.copytree(self.server.folder(repository, "main"), self.server.folder(repository, rest[0]))
            return self.answer({})
        if action == "preupload":
            paths = [file["path"] for file in json.loads(body)["files"]]
            modes = {path: "lfs" if path.endswith(".safetensors") else "regular" for path in paths}
            files = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
            return self.answer({"files": files})
        assert action == "commit", path
        if self.server.fail_commits:
            self.server.fail_commits -= 1
            return self.cut_off()
        pull_request = "create_pr=1" in urlsplit(self.path).query
        return self.commit(repository, "refs/pr/1" if pull_request else rest[0], map(json.loads, body.splitlines()))

    def create(self, request):
        name = f"{request.get('organization') or 'user'}/{request['name']}"
        if name.split("/")[0] != "user":
            return self.answer({"error": "You don't have the rights to create a model under this namespace"}, 403)
        self.server.private[name] = request.get("private") or request.get("visibility") == "private"
        self.server.folder(name, "main").mkdir(parents=True, exist_ok=True)
        return self.answer({"url": self.address(name), "id": name, "name": name})

    def describe_uploads(self, request):
        objects = []
        for asked in request["objects"]:
            there = (self.server.objects / asked["oid"]).exists()
            actions = {} if there else {"actions": {"upload": {"href": self.address(f"objects/{asked['oid']}")}}}
            objects.append({"oid": asked["oid"], "size": asked["size"], **actions})
        return self.answer({"transfer": "basic", "objects": objects})

    def do_PUT(self):
        if self.server.fail_uploads:
            self.server.fail_uploads -= 1
            return self.cut_off()
        body, oid = self.body(), Path(urlsplit(self.path).path).name
        if hashlib.sha256(body).hexdigest() != oid:
            return self.answer({"error": "the content does not have this hash"}, 400)
        (self.server.objects / oid).write_bytes(body)
        return self.answer({})

    def commit(self, repository, revision, entries):
        folder = self.server.folder(repository, revision)
        new = folder.with_name(f".{folder.name}")
        source = folder if folder.exists() else self.server.folder(repository, "main")
        shutil.copytree(source, new)
        for entry in entries:
            value = entry["value"]
            if entry["key"] == "file":
                content = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                content = (self.server.objects / value["oid"]).read_bytes()
            else:
                continue
            path = new / value["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)
        name = commit(self.server.files(repository, revision))
        answer = {"success": True, "commitUrl": f"{self.address(repository)}/commit/{name}", "commitOid": name}
        if revision == "refs/pr/1":
            answer["pullRequestUrl"] = f"{self.address(repository)}/discussions/1"
        return self.answer(answer)

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        if path.startswith("/api/models/"):
            user, name, *rest = path.removeprefix("/api/models/").split("/")
            return self.describe(f"{user}/{name}", rest)
        user, name, resolve, revision, *parts = path.strip("/").split("/")
        files = self.server.files(f"{user}/{name}", revision)
        if resolve != "resolve" or files is None:
            return self.answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        if "/".join(parts) not in files:
            headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit(files)}
            return self.answer({"error": "Entry not found"}, 404, headers)
        content = files["/".join(parts)]
        headers = {"X-Repo-Commit": commit(files), "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        return self.send(content, 200, {"Content-Type": "application/octet-stream", **headers})

    do_HEAD = do_GET

    def describe(self, repository, rest):
        files = self.server.files(repository, rest[1] if len(rest) > 1 else "main")
        if files is None:
            return self.answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        if rest and rest[0] == "tree":
            entries = [{"type": "file", "path": name, "size": len(c), "oid": "0"} for name, c in files.items()]
            return self.answer(entries)
        siblings = [{"rfilename": name} for name in files]
        private = self.server.private[repository]
        return self.answer({"id": repository, "sha": commit(files), "siblings": siblings, "private": private})

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def cut_off(self):
        self.close_connection = True
        self.connection.close()

    def address(self, name):
        return f"http://{self.headers['Host']}/{name}"

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


def commit(files):
    """40 hexadecimal digits that name a state of all files."""
    digest = hashlib.sha1()
    for name, content in sorted(files.items()):
        digest.update(name.encode() + hashlib.sha1(content).digest())
    return digest.hexdigest()


def problems_of_card(content):
    """What of the Hub's rules for a card's metadata can be told without the Hub."""
    try:
        data = ModelCard(content).data.to_dict()  # parses `model-index` with its results, too
    except (ValueError, YAMLError) as error:
        return [str(error)]
    strings = ("license", "library_name", "pipeline_tag", "base_model")
    problems = [f"{key} must be a string" for key in strings if not isinstance(data.get(key, ""), str)]
    if data.get("pipeline_tag", "other") not in {"other", *get_supported_tasks()}:
        problems.append(f"{data['pipeline_tag']} is no task")
    datasets = data.get("datasets", [])
    try:
        for name in [datasets] if isinstance(datasets, str) else datasets:
            validate_repo_id(name)
    except HFValidationError as error:
        problems.append(str(error))
    return problems


@contextmanager
def serve(root: Path):
    server = Hub(root)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def environment(server, token=TOKEN):
    """What a process needs to take the server for the Hub."""
    address = f"http://127.0.0.1:{server.server_address[1]}"
    return {"HF_ENDPOINT": address, "HF_TOKEN": token, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
