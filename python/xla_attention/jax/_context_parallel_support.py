"""What context-parallel attention is refused for: strategies, layouts, rows and heads that do not fit together."""

from ._call import Array
from ._context_parallel_layouts import LAYOUTS
from ._varlen_types import Options

NAME = "context_parallel_attention"
# The layouts of each strategy. Every option works in all of them.
STRATEGIES = {
    "all_gather": ("contiguous", "zigzag"),
    "ring": ("contiguous", "zigzag"),
    "all_to_all": ("contiguous",),
}


def validate_strategy(strategy: str, layout: str) -> None:
    """Raise an error for a strategy or layout that does not exist, and for a layout that the strategy does not have."""
    for name, value, expected in (("strategy", strategy, tuple(STRATEGIES)), ("layout", layout, tuple(LAYOUTS))):
        if value not in expected:
            names = ", ".join(map(repr, expected[:-1]))
            raise ValueError(f"{NAME}: {name} is {value!r}, expected {names} or {expected[-1]!r}")
    if layout not in STRATEGIES[strategy]:
        own = " or ".join(f"layout={x!r}" for x in STRATEGIES[strategy])
        others = " or ".join(f"strategy={x!r}" for x, layouts in STRATEGIES.items() if layout in layouts)
        raise NotImplementedError(
            f"{NAME}: strategy={strategy!r} does not have layout={layout!r}; use {own}, or {others}"
        )


def without_vacuous_windows(options: Options, total: int) -> Options:
    """The same mask for a stream of `total` rows; a limit that no key exceeds becomes -1, and 0 to the right causal."""
    left, right = (
        side.dtype.type(side if side < total - 1 else -1) for side in (options.window_left, options.window_right)
    )
    causal = options.causal.dtype.type(options.causal or right == 0)
    return options._replace(causal=causal, window_left=left, window_right=right.dtype.type(-1) if causal else right)


def validate_rows(q: Array, k: Array, v: Array, layout: str) -> None:
    """Raise ValueError unless each device has as many keys as queries, which the layout can cut."""
    for name, array in (("k", k), ("v", v)):
        if array.shape[:1] != q.shape[:1]:
            raise ValueError(
                f"{NAME}: {name} has shape {list(array.shape)} on a device and q {list(q.shape)}; queries and keys "
                "have the same rows"
            )
    if layout == "zigzag" and q.shape[0] % 2:
        raise ValueError(
            f"{NAME}: q has {q.shape[0]} rows on a device, expected an even number in the layout 'zigzag', in which a "
            "device has two chunks of each sequence; pad the stream, or use layout='contiguous'"
        )


def validate_heads(num_devices: int, heads: int, kv_heads: int) -> None:
    """Raise ValueError for heads that the strategy "all_to_all" cannot divide."""
    instead = "use strategy 'all_gather' or 'ring', which leave heads whole"
    if heads % num_devices:
        raise ValueError(
            f"{NAME}: q has {heads} heads, and strategy='all_to_all' over {num_devices} devices needs a multiple of "
            f"{num_devices}; {instead}"
        )
    if kv_heads % num_devices and num_devices % kv_heads:
        raise ValueError(
            f"{NAME}: k has {kv_heads} heads, and strategy='all_to_all' over {num_devices} devices needs a multiple or "
            f"a divisor of {num_devices}; {instead}"
        )
