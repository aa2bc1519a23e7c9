"""Calls of `calls.py` as JAX functions of some of their arguments."""

import jax.numpy as jnp
import numpy as np

import xla_attention.jax
from calls import tree_map


def function_of(call, *operands):
    """The call as a function of the arguments that `operands` names; the others are constants."""
    function = getattr(xla_attention.jax, call.function)
    arguments = {name: x for name, x in call.arguments.items() if name not in operands}
    return lambda *values: function(**arguments, **dict(zip(operands, values, strict=True)))


def arrays_of(call):
    """The arguments that are arrays, by name."""
    return {name: x for name, x in call.arguments.items() if isinstance(x, np.ndarray | tuple) and name != "window"}


def donatable(value):
    """Copies in memory that JAX allocated: JAX cannot donate that of a NumPy array."""
    return tree_map(lambda x: jnp.array(x) + jnp.zeros((), x.dtype), value)
