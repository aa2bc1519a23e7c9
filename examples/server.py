"""Serve a language model with OpenAI's HTTP interface, over xla-attention's paged attention.

python examples/server.py
python examples/server.py --model path/to/model.gguf --platform cuda --port 8000

The API key comes from the environment variable XLA_ATTENTION_API_KEY.
"""

import argparse
import os
import socket
import sys
from pathlib import Path

from tqdm import tqdm

from generate import DTYPES, UsageError, positive, select_devices
from serve.processes import FrontLostError, default_count, end_by, front_processes
from serve.processes import serve as serve_engine

# The host's time per step is then less than the GPU's (docs/serving.md, "Speed").
GPU_STEPS_PER_LAUNCH = 2


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="GGUF file or Hugging Face folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0 takes a free one")
    parser.add_argument(
        "--http-processes", type=positive, default=default_count(), help="processes for HTTP, beside the engine's"
    )
    parser.add_argument("--max-num-seqs", type=positive, default=16, help="largest number of sequences in a step")
    parser.add_argument("--token-budget", type=positive, default=128, help="largest number of tokens in a step")
    parser.add_argument(
        "--steps-per-launch",
        type=positive,
        help="decode steps that are launched, and answered, at a time "
        f"(default: {GPU_STEPS_PER_LAUNCH} on a GPU without --batch-invariant, else 1)",
    )
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


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound to an address but does not listen yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, OverflowError) as error:
        raise UsageError(f"cannot listen on {host}, port {port}: {error}") from error
    return listener


def serve(options: argparse.Namespace) -> int | None:
    """Load, compile, serve; returns the signal that ended it."""
    devices = select_devices(options.platform, 1)
    # Imported here, because xla_attention registers its targets for the platform that is selected above.
    from llama.checkpoint import default_model_path, load_checkpoint
    from llama.engine import Engine, EngineConfig
    from serve.messages import FrontSettings
    from serve.service import capacity_of

    if options.token_budget < options.max_num_seqs:
        raise UsageError(f"--token-budget is {options.token_budget}, expected at least --max-num-seqs")
    if options.batch_invariant and (options.steps_per_launch or 1) > 1:
        raise UsageError(f"--steps-per-launch is {options.steps_per_launch}, expected 1 with --batch-invariant")
    is_several = devices[0].platform != "cpu" and not options.batch_invariant
    steps_per_launch = options.steps_per_launch or (GPU_STEPS_PER_LAUNCH if is_several else 1)
    path = options.model or default_model_path()
    dtype = DTYPES[options.dtype or ("float32" if devices[0].platform == "cpu" else "bfloat16")]
    listener = bind(options.host, options.port)
    address = options.host, listener.getsockname()[1]
    checkpoint = load_checkpoint(path, dtype)
    sizes = EngineConfig(
        options.pages,
        options.page_size,
        options.max_num_seqs,
        options.token_budget,
        prefix_cache=not options.no_prefix_cache,
        batch_invariant=options.batch_invariant,
        steps_per_launch=steps_per_launch,
    )
    engine = Engine(checkpoint.config, checkpoint.weights, sizes, checkpoint.tokenizer.stop_tokens)
    # The front processes start while the programs are compiled.
    with front_processes(options.http_processes, listener) as fronts:
        for _ in tqdm(engine.compile_all(), total=engine.num_programs, desc="compiling", unit="program"):
            pass
        api_key = os.environ.get("XLA_ATTENTION_API_KEY")
        capacity = capacity_of(engine)
        settings = FrontSettings(path.stem, checkpoint.tokenizer, capacity, api_key, options.drain_seconds)
        return serve_engine(engine, settings, fronts, options.max_waiting, address)


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 1 if a front process ended, 2 for input that cannot be used (one line on standard error).

    Ends by the signal that ended the server.
    """
    options = parse_arguments(arguments)
    from llama.config import ModelError

    try:
        number = serve(options)
    except (ModelError, NotImplementedError, UsageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except FrontLostError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if number is not None:
        end_by(number)
    return 0


if __name__ == "__main__":
    sys.exit(main())
