"""What each strategy of context-parallel attention computes, and errors for everything else."""

from ._call import Array
from ._context_parallel_layouts import LAYOUTS
from ._varlen_types import Options

NAME = "context_parallel_attention"
STRATEGIES = ("all_gather", "ring", "all_to_all")
# The kinds of masks, as `mask_of` names them.
MASKS = {
    "full": "full attention",
    "causal": "causal attention",
    "causal window": "a causal window",
    "window": "a window without a causal mask",
}
# The masks that a strategy computes in a layout, without and with ALiBi slopes. Every other option works with all of
# them: GQA, another Dv, sinks, softcap, softmax_scale, seqused, the log-sum-exp and gradients.
SUPPORTED: dict[tuple[str, str], tuple[tuple[str, ...], tuple[str, ...]]] = {
    ("all_gather", "contiguous"): (("full", "causal", "causal window"), ("causal", "causal window")),
    ("all_gather", "zigzag"): (("full", "causal", "causal window"), ("causal", "causal window")),
    ("ring", "contiguous"): (("full", "causal", "causal window"), ("causal window",)),
    ("ring", "zigzag"): (("full", "causal"), ()),
    ("all_to_all", "contiguous"): (tuple(MASKS), tuple(MASKS)),
    ("all_to_all", "zigzag"): ((), ()),
}


def mask_of(options: Options) -> str:
    """The kind of mask, a key of `MASKS`."""
    if options.causal:
        return "causal" if options.window_left < 0 else "causal window"
    return "full" if max(options.window_left, options.window_right) < 0 else "window"


def without_vacuous_windows(options: Options, total: int) -> Options:
    """The same mask for a stream of `total` rows; a limit that no key exceeds becomes -1, and 0 to the right causal."""
    left, right = (
        side.dtype.type(side if side < total - 1 else -1) for side in (options.window_left, options.window_right)
    )
    causal = options.causal.dtype.type(options.causal or right == 0)
    return options._replace(causal=causal, window_left=left, window_right=right.dtype.type(-1) if causal else right)


def validate_names(strategy: str, layout: str) -> None:
    """Raise ValueError for a strategy or a layout that does not exist."""
    for name, value, expected in (("strategy", strategy, STRATEGIES), ("layout", layout, tuple(LAYOUTS))):
        if value not in expected:
            names = ", ".join(map(repr, expected[:-1]))
            raise ValueError(f"{NAME}: {name} is {value!r}, expected {names} or {expected[-1]!r}")


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


def validate_support(strategy: str, layout: str, options: Options, has_slopes: bool) -> None:
    """Raise NotImplementedError for a mask or ALiBi where the strategy does not compute it, naming those that do."""
    mask = mask_of(options)
    able = [pair for pair, masks in SUPPORTED.items() if mask in masks[has_slopes]]
    if (strategy, layout) in able:
        return
    if not any(SUPPORTED[strategy, layout]):
        instead = next(x for s, x in SUPPORTED if s == strategy and x != layout)
        others = " or ".join(dict.fromkeys(repr(s) for s, x in able if x == layout))
        raise NotImplementedError(
            f"{NAME}: strategy={strategy!r} does not have the layout {layout!r}; use layout={instead!r}"
            + (f", or strategy {others}" if others else "")
        )
    what = MASKS[mask] + (" with alibi_slopes" if has_slopes else "")
    choices = " or ".join(f"strategy={s!r} with layout={x!r}" for s, x in able)
    raise NotImplementedError(
        f"{NAME}: strategy={strategy!r} with layout={layout!r} does not compute {what}; use {choices}"
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
