"""Operators without gradients: differentiating one raises an error that names the alternative."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax

_STOP = "jax.lax.stop_gradient around the operands keeps the call in a function whose other parts are differentiated"


def without_gradient(name: str, alternative: str, *, num_static: int = 0) -> Callable[[Callable], Callable]:
    """Make reverse-mode differentiation of a function a NotImplementedError.

    Only a cotangent that is not a symbolic zero raises it: a result that the loss does not depend on, such as an
    updated cache, may come from differentiated operands.

    Parameters
    ----------
    name
        The public function, which the error names.
    alternative
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
            # None per operand: there are no residuals, and `backward` returns it as a zero gradient.
            return function(*arguments[:num_static], *values), (None,) * len(operands)

        def backward(*arguments: Any) -> tuple[None, ...]:  # noqa: ANN401
            no_gradients, cotangents = arguments[num_static:]
            zero = jax.custom_derivatives.SymbolicZero
            if not all(isinstance(cotangent, zero) for cotangent in jax.tree.leaves(cotangents)):
                raise NotImplementedError(f"{name}: there is no gradient; {alternative}; {_STOP}")
            return no_gradients

        wrapped.defvjp(forward, backward, symbolic_zeros=True)
        return wrapped

    return decorate
