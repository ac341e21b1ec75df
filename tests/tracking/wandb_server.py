"""Runs a minimal wandb server, which stores runs and their history and can refuse runs or stop answering."""

import gzip
import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

ENTITY = {"id": "1", "name": "me"}


class Server:
    """Holds the state of the server.

    ``history`` maps run ids to received rows. ``views`` maps the names of saved workspaces to what
    wandb-workspaces has sent. ``alerts`` holds (title, text). Artifacts are refused until ``artifacts`` is a
    dict; it then maps their names to their types, and ``files`` the names of their files to the contents.
    """

    def __init__(self, url):
        self.url = url
        self.history, self.configs, self.tables = {}, {}, 0
        self.views, self.alerts, self.artifacts, self.files = {}, [], None, {}

    def answer(self, path, body):
        """Returns status and JSON of the reply."""
        if path.endswith("/file_stream"):
            rows = body.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
            self.history[path.split("/")[-2]] += [json.loads(row) for row in rows]
            return 200, {"exitcode": None, "limits": {}}
        if path == "/graphql":
            return self._graphql(body["query"], body.get("variables") or {})
        return 200, {}

    def _graphql(self, query, variables):
        name = variables.get("name")
        if "upsertView" in query:
            return self._save_view(variables)
        if "allViews" in query:
            return 200, {"data": {"project": self._project_with_views(variables)}}
        if "RunResumeStatus" in query:
            model = {"id": "1", "name": "p", "entity": ENTITY, "bucket": self._resumed(name)}
            return 200, {"data": {"model": model}}
        if "upsertBucket" in query:
            fresh = name not in self.history
            self.history.setdefault(name, [])
            self.configs[name] = {**self.configs.get(name, {}), **json.loads(variables["config"] or "{}")}
            project = {"id": "1", "name": "p", "entity": ENTITY}
            bucket = {"id": "1", "name": name, "displayName": "n", "config": "{}", "project": project}
            bucket["historyLineCount"] = len(self.history[name])
            return 200, {"data": {"upsertBucket": {"bucket": bucket, "inserted": fresh}}}
        if "createRunFiles" in query:
            return 200, {"data": {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": []}}}
        if "NotifyScriptableRunAlert" in query:
            self.alerts.append((variables["title"], variables["text"]))
            return 200, {"data": {"notifyScriptableRunAlert": {"success": True}}}
        if self.artifacts is not None and "rtifact" in query:
            return 200, {"data": self._artifact(query, variables)}
        if "ArtifactType" in query:
            self.tables += 1  # the reply lacks the artifact type, which refuses the table
        viewer = {"id": "1", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}
        return 200, {"data": {"viewer": viewer}}

    def _artifact(self, query, variables):
        """Returns the data of a reply to a request about artifacts."""
        given = variables.get("input", {})
        if "createArtifact(" in query:
            self.artifacts[given["artifactCollectionName"]] = given["artifactTypeName"]
            artifact = {"id": "1", "state": "PENDING", "artifactSequence": {"latestArtifact": None}}
            return {"createArtifact": {"artifact": artifact}}
        if "createArtifactManifest(" in query:
            file = {"id": "1", **self._upload("manifest.json")}
            return {"createArtifactManifest": {"artifactManifest": {"id": "1", "file": file}}}
        if "createArtifactFiles(" in query:
            names = [file["name"] for file in given["artifactFiles"]]
            parts = {"uploadMultipartUrls": None, "artifact": {"id": "1"}}
            nodes = [{"storagePath": f"x/{name}", **self._upload(name), **parts} for name in names]
            return {"createArtifactFiles": {"files": {"edges": [{"node": node} for node in nodes]}}}
        if "commitArtifact(" in query:
            return {"commitArtifact": {"artifact": {"id": "1", "digest": "d"}}}
        return {"project": {"artifact": None}}

    def _upload(self, name):
        return {"uploadUrl": f"{self.url}/upload/{name}", "uploadHeaders": []}

    def _save_view(self, variables):
        """Stores a workspace; like wandb.ai it refuses projects that do not exist. Here p of me exists."""
        if (variables["entityName"], variables["projectName"]) != ("me", "p"):
            return 200, {"errors": [{"message": "project not found"}], "data": {"upsertView": None}}
        name, inserted = variables["name"], variables["name"] not in self.views
        self.views[name] = variables | {"id": variables.get("id") or f"id-of-{name}"}
        view = {"id": self.views[name]["id"], "name": name}
        return 200, {"data": {"upsertView": {"view": view, "inserted": inserted}}}

    def _project_with_views(self, variables):
        if (variables["entityName"], variables["projectName"]) != ("me", "p"):
            return None
        view = self.views.get(variables["viewName"])
        known = [{"node": {key: view[key] for key in ("id", "displayName", "spec")}}] if view else []
        return {"allViews": {"edges": known}}

    def _resumed(self, name):
        rows = self.history.get(name)
        if rows is None:
            return None
        tail = json.dumps([json.dumps(rows[-1])]) if rows else "[]"
        config, summary = json.dumps(self.configs[name]), json.dumps(rows[-1] if rows else {})
        texts = {"summaryMetrics": summary, "config": config, "notes": None, "wandbConfig": '{"t": {}}'}
        counts = {"logLineCount": 0, "historyLineCount": len(rows), "eventsLineCount": 0}
        tails = {"historyTail": tail, "eventsTail": "[]"}
        return {"id": "1", "name": name, "displayName": "n", "tags": []} | texts | counts | tails


@contextmanager
def wandb_server():
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
            status, content = server.answer(self.path, json.loads(body) if body[:1] == b"{" else {})
            reply = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def do_PUT(self):
            """Stores an uploaded file."""
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            server.files[self.path.removeprefix("/upload/")] = body
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def handle(self):
            try:
                super().handle()
            except OSError:
                pass  # wandb has ended meanwhile

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads, http.block_on_close = True, False
    server = Server(f"http://127.0.0.1:{http.server_port}")
    server.close = lambda: (http.shutdown(), http.server_close())
    Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield server
    finally:
        server.close()
