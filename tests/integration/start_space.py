"""Starts a Space as the Hub does, and expects that it opens with the name of its first picture, and gives that of each
picture that it offers to try: make space."""

import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from gradio_client import Client, handle_file

ADDRESS, PATIENCE = "http://127.0.0.1:7891", 180  # seconds

space = Path(sys.argv[1]).resolve()
pictures = sorted((space / "examples" / "pictures").glob("*.png"))
names = [path.name.split(".")[0] for path in pictures]
environment = {**os.environ, "GRADIO_SERVER_PORT": ADDRESS.rpartition(":")[2], "GRADIO_ANALYTICS_ENABLED": "False"}
server = subprocess.Popen([sys.executable, "app.py"], cwd=space, env=environment)
try:
    for _ in range(PATIENCE):
        try:
            urllib.request.urlopen(ADDRESS)
            break
        except OSError:
            if server.poll() is not None:
                sys.exit(f"error: {space}/app.py ended with status {server.returncode}, and should wait for visitors")
            time.sleep(1)
    client = Client(ADDRESS, verbose=False)
    answers = [c["props"]["value"] for c in client.config["components"] if c["type"] == "label"]
    if [answer["label"] for answer in answers] != names[:1]:
        sys.exit(f"error: {space} opens with {answers}, and should name {pictures[0].name}")
    for path, name in zip(pictures, names, strict=True):
        scores, _ = client.predict(handle_file(path), "\n".join(names), "{}", api_name="/compare")
        if scores["label"] != name:
            sys.exit(f"error: {space} calls {path.name} {scores['label']!r}")
        print(f"{path.name}: {name}")
finally:
    server.terminate()
    server.wait()
