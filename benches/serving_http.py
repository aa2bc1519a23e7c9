"""Tokens per second of examples/server.py by HTTP, at several numbers of clients, and how busy the GPU is.

python benches/serving_http.py
python benches/serving_http.py --clients 1,64 --platform cpu --seconds 5 -- --batch-invariant

Every client streams one completion after the other, of random prompts and a fixed number of tokens. The model is a
random one with the shapes of SmolLM2-135M, or that of --model. What follows -- are options of the server, which counts
tokens and steps, in the time after a warm-up. A line of JSON per number of clients: "gpu_busy" is nvidia-smi's
utilization, the share of time in which a kernel ran; "late_launches" is the share of launches before which the
device had nothing left to do; "cpu_us_per_step" is the time that each process of the server computed, the engine's
first. With --stub-ms the steps compute nothing and take that long, which measures all but the device.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 30, 576, 1536, 9, 3, 64, 49152
MAX_PROCESSES = 8


def write_random_model(folder: Path) -> Path:
    """A Hugging Face folder of random weights, whose token i is the word wi."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models

    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns), np.float32) * columns**-0.5).astype(np.float16)

    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    ones = np.ones(HIDDEN, np.float16)
    tensors = {"model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN), "model.norm.weight": ones}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors |= {f"{prefix}{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        tensors |= {f"{prefix}{name}_layernorm.weight": ones for name in ("input", "post_attention")}
    save_file(tensors, folder / "model.safetensors")
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    words = models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0")
    Tokenizer(words).save(str(folder / "tokenizer.json"))
    return folder


async def complete(port: int, body: dict) -> tuple[float, float]:
    """Stream one completion; seconds to its first part, and to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    text = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text)
    start, first = time.perf_counter(), None
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"{status!r}: {(await reader.read()).decode()}")
    seen = b""
    while part := await reader.read(1 << 16):
        if first is None and b"data:" in part:
            first = time.perf_counter() - start
        seen = (seen + part)[-64:]
    if b"[DONE]" not in seen:
        raise RuntimeError(f"a stream ended with {seen!r}")
    writer.close()
    return first, time.perf_counter() - start


def run_clients(
    index: int, count: int, end: float, options: argparse.Namespace, results: multiprocessing.Queue
) -> None:
    """`count` clients until the time `end`; puts the times of every completion."""
    rng = random.Random(index)
    choice = {"temperature": options.temperature, "stream": True, "ignore_eos": True}

    async def client() -> list[tuple[float, float]]:
        times = []
        while time.time() < end:
            prompt = [rng.randrange(1000) for _ in range(options.prompt_tokens)]
            body = {"model": options.name, "prompt": prompt, "max_tokens": options.max_tokens}
            times.append(await complete(options.port, body | choice))
        return times

    async def all_clients() -> list[list[tuple[float, float]]]:
        return await asyncio.gather(*(client() for _ in range(count)))

    results.put([entry for times in asyncio.run(all_clients()) for entry in times])


def counters(port: int) -> dict[str, float]:
    """What the server has counted so far."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
        text = page.read().decode()
    return {name: float(value) for name, value in re.findall(r"^xla_attention_(\w+)_total (\S+)", text, re.M)}


def busy_share(seconds: float) -> float | None:
    """The share of the next `seconds` in which the GPU ran a kernel; None without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        time.sleep(seconds)
        return None
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-i", gpu, "-lms", "200"]
    sampler = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    time.sleep(seconds)
    sampler.terminate()
    samples = [int(line) for line in sampler.communicate()[0].split() if line.isdecimal()]
    return statistics.mean(samples) / 100 if samples else None


def cpu_seconds(pid: int) -> dict[int, float]:
    """Processor time that a process and its children have used."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    fields = {p: Path(f"/proc/{p}/stat").read_text().rpartition(")")[2].split() for p in (pid, *map(int, children))}
    return {p: (int(f[11]) + int(f[12])) / os.sysconf("SC_CLK_TCK") for p, f in fields.items()}


def measure(count: int, options: argparse.Namespace) -> dict:
    """One number of clients."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    num_processes = min(count, MAX_PROCESSES)
    end = time.time() + options.warm_up + options.seconds
    counts = [count // num_processes + (i < count % num_processes) for i in range(num_processes)]
    processes = [
        context.Process(target=run_clients, args=(index, part, end, options, results))
        for index, part in enumerate(counts)
    ]
    for process in processes:
        process.start()
    time.sleep(options.warm_up)
    before, start = counters(options.port), time.perf_counter()
    used = cpu_seconds(options.pid)
    busy = busy_share(options.seconds)
    seconds = time.perf_counter() - start
    counted = {name: value - before[name] for name, value in counters(options.port).items()}
    used = [value - used[pid] for pid, value in cpu_seconds(options.pid).items()]
    times = [entry for _ in processes for entry in results.get(timeout=600)]
    for process in processes:
        process.join()
    between = [(end - first) / max(options.max_tokens - 1, 1) for first, end in times]
    return {
        "clients": count,
        "tokens_per_second": round(counted["generation_tokens"] / seconds, 1),
        "first_token_ms": round(statistics.median(first for first, _ in times) * 1e3, 2),
        "between_tokens_ms": round(statistics.median(between) * 1e3, 3),
        "steps_per_second": round(counted["steps"] / seconds, 1),
        "steps_per_launch": round(counted["steps"] / max(counted["launches"], 1), 2),
        "late_launches": round(counted["late_launches"] / max(counted["launches"], 1), 3),
        "cpu_us_per_step": [round(value / max(counted["steps"], 1) * 1e6) for value in used],
        "gpu_busy": busy,
    }


def main() -> None:
    """Start the server, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", default="1,16,64,256", help="numbers of clients")
    parser.add_argument("--seconds", type=float, default=15, help="length of a measurement")
    parser.add_argument("--warm-up", type=float, default=5, help="time before it; the clients start in it")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0, help="0 takes the most likely token")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--stub-ms", type=float, help="milliseconds of a step that computes nothing")
    parser.add_argument("--platform", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("server", nargs="*", help="options of the server, after --")
    options = parser.parse_args()
    counts = [int(count) for count in options.clients.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or (None if options.stub_ms else write_random_model(Path(folder)))
        pages = max(counts) * -(-(options.prompt_tokens + options.max_tokens) // 16) + 64
        sizes = {"--max-num-seqs": max(counts), "--token-budget": max(512, max(counts)), "--pages": pages}
        sizes |= {"--platform": options.platform, "--model": model, "--port": 0}
        command = [sys.executable, ROOT / "examples/server.py", *(str(w) for pair in sizes.items() for w in pair)]
        if options.stub_ms:
            stub = ROOT / "tests/serve/stub_server.py"
            command = [sys.executable, stub, "--sequences", str(max(counts)), "--step-ms", str(options.stub_ms)]
        start = time.perf_counter()
        server = subprocess.Popen([*command, *options.server], stdout=subprocess.PIPE, text=True)
        try:
            started = re.match(r"serving (.*) at http://127\.0\.0\.1:(\d+)", server.stdout.readline())
            if started is None:
                sys.exit("the server did not start")
            options.name, options.port, options.pid = started[1], int(started[2]), server.pid
            print(json.dumps({"started_after_s": round(time.perf_counter() - start, 1)}), flush=True)
            for count in counts:
                print(json.dumps(measure(count, options)), flush=True)
        finally:
            server.terminate()
            server.wait(60)


if __name__ == "__main__":
    main()
