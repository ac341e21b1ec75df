"""Runs a local HTTP service whose replies are defined by a test."""

import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread


class Service:
    """Records requests and replies to them.

    ``reply(number, body)`` returns status, headers and content (bytes or a JSON value). ``number`` is the
    request's index in order of arrival, from 0.
    """

    def __init__(self, url, reply):
        self.url, self.reply = url, reply
        self.bodies, self.headers, self.lock = [], [], Lock()


@contextmanager
def serving(reply):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with service.lock:
                number = len(service.bodies)
                service.bodies.append(body)
                service.headers.append(dict(self.headers))
            status, headers, content = service.reply(number, body)
            content = content if isinstance(content, bytes) else json.dumps(content).encode()
            try:
                self.send_response(status)
                for name, value in {"Content-Length": str(len(content)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)
            except ConnectionError:
                pass  # the client has timed out and disconnected

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    service = Service(f"http://127.0.0.1:{server.server_port}/score", reply)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()


def lengths(number, body):
    """Replies like a scoring service: the score of a response is its length."""
    return 200, {}, {"scores": [len(item["response"]) for item in body["items"]]}


def says(words):
    return 200, {}, {"choices": [{"message": {"role": "assistant", "content": words}}]}
