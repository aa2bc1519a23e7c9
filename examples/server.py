"""Serve a language model with OpenAI's HTTP interface, over xla-attention's paged attention.

python examples/server.py
python examples/server.py --model path/to/model.gguf --platform cuda --port 8000

The API key comes from the environment variable XLA_ATTENTION_API_KEY.
"""

import argparse
import gc
import os
import sys
from pathlib import Path

import uvicorn
from tqdm import tqdm

from generate import DTYPES, UsageError, positive, select_devices

SWITCH_SECONDS = 0.5e-3


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="GGUF file or Hugging Face folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0 takes a free one")
    parser.add_argument("--max-num-seqs", type=positive, default=16, help="largest number of sequences in a step")
    parser.add_argument("--token-budget", type=positive, default=128, help="largest number of tokens in a step")
    parser.add_argument("--max-waiting", type=positive, default=256, help="sequences that may wait; more get 503")
    parser.add_argument("--pages", type=positive, default=512, help="pages of the cache of each layer")
    parser.add_argument("--page-size", type=positive, default=16, help="tokens per page")
    parser.add_argument("--no-prefix-cache", action="store_true", help="compute every prompt from its first token")
    parser.add_argument(
        "--batch-invariant", action="store_true", help="the same bits for a request whatever else is computed; slower"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="weights and cache (default: float32 on cpu, else bfloat16)")
    parser.add_argument("--platform", choices=("auto", "cpu", "cuda"), default="auto", help="JAX platform")
    parser.add_argument("--drain-seconds", type=positive, default=30, help="time for open answers after SIGTERM")
    return parser.parse_args(arguments)


def serve(options: argparse.Namespace) -> None:
    """Load, compile, listen until SIGTERM."""
    devices = select_devices(options.platform, 1)
    # Imported here, because xla_attention registers its targets for the platform that is selected above.
    from llama.checkpoint import default_model_path, load_checkpoint
    from llama.engine import Engine, EngineConfig
    from serve.app import Server
    from serve.metrics import Metrics
    from serve.service import Service

    if options.token_budget < options.max_num_seqs:
        raise UsageError(f"--token-budget is {options.token_budget}, expected at least --max-num-seqs")
    path = options.model or default_model_path()
    dtype = DTYPES[options.dtype or ("float32" if devices[0].platform == "cpu" else "bfloat16")]
    checkpoint = load_checkpoint(path, dtype)
    sizes = EngineConfig(
        options.pages,
        options.page_size,
        options.max_num_seqs,
        options.token_budget,
        prefix_cache=not options.no_prefix_cache,
        batch_invariant=options.batch_invariant,
    )
    engine = Engine(checkpoint.config, checkpoint.weights, sizes, checkpoint.tokenizer.stop_tokens)
    for _ in tqdm(engine.compile_all(), total=engine.num_programs, desc="compiling", unit="program"):
        pass
    metrics = Metrics()
    # The threads share the interpreter: neither waits long for the other, nor for a collection of what is here to stay.
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
    service = Service(engine, metrics, options.max_waiting)
    app = Server(service, checkpoint.tokenizer, metrics, path.stem, os.environ.get("XLA_ATTENTION_API_KEY")).app()
    config = uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        log_level="warning",
        timeout_graceful_shutdown=options.drain_seconds,
    )
    listener = config.bind_socket()
    listener.listen(config.backlog)  # who reads the address below can connect
    url = f"http://{options.host}:{listener.getsockname()[1]}"
    body = f'{{"model": "{path.stem}", "prompt": "The sky is", "max_tokens": 16}}'
    print(f"serving {path.stem} at {url}, which is a page to chat with", flush=True)
    print(f"curl {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'", flush=True)
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        service.stop()


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0, or 2 for input that cannot be used (one line on standard error)."""
    options = parse_arguments(arguments)
    from llama.config import ModelError

    try:
        serve(options)
    except (ModelError, NotImplementedError, UsageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
