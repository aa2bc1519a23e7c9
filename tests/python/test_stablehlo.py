"""The targets from raw StableHLO text, as any PJRT program would call them: numbers.

What is refused, and everything that has no numbers, is in test_conformance.py.
"""

import pytest

import xla_attention.jax  # noqa: F401  registers the targets
from calls import every_call, simple_add
from stablehlo import run_stablehlo
from stablehlo_text import module, without_trailing_none


@pytest.mark.parametrize("call", [*every_call(), simple_add(target="XlaGpuSimpleAdd")], ids=lambda call: call.name)
def test_it_runs_from_text(platform, call):
    operands = without_trailing_none(call.operands)
    text = module(call.target, operands, call.results, call.attributes, aliases=call.aliases)
    call.check(*run_stablehlo(text, *operands, platform=platform))
