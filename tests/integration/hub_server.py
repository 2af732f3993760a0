"""A server that speaks the part of the Hub's HTTP API that `huggingface_hub` uses to create, upload to, describe and
download a model repository. It keeps files in memory, every commit whole."""

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from huggingface_hub import ModelCard
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers.pipelines import get_supported_tasks
from yaml import YAMLError

TOKEN = "hf_owner"


class Handler(BaseHTTPRequestHandler):
    """`server.repositories`: name -> revision -> path -> bytes; `server.fail_commits`: so many commits are cut off."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = unquote(urlsplit(self.path).path)
        if path == "/api/validate-yaml":
            errors = [{"message": problem} for problem in problems_of_card(json.loads(body)["content"])]
            return self.answer({"errors": errors, "warnings": []}, 400 if errors else 200)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer({"error": "Invalid credentials in Authorization header"}, 401)
        query = urlsplit(self.path).query
        if path == "/api/repos/create":
            request = json.loads(body)
            name = f"{request.get('organization') or 'user'}/{request['name']}"
            if name.split("/")[0] != "user":
                return self.answer({"error": "You don't have the rights to create a model under this namespace"}, 403)
            self.server.private[name] = request.get("private") or request.get("visibility") == "private"
            self.server.repositories.setdefault(name, {"main": {}})
            return self.answer({"url": self.address(name), "id": name, "name": name})
        _, _, _, user, name, action, *rest = path.split("/")
        repository = self.server.repositories[f"{user}/{name}"]
        if action == "branch":
            repository.setdefault(rest[0], dict(repository["main"]))
            return self.answer({})
        if action == "preupload":
            asked = json.loads(body)["files"]
            modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in asked]
            return self.answer({"files": modes})
        assert action == "commit", path
        if self.server.fail_commits:
            self.server.fail_commits -= 1
            self.close_connection = True
            return self.connection.close()
        revision = "refs/pr/1" if "create_pr=1" in query else rest[0]
        files = dict(repository.get(revision, repository["main"]))
        for line in body.decode().splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
        repository[revision] = files
        answer = {"commitUrl": f"{self.address(f'{user}/{name}')}/commit/{commit(files)}", "commitOid": commit(files)}
        if revision == "refs/pr/1":
            answer["pullRequestUrl"] = f"{self.address(f'{user}/{name}')}/discussions/1"
        return self.answer({**answer, "success": True})

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        if path.startswith("/api/models/"):
            user, name, *rest = path.removeprefix("/api/models/").split("/")
            return self.describe(f"{user}/{name}", rest)
        user, name, resolve, revision, *parts = path.strip("/").split("/")
        files = self.files(f"{user}/{name}", revision)
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
        revision = rest[1] if len(rest) > 1 else "main"
        files = self.files(repository, revision)
        if files is None:
            return self.answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        if rest and rest[0] == "tree":
            entries = [{"type": "file", "path": name, "size": len(c), "oid": "0"} for name, c in files.items()]
            return self.answer(entries)
        siblings = [{"rfilename": name} for name in files]
        return self.answer({"id": repository, "sha": commit(files), "siblings": siblings, "private": False})

    def files(self, repository, revision):
        revisions = self.server.repositories.get(repository, {})
        by_commit = {commit(files): files for files in revisions.values()}
        return revisions.get(revision, by_commit.get(revision))

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
    try:
        for name in data.get("datasets", []):
            validate_repo_id(name)
    except HFValidationError as error:
        problems.append(str(error))
    return problems


@contextmanager
def serve():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.repositories, server.private, server.fail_commits = {}, {}, 0
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def environment(server, token=TOKEN):
    """What a process needs to take the server for the Hub."""
    address = f"http://127.0.0.1:{server.server_address[1]}"
    return {"HF_ENDPOINT": address, "HF_TOKEN": token, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
