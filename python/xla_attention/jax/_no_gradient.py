"""Operators without gradients: asking for one is an error that names the way out."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax

_STOP = "jax.lax.stop_gradient around the operands keeps the call in a function whose other parts are differentiated"


def without_gradient(name: str, way_out: str, *, num_static: int = 0) -> Callable[[Callable], Callable]:
    """Make reverse-mode differentiation of a function a NotImplementedError.

    Only a gradient that something asks for is refused. A result that the differentiated value does not depend on, such
    as an updated cache beside a loss, may come from perturbed operands.

    Parameters
    ----------
    name
        The public function that the error speaks of.
    way_out
        What has a gradient instead.
    num_static
        How many leading arguments are hashable Python values; the others are arrays, tuples of them, or None.
    """

    def decorate(function: Callable) -> Callable:
        wrapped = jax.custom_vjp(function, nondiff_argnums=tuple(range(num_static)))

        @functools.wraps(function)
        def forward(*arguments: Any) -> tuple[Any, tuple[None, ...]]:  # noqa: ANN401
            operands = arguments[num_static:]
            values = jax.tree.map(operator.attrgetter("value"), operands)
            # None for each operand is at once what has to be kept and the gradient of a result that no one uses.
            return function(*arguments[:num_static], *values), (None,) * len(operands)

        def backward(*arguments: Any) -> tuple[None, ...]:  # noqa: ANN401
            nothing, cotangents = arguments[num_static:]
            zero = jax.custom_derivatives.SymbolicZero
            if not all(isinstance(cotangent, zero) for cotangent in jax.tree.leaves(cotangents)):
                raise NotImplementedError(f"{name}: there is no gradient; {way_out}; {_STOP}")
            return nothing

        wrapped.defvjp(forward, backward, symbolic_zeros=True)
        return wrapped

    return decorate
