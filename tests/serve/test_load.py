"""Many clients that go away, by openai's package and by closing sockets, large bodies, and a public load tool."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import threading
import time

import openai
import pytest

from running import Running

LONG = {"model": "tiny", "prompt": "hello", "max_tokens": 120, "ignore_eos": True, "n": 4}


@pytest.mark.slow
def test_200_requests_cut_off_after_half_a_second(model):
    """After them, an answer within 5 s, and no page in use."""
    running = Running(model, "--max-waiting", "10000")
    try:

        async def cut_off():
            async with running.async_client() as client:
                create = client.with_options(timeout=0.5).completions.create
                body = {key: value for key, value in LONG.items() if key != "ignore_eos"} | {"n": 16}
                calls = [create(**body, stream=i % 2 == 0, extra_body={"ignore_eos": True}) for i in range(200)]
                return await asyncio.gather(*calls, return_exceptions=True)

        results = asyncio.run(cut_off())
        assert sum(isinstance(result, openai.APITimeoutError) for result in results) > 50
        start = time.monotonic()
        running.complete("hello", 4)
        assert time.monotonic() - start < 5
        running.wait_idle()
    finally:
        running.stop()


def post(port: int, body: dict) -> socket.socket:
    """A connection on which a request has been sent."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=120)
    text = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(text)}"
    connection.sendall(f"{head}\r\nConnection: close\r\n\r\n".encode() + text)
    return connection


@pytest.mark.slow
def test_half_of_200_clients_close_their_sockets(model):
    """The others get whole answers, streamed or not, and no page is lost."""
    running = Running(model, "--max-waiting", "10000")
    answers = {}

    def client(index: int) -> None:
        is_killed = index % 2 == 0
        change = {"stream": index % 4 < 2} | ({} if is_killed else {"n": 1, "max_tokens": 8})
        with post(running.port, LONG | change) as connection:
            if is_killed:
                # Half of them before an answer, the others in the middle of the stream.
                if index % 8 == 0:
                    connection.recv(100)
                time.sleep(0.01 * (index % 7))
                return
            answers[index] = b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode()

    try:
        threads = [threading.Thread(target=client, args=(index,)) for index in range(200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert len(answers) == 100
        assert all("200 OK" in text and '"finish_reason":' in text for text in answers.values())
        assert all("[DONE]" in text for index, text in answers.items() if index % 4 < 2)
        running.wait_idle()
        assert running.complete("hello", 4).choices
    finally:
        running.stop()


def test_a_body_of_100_megabytes_is_refused(server):
    """Whether its length is said or not; the server reads no more than it accepts."""
    for length in (b"Content-Length: 100000000", b"Transfer-Encoding: chunked"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + length + b"\r\n\r\n"
            )
            block = b" " * (1 << 16)
            part = block if b"Length" in length else b"10000\r\n" + block + b"\r\n"
            sent = 0
            try:
                while sent < 100_000_000:
                    connection.sendall(part)
                    sent += len(block)
            except OSError:
                pass  # the server has answered and closed
            if sent < 50_000_000:
                continue
            answer = connection.recv(1 << 16).decode()
            assert " 413 " in answer.splitlines()[0] and '"error"' in answer
    assert server.complete("hello", 2).choices


def test_a_long_text_is_refused_before_it_is_tokenised(server):
    status, body = server.send(json.dumps({"model": "tiny", "prompt": "hello wo 12 " * 340_000}).encode())
    assert status == 400 and "4080000 characters" in json.loads(body)["error"]["message"]


def test_tokenising_leaves_the_interpreter_to_other_threads(tokenizer):
    thread = threading.Thread(target=tokenizer.encode, args=("hello wo 12 " * 100_000,))
    thread.start()
    waited = [0.0]
    while thread.is_alive():
        start = time.monotonic()
        time.sleep(0.001)
        waited.append(time.monotonic() - start)
    assert len(waited) > 20 and sorted(waited)[-3] < 0.2


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("GUIDELLM") and not shutil.which("guidellm"), reason="guidellm is not installed")
def test_guidellm_measures_without_an_error(model, tokenizer, tmp_path):
    """GUIDELLM names the program where it is not on PATH."""
    running = Running(model)
    tokenizer.tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    output = tmp_path / "benchmarks.json"
    options = {
        "backend": f"kind=openai_http,target={running.url}",
        "profile": "kind=concurrent,streams=8",
        "constraint": "kind=max_duration,seconds=5",
        "data": "kind=synthetic_text,prompt_tokens=16,output_tokens=16",
        "tokenizer": f"kind=huggingface_auto,model={tmp_path}",
        "output": f"kind=json,path={output}",
    }
    command = [os.environ.get("GUIDELLM", "guidellm"), "run", "--disable-console"]
    command += [word for name, value in options.items() for word in (f"--{name}", value)]
    try:
        subprocess.run(command, check=True, timeout=200, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        totals = json.loads(output.read_text())["benchmarks"][0]["metrics"]["request_totals"]
        assert totals["successful"] > 20 and totals["errored"] == 0
        running.wait_idle()
    finally:
        running.stop()
