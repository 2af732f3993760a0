"""Uploading a finished stage, against a server that speaks the part of the Hub's HTTP API that an upload uses."""

import base64
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOKEN = "hf_stub"


class Hub(BaseHTTPRequestHandler):
    """Keeps what is committed in `server.files`: repository -> path -> bytes."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        files = self.server.files
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer({"error": "Invalid credentials"}, 401)
        if self.path == "/api/repos/create":
            request = json.loads(body)
            name = f"{request.get('organization') or 'user'}/{request['name']}"
            files.setdefault(name, {})
            return self.answer({"url": f"http://{self.headers['Host']}/{name}", "id": name, "name": name})
        _, _, _, user, name, action, *_ = self.path.split("/")
        if action == "preupload":
            asked = json.loads(body)["files"]
            modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in asked]
            return self.answer({"files": modes})
        assert action == "commit"
        for line in body.decode().splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                files[f"{user}/{name}"][entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
        url = f"http://{self.headers['Host']}/{user}/{name}/commit/0"
        return self.answer({"commitUrl": url, "commitOid": "0" * 40, "success": True})

    def do_GET(self):
        self.answer({"id": "user/glyphs", "sha": "0" * 40, "siblings": []})

    def answer(self, content, status=200):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files = {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def push(hub, folder, token=TOKEN):
    program = "import sys; from pathlib import Path; from training.stages import push_to_hub; "
    program += "push_to_hub(Path(sys.argv[1]), 'user/glyphs')"
    address = f"http://127.0.0.1:{hub.server_address[1]}"
    environment = os.environ | {"HF_ENDPOINT": address, "HF_TOKEN": token, "HF_HUB_OFFLINE": "0"}
    return subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def folder(tmp_path):
    for name in ("config.json", "model.safetensors", "manifest.json", "log.jsonl"):
        (tmp_path / name).write_bytes(f"content of {name}".encode())
    return tmp_path


def test_push(hub, folder):
    done = push(hub, folder)
    assert done.returncode == 0, done.stderr
    uploaded = hub.files["user/glyphs"]
    assert {"config.json", "model.safetensors"} == set(uploaded) - {".gitattributes"}  # not what made the model
    assert uploaded["model.safetensors"] == b"content of model.safetensors"
    assert "/user/glyphs" in done.stdout


def test_push_without_permission(hub, folder):
    done = push(hub, folder, token="hf_wrong")
    assert done.returncode != 0
    assert "401" in done.stderr
    assert not hub.files
