"""Stands in for an engine process in launcher tests: fake_engine.py PORT [BEHAVIOUR].

Behaviours: `serve`; `die`; `refuse` (healthy, but 500 to every completion); `orphan` (serves, and has a child
in its group that ignores SIGTERM); `deaf` (never opens its port, ignores SIGTERM).
"""

import json
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

DEAF_CHILD = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(600)
"""


class Handler(BaseHTTPRequestHandler):
    def _answer(self, status):
        body = json.dumps({"choices": [{"text": " world"}]}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        """Healthy."""
        self._answer(200)

    def do_POST(self):
        """One token, or none."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(500 if sys.argv[2] == "refuse" else 200)


if __name__ == "__main__":
    port, behaviour = int(sys.argv[1]), sys.argv[2]
    sys.stdout.write("non-default args: {}\nLoading weights took 0.1 seconds\n")
    sys.stdout.flush()
    if behaviour == "die":
        sys.exit("no memory for 1 GiB of KV cache")
    if behaviour == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    if behaviour == "orphan":
        child = subprocess.Popen([sys.executable, "-c", DEAF_CHILD], stdout=subprocess.PIPE)
        child.stdout.readline()
    HTTPServer(("127.0.0.1", port), Handler).serve_forever()
