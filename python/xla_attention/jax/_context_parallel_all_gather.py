"""Context-parallel attention by gathering K and V: each device attends to all keys with its own rows, in one call.

The backward pass gathers K and V again instead of keeping them, and scatters the sums of their gradients in f32.
"""

import jax

from ._call import Array
from ._context_parallel_layouts import Layout
from ._context_parallel_steps import Config, Step, attend, device_layout, make_step, step_gradients
from ._varlen_types import Cotangents, Gradients, Operands


def forward(config: Config, operands: Operands) -> tuple[Array, Array]:
    """The output and the log-sum-exp."""
    return attend(_step(config, device_layout(config, operands), operands))


def backward(config: Config, operands: Operands, cotangents: Cotangents) -> Gradients:
    """The gradients in f32."""
    layout = device_layout(config, operands)
    grads = step_gradients(_step(config, layout, operands), cotangents)

    def scatter(gradient: Array) -> Array:
        return jax.lax.psum_scatter(layout.sum_of_keys(gradient), config.axis_name, tiled=True)

    return grads._replace(dk=scatter(grads.dk), dv=scatter(grads.dv))


def _step(config: Config, layout: Layout, operands: Operands) -> Step:
    keys = [layout.gathered_keys(jax.lax.all_gather(x, config.axis_name, tiled=True)) for x in operands[1:3]]
    return make_step(config, layout, operands, layout.gathered(), keys)
