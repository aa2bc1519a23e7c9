"""The processes of the server, with an engine that computes nothing: what they count together, and how they end."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

BODY = {"model": "stub", "prompt": [1, 2], "max_tokens": 2900, "ignore_eos": True, "stream": True}


class Stub:
    """A server with two front processes."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, Path(__file__).with_name("stub_server.py"), *options]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(command, **pipes, text=True)
        self.port = int(re.search(r"http://127\.0\.0\.1:(\d+)", self.process.stdout.readline())[1])
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        self.fronts = [int(pid) for pid in children.split()]
        self.connections: list[http.client.HTTPConnection] = []

    def connection(self) -> http.client.HTTPConnection:
        """A connection that `close` closes."""
        self.connections.append(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30))
        return self.connections[-1]

    def close(self) -> None:
        """End all of it."""
        for connection in self.connections:
            connection.close()
        self.process.kill()
        self.process.communicate()

    def open(self, **change: object) -> http.client.HTTPResponse:
        """The answer to a completion, of which the head has been read."""
        connection = self.connection()
        connection.request("POST", "/v1/completions", json.dumps(BODY | change), {"Content-Type": "application/json"})
        return connection.getresponse()

    def holder(self, response: http.client.HTTPResponse) -> int:
        """The front process that has the connection of an answer."""
        local = response.fp.raw._sock.getsockname()[1]
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        ports = f":{self.port:04X}", f":{local:04X}"
        inode = next(line[9] for line in lines if line[1].endswith(ports[0]) and line[2].endswith(ports[1]))
        of_front = {pid: [os.readlink(f) for f in Path(f"/proc/{pid}/fd").iterdir()] for pid in self.fronts}
        return next(pid for pid, links in of_front.items() if f"socket:[{inode}]" in links)

    def page(self, connection: http.client.HTTPConnection, path: str = "/metrics") -> str:
        connection.request("GET", path)
        return connection.getresponse().read().decode()

    def connections_of_both(self) -> dict[int, http.client.HTTPConnection]:
        """A kept connection to each front process."""
        found = {}
        end = time.monotonic() + 20
        while len(found) < len(self.fronts):
            assert time.monotonic() < end, "a front process accepts nothing"
            connection = self.connection()
            connection.request("GET", "/metrics")
            response = connection.getresponse()
            pid = self.holder(response)
            response.read()
            found.setdefault(pid, connection)
        return found


@pytest.fixture
def stub():
    started = []

    def start(*options: str) -> Stub:
        started.append(Stub(*options))
        return started[-1]

    yield start
    for server in started:
        server.close()


def wait_gone(pids: list[int]) -> None:
    def lives(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    end = time.monotonic() + 10
    while any(map(lives, pids)):
        assert time.monotonic() < end, "a process is left"
        time.sleep(0.02)


def test_a_killed_parent_leaves_no_process(stub):
    server = stub()
    response = server.open()
    assert response.status == 200 and len(server.fronts) == 2
    server.process.kill()
    assert b"the engine's process has ended" in response.read()
    wait_gone(server.fronts)


def test_a_killed_front_ends_the_server_after_the_open_answers_of_the_others(stub):
    server = stub("--step-ms", "1")
    connections = server.connections_of_both()
    body = json.dumps(BODY | {"max_tokens": 1500})
    for connection in connections.values():
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    killed, other = connections
    answers = {pid: connection.getresponse() for pid, connection in connections.items()}
    os.kill(killed, signal.SIGKILL)
    assert answers[other].read().endswith(b"data: [DONE]\n\n")
    error = server.process.communicate(timeout=20)[1]
    assert f"front process {killed} has ended with exit code -9" in error
    assert server.process.returncode == 1
    wait_gone(server.fronts)


def test_the_limit_is_exact_across_front_processes(stub):
    server = stub("--max-waiting", "6")  # and four that run
    statuses, retry, barrier = [], [], threading.Barrier(30)

    def ask() -> None:
        barrier.wait()
        response = server.open()
        statuses.append(response.status)
        retry.append(response.headers["Retry-After"])
        kept.append(response)

    kept: list[http.client.HTTPResponse] = []  # a response that is dropped closes its connection
    threads = [threading.Thread(target=ask) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses.count(200) == 10 and statuses.count(503) == 20
    assert retry.count("1") == 20


def test_every_front_process_gives_the_same_metrics(stub):
    server = stub()
    connections = server.connections_of_both().values()
    response = server.open(max_tokens=20)
    assert response.read().endswith(b"data: [DONE]\n\n")
    pages = [server.page(connection) for connection in connections]
    assert pages[0] == pages[1] and "xla_attention_generation_tokens_total 20.0" in pages[0]


def test_a_front_process_imports_no_jax(stub):
    server = stub()
    assert all("jaxlib" not in Path(f"/proc/{pid}/maps").read_text() for pid in server.fronts)
    assert "jaxlib" in Path(f"/proc/{server.process.pid}/maps").read_text()


def test_a_stopped_front_loses_no_token_and_does_not_hold_up_the_others(stub):
    server = stub("--step-ms", "0.2")
    connections = server.connections_of_both()
    body = json.dumps(BODY | {"max_tokens": 1500, "n": 2, "stream_options": {"include_usage": True}})
    for connection in connections.values():
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    stopped, other = connections
    answers = {pid: connection.getresponse() for pid, connection in connections.items()}
    os.kill(stopped, signal.SIGSTOP)
    try:
        assert b'"completion_tokens": 3000' in answers[other].read()
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert b'"completion_tokens": 3000' in answers[stopped].read()


def test_an_engine_that_fails_is_told_to_every_client(stub):
    server = stub("--num-steps", "50")
    connections = server.connections_of_both().values()
    response = server.open()
    text = response.read()
    assert b"the engine has ended: RuntimeError: the device is lost" in text and b"[DONE]" not in text
    refused = server.open()
    assert refused.status == 503 and b"the device is lost" in refused.read()
    for connection in connections:
        connection.request("GET", "/health")
        health = connection.getresponse()
        health.read()
        assert health.status == 503
    server.process.send_signal(signal.SIGTERM)
    assert "the device is lost" in server.process.communicate(timeout=20)[1]
    assert server.process.returncode == -signal.SIGTERM
    wait_gone(server.fronts)


def test_the_first_interrupt_lets_answers_end_and_the_second_one_does_not(stub):
    for count in (1, 2):
        server = stub("--step-ms", "1")
        response = server.open(max_tokens=1500)
        for _ in range(count):
            server.process.send_signal(signal.SIGINT)
            time.sleep(0.1)  # two signals that wait together are one
        assert response.read().endswith(b"data: [DONE]\n\n") == (count == 1)
        server.process.communicate(timeout=20)
        assert server.process.returncode == -signal.SIGINT
        wait_gone(server.fronts)
