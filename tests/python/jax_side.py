"""Calls of `calls.py` as functions of JAX."""

import jax.numpy as jnp
import numpy as np

import xla_attention.jax
from calls import mapped


def function_of(call, *operands):
    """The function of what `operands` names; all else that is given to the call is constant."""
    function = getattr(xla_attention.jax, call.function)
    given = {name: x for name, x in call.given.items() if name not in operands}
    return lambda *values: function(**given, **dict(zip(operands, values, strict=True)))


def arrays_of(call):
    """The parameters that take arrays, by name."""
    return {name: x for name, x in call.given.items() if isinstance(x, np.ndarray | tuple) and name != "window"}


def computed(value):
    """In JAX's own memory, which may be given away: that of a NumPy array may not."""
    return mapped(lambda x: jnp.array(x) + jnp.zeros((), x.dtype), value)
