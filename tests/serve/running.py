"""A server in a separate process, and the clients that ask it."""

import http.client
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import openai
import pytest

# SERVE_PLATFORM=cuda runs the tests on a GPU.
PLATFORM = os.environ.get("SERVE_PLATFORM", "cpu")
ROOT = Path(__file__).resolve().parents[2]
STARTED = re.compile(r"serving tiny at (http://127\.0\.0\.1:(\d+))")


class Running:
    """A started server."""

    def __init__(self, model: Path, *options: str, **environment: str) -> None:
        # NumPy computes in f32, also where a GPU would take TF32.
        environment |= {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}
        sizes = ["--max-num-seqs", "4", "--token-budget", "16", "--page-size", "4", "--pages", "128"]
        command = [sys.executable, ROOT / "examples/server.py", "--model", model, "--port", "0", "--platform", PLATFORM]
        command += ["--dtype", "float32"]
        self.process = subprocess.Popen(
            [*command, *sizes, *options], stdout=subprocess.PIPE, text=True, env=os.environ | environment
        )
        match = STARTED.match(self.process.stdout.readline())
        if not match:
            self.process.kill()
            self.wait()
            pytest.fail("the server did not start")
        self.url, self.port = match[1], int(match[2])
        options = {"base_url": f"{self.url}/v1", "max_retries": 0, "timeout": 60}
        key = environment.get("XLA_ATTENTION_API_KEY", "none")
        self.client = openai.OpenAI(api_key=key, **options)
        self.async_client = lambda: openai.AsyncOpenAI(api_key=key, **options)

    def complete(self, prompt: str, max_tokens: int = 12, **options):
        options = {"temperature": 0} | options
        return self.client.completions.create(model="tiny", prompt=prompt, max_tokens=max_tokens, **options)

    def send(self, body: bytes, content_type: str = "application/json", method: str = "POST", path="/v1/completions"):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body, {"Content-Type": content_type})
        response = connection.getresponse()
        text = response.read()
        connection.close()
        return response.status, text

    def gauge(self, name: str) -> float:
        text = self.send(b"", method="GET", path="/metrics")[1].decode()
        return float(re.search(rf"^xla_attention_{name} (\S+)$", text, re.M)[1])

    def wait_idle(self) -> None:
        end = time.monotonic() + 10
        while self.gauge("requests_running") or self.gauge("requests_waiting") or self.gauge("kv_cache_usage"):
            assert time.monotonic() < end, "pages or sequences are left"
            time.sleep(0.05)

    def stop(self) -> int:
        self.client.close()
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        self.process.stdout.close()
        return self.process.wait(30)
