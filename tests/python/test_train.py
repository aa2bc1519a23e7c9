"""The training example has the losses of attention in plain JAX, also with its tokens spread over devices."""

import json
import pathlib

import numpy as np
import pytest

from subprocesses import python

TRAIN = pathlib.Path(__file__).resolve().parents[2] / "examples/train.py"


def train(*arguments, check=True):
    return python(TRAIN, "--platform", "cpu", "--steps", 4, "--tokens", 512, *arguments, check=check)


@pytest.mark.parametrize(
    "mesh",
    [
        (),
        pytest.param(("--mesh", 4, "--strategy", "ring"), marks=pytest.mark.slow),
        pytest.param(("--mesh", 2, "--strategy", "all_to_all"), marks=pytest.mark.slow),
        pytest.param(("--mesh", 3, "--tokens", 576), marks=pytest.mark.slow),
    ],
)
def test_our_attention_has_the_losses_of_plain_attention(mesh, tmp_path):
    output = train("--json", tmp_path / "losses.json", *mesh).stdout
    (run,) = json.loads((tmp_path / "losses.json").read_text()).values()
    flash, plain = (run["runs"][name]["losses"] for name in ("flash", "plain"))
    assert len(flash) == 4 and flash[-1] < flash[0]
    # The programs add up in another order, and each step starts from the weights of the one before.
    np.testing.assert_allclose(flash, plain, rtol=2e-5)
    assert "the losses differ by at most" in output


def test_a_batch_that_the_devices_cannot_divide_is_refused():
    assert "--tokens is 512, expected a multiple of twice --mesh, which is 3" in train("--mesh", 3, check=False).stderr
