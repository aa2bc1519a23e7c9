"""A server of StubEngine, for tests and measurements of all but the device.

python tests/serve/stub_server.py --sequences 64 --step-ms 1.5 --http-processes 2
"""

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from llama.engine import EngineConfig
from serve.messages import FrontSettings
from serve.processes import FrontLostError, end_by, front_processes, serve
from serve.service import capacity_of
from server import bind
from stub_engine import StubEngine, word_tokenizer


def main() -> None:
    """Serve until a signal, and end by it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--max-waiting", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=1.5)
    parser.add_argument("--num-steps", type=float, default=math.inf, help="after which the engine fails")
    parser.add_argument("--http-processes", type=int, default=2)
    options = parser.parse_args()
    count = options.sequences
    sizes = EngineConfig(32 * count + 64, 16, count, max(512, count), True)
    engine = StubEngine(sizes, options.step_ms / 1e3, options.num_steps)
    listener = bind("127.0.0.1", 0)
    address = listener.getsockname()
    with front_processes(options.http_processes, listener) as fronts:
        settings = FrontSettings("stub", word_tokenizer(), capacity_of(engine), None, 3)
        try:
            number = serve(engine, settings, fronts, options.max_waiting, address)
        except FrontLostError as error:
            sys.exit(f"error: {error}")
    end_by(number)


if __name__ == "__main__":
    main()
