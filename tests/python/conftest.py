"""Fixtures that run every operator test on the CPU and, if there is one, on the GPU."""

import functools
import importlib.util
import os

# The programs around our calls need not be fast: XLA:CPU compiles without optimisation. Set before importing JAX.
if not os.path.exists("/dev/nvidia0"):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".lstrip()
# Tests start programs on the same GPUs. With three quarters of the memory in this process, they hung on two of 80 GB.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import hypothesis
import jax
import pytest

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_torch_*.py"]

# torch_xla uses its own CPU client, or with XLA_ATTENTION_TEST_XLA=cuda JAX's CUDA plugin.
XLA_ON_CUDA = os.environ.get("XLA_ATTENTION_TEST_XLA") == "cuda"
if not XLA_ON_CUDA:
    os.environ.setdefault("PJRT_DEVICE", "CPU")

# Most of an example's time is compilation for a new shape, which no deadline fits.
hypothesis.settings.register_profile("shapes", deadline=None, max_examples=40)
hypothesis.settings.load_profile("shapes")


@functools.cache
def no_gpu(of_torch: bool) -> str | None:
    """Why a test that needs a GPU cannot run, or None."""
    try:
        jax.devices("gpu")
    except RuntimeError:
        return "no NVIDIA GPU that JAX can use"
    if of_torch:
        import torch

        return None if torch.cuda.is_available() else "torch sees no CUDA device"
    return None


def pytest_collection_modifyitems(items):
    for item in items:
        of_torch = item.path.name.startswith("test_torch_") or "torch_device" in item.fixturenames
        if "gpu" in item.keywords and (reason := no_gpu(of_torch)):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def platform(request):
    """The platform of JAX's default device."""
    with jax.default_device(jax.devices(request.param)[0]):
        yield request.param


@pytest.fixture(scope="session")
def xla_device():
    """The name of torch_xla's device."""
    pytest.importorskip("torch_xla", reason="torch_xla is not installed", exc_type=ImportError)
    if XLA_ON_CUDA:
        import xla_attention.torch_xla

        xla_attention.torch_xla.use_cuda_plugin()
    return "xla"


@pytest.fixture(scope="session")
def all_torch_devices(request):
    """Create all devices first: autograd counts them at its first backward call and never again."""
    try:
        import torch_xla  # noqa: F401
    except ImportError:
        return
    import torch

    torch.zeros(1, device=request.getfixturevalue("xla_device"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu), "xla"])
def torch_device(request):
    """The device of a test's tensors."""
    if request.param == "xla":
        return request.getfixturevalue("xla_device")
    return request.param
