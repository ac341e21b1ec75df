"""A server on this machine that answers as the Hugging Face Hub does, and counts the requests of each token.

with HubServer({"org/name": folder}) as hub:
    ...  # a process with HF_ENDPOINT=hub.url
hub.requests["token"]  # "HEAD /org/name/resolve/main/config.json", ...
hub.uploaded["org/name"]  # files of the last commit that was uploaded: name -> content
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


class HubServer:
    """Serves model folders. ``update`` adds a commit; ``fails`` makes every answer an error.

    ``lists_files`` is False for a mirror that serves files but does not list them.
    """

    def __init__(self, folders: dict[str, Path]):
        self.requests: dict[str, list[str]] = defaultdict(list)
        self.fails: int | None = None  # the status code of all answers
        self.lists_files = True
        self.created: dict[str, dict[str, object]] = {}  # repository -> the request that created it
        self.uploaded: dict[str, dict[str, bytes]] = {}
        self._objects: dict[str, bytes] = {}  # sha256 -> content of a large file
        self._commits: dict[str, dict[str, Path]] = {}  # repository -> commit -> folder; the last is main
        for name, folder in folders.items():
            self.update(name, folder)

    def update(self, name: str, folder: Path) -> str:
        """Adds a commit with the files of a folder to the branch main."""
        commits = self._commits.setdefault(name, {})
        commit = hashlib.sha1(f"{name} {len(commits)}".encode()).hexdigest()
        commits[commit] = folder
        return commit

    def commit(self, name: str, revision: str) -> str | None:
        commits = self._commits.get(name, {})
        return [*commits][-1] if revision == "main" and commits else revision if revision in commits else None

    def files(self, name: str, commit: str) -> list[dict[str, object]]:
        folder = self._commits[name][commit]
        found = sorted(path for path in folder.rglob("*") if path.is_file())
        return [{"rfilename": str(p.relative_to(folder)), "size": p.stat().st_size} for p in found]

    def content(self, name: str, commit: str, file: str) -> bytes | None:
        path = self._commits[name][commit] / file
        return path.read_bytes() if path.is_file() else None

    def accept(self, path: str, body: bytes) -> dict[str, object]:
        """Answers a POST request of an upload. Weights are uploaded as large files."""
        if path == "/api/validate-yaml":  # of a model card
            return {}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            self.created[name] = asked
            return {"url": f"{self.url}/{name}", "id": name}
        if path.endswith("/preupload/main"):
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = ["lfs" if name.endswith(".safetensors") else "regular" for name in names]
            pairs = zip(names, modes, strict=True)
            return {
                "files": [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in pairs]
            }
        if path.endswith("/info/lfs/objects/batch"):
            upload = {"href": f"{self.url}/objects"}
            objects = [one | {"actions": {"upload": upload}} for one in json.loads(body)["objects"]]
            return {"transfer": "basic", "objects": objects}
        assert path.endswith("/commit/main"), path
        repository = path.removeprefix("/api/models/").removesuffix("/commit/main")
        files = self.uploaded.setdefault(repository, {})
        for line in map(json.loads, body.decode().splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self._objects[value["oid"]]
        commit = "0" * 40
        return {"commitOid": commit, "commitUrl": f"{self.url}/{repository}/commit/{commit}"}

    def __enter__(self) -> HubServer:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self.answer()

            def do_GET(self) -> None:
                self.answer()

            def do_PUT(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"]))
                hub._objects[hashlib.sha256(content).hexdigest()] = content
                self.send(200, b"")

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                path = unquote(urlsplit(self.path).path)
                token = self.headers.get("Authorization", "").removeprefix("Bearer ")
                hub.requests[token].append(f"POST {path}")
                if hub.fails is not None:
                    return self.send(hub.fails, b"{}")
                self.send(200, json.dumps(hub.accept(path, body)).encode())

            def answer(self) -> None:
                path = unquote(urlsplit(self.path).path)
                token = self.headers.get("Authorization", "").removeprefix("Bearer ")
                if path == "/api/agent-harnesses":  # asked for once a day, by the rank that asks for files
                    return self.send(200, b"{}")
                hub.requests[token].append(f"{self.command} {path}")
                _, *parts = path.split("/")
                if parts[0] == "api" and not hub.lists_files:
                    return self.send(404, b"{}")
                if hub.fails is not None:
                    return self.send(hub.fails, b"{}")
                if parts[0] == "api":
                    name, rest = "/".join(parts[2:4]), parts[4:]
                    commit = hub.commit(name, rest[1] if rest[:1] == ["revision"] else "main")
                    if rest[:1] == ["tree"]:
                        return self.send(404, b"{}", **{"X-Error-Code": "EntryNotFound"})
                    if commit is None:
                        return self.send(404, b"{}", **{"X-Error-Code": "RepoNotFound"})
                    info = {"id": name, "sha": commit, "siblings": hub.files(name, commit), "tags": []}
                    return self.send(200, json.dumps(info).encode())
                name, revision, file = "/".join(parts[:2]), parts[3], "/".join(parts[4:])
                commit = hub.commit(name, revision)
                if commit is None:
                    return self.send(404, b"", **{"X-Error-Code": "RepoNotFound"})
                content = hub.content(name, commit, file)
                if content is None:
                    return self.send(404, b"", **{"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
                tag = hashlib.sha1(content).hexdigest()
                return self.send(200, content, **{"X-Repo-Commit": commit, "ETag": f'"{tag}"'})

            def send(self, status: int, content: bytes, **headers: str) -> None:
                self.send_response(status)
                for header, value in headers.items():
                    self.send_header(header, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
