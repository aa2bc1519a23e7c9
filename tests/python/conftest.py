"""Fixtures: every operator test runs on the CPU and, where there is one, on the GPU."""

import hypothesis
import jax
import pytest

# Most of an example's time is XLA compiling for a new shape, which no deadline fits.
hypothesis.settings.register_profile("shapes", deadline=None, max_examples=40)
hypothesis.settings.load_profile("shapes")


def gpus() -> list:
    try:
        return jax.devices("gpu")
    except RuntimeError:
        return []


def pytest_collection_modifyitems(items):
    if not gpus():
        skip = pytest.mark.skip(reason="no NVIDIA GPU that JAX can use")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def platform(request):
    """The platform on which everything in the test runs by default."""
    with jax.default_device(jax.devices(request.param)[0]):
        yield request.param
