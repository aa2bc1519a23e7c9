"""Context-parallel attention by gathering K and V: each device attends to all keys with its own rows.

The backward pass gathers K and V again instead of keeping them, and scatters the sums of their gradients in f32.
"""

import jax
import jax.numpy as jnp

from ._call import Array
from ._context_parallel_layouts import Layout
from ._context_parallel_steps import Config, Step, add_gradients, attend, device_layout, make_step, step_gradients
from ._varlen_types import Cotangents, Gradients, Operands


def forward(config: Config, operands: Operands) -> tuple[Array, Array]:
    """The output and the log-sum-exp."""
    parts = [attend(step) for step in _steps(config, device_layout(config, operands), operands)]
    # A row is unused in every part but one, where it has 0 and -inf.
    out, lse = parts[0]
    for other_out, other_lse in parts[1:]:
        out, lse = out + other_out, jnp.maximum(lse, other_lse)
    return out, lse


def backward(config: Config, operands: Operands, cotangents: Cotangents) -> Gradients:
    """The gradients in f32."""
    layout = device_layout(config, operands)
    total = add_gradients([step_gradients(step, cotangents) for step in _steps(config, layout, operands)])

    def scatter(gradient: Array) -> Array:
        return jax.lax.psum_scatter(layout.in_device_order(gradient), config.axis_name, tiled=True)

    return total._replace(dk=scatter(total.dk), dv=scatter(total.dv))


def _steps(config: Config, layout: Layout, operands: Operands) -> list[Step]:
    keys = [
        layout.in_stream_order(jax.lax.all_gather(x, config.axis_name, tiled=True)) for x in (operands.k, operands.v)
    ]
    return [make_step(config, layout, operands, ranges, keys) for ranges in layout.gathered()]
