"""What xla_attention.jax and xla_attention.torch have in common: functions of the same names and arguments."""

import numpy as np


def run(module, call, to_device, to_numpy, wrap=lambda function: function):
    """Call the function of `call` and check its results.

    Parameters
    ----------
    module
        xla_attention.jax or xla_attention.torch.
    to_device, to_numpy
        Between NumPy's arrays and the front-end's.
    wrap
        Makes another function of ``f(arguments, options)``, where options holds arrays only.
    """
    arrays = {name: x for name, x in call.options.items() if isinstance(x, np.ndarray)}
    static = {name: x for name, x in call.options.items() if name not in arrays}

    def function(arguments, options):
        return getattr(module, call.function)(*arguments, **options, **static)

    check(call, wrap(function)(moved(call.arguments, to_device), moved(arrays, to_device)), to_numpy)


def check(call, found, to_numpy):
    """Results of the function in the order of the target's."""
    found = found if isinstance(found, tuple) else (found,)
    assert len(found) == len(call.order), f"{len(found)} results"
    results = [to_numpy(found[call.order.index(i)]) for i in range(len(found))]
    call.check(*results)


def moved(values, to_device):
    """Every array in nested tuples and dictionaries."""
    if isinstance(values, tuple):
        return tuple(moved(x, to_device) for x in values)
    if isinstance(values, dict):
        return {name: moved(x, to_device) for name, x in values.items()}
    return to_device(values) if isinstance(values, np.ndarray) else values
