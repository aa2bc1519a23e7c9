"""The tables of tests/conformance through XLA: as StableHLO text that we write, and as ``jax.ffi.ffi_call``.

The same cases, and all that follow from an interface, run without XLA in tests/it/conformance; what no table can say is
in test_conformance_runtime.py.
"""

import functools
import itertools

import pytest

import xla_attention.jax  # noqa: F401  registers the targets
from conformance_calls import assert_outcome, by_ffi_call, by_stablehlo
from conformance_table import cases, drivers, in_words_of_the_headers, skipped_for
from xla_attention import _library

DRIVERS = {"stablehlo": by_stablehlo, "ffi_call": by_ffi_call}

# Every refusal runs in tests/it/conformance, in the same handlers; XLA's part in it is the same for all.
SAMPLE = {driver: {str(case) for case in cases()[start::3]} for start, driver in enumerate(DRIVERS)}


def for_driver(driver):
    """What works and every third refusal as pytest's parameters; what the driver cannot express is skipped."""
    return [
        pytest.param(case, id=str(case), marks=[pytest.mark.skip(reason=reason)] if reason else [])
        for case in cases()
        if is_sampled(driver, case)
        for reason in [skipped_for(case, driver)]
    ]


def is_sampled(driver, case):
    return case.code is None or str(case) in SAMPLE[driver]


def hold(case, platform, run):
    if platform == "gpu" and not case.results:
        pytest.skip("XLA:GPU leaves out a call without a result")
    assert_outcome(case, platform, run)


@pytest.mark.parametrize("case", for_driver("stablehlo"))
def test_a_case_as_stablehlo_text(platform, case):
    hold(case, platform, by_stablehlo)


@pytest.mark.parametrize("case", for_driver("ffi_call"))
def test_a_case_as_ffi_call(platform, case):
    hold(case, platform, by_ffi_call)


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("case", in_words_of_the_headers(), ids=str)
def test_what_the_headers_refuse(platform, driver, case):
    hold(case, platform, DRIVERS[driver])


def works_in_place(case):
    return case.code is None and bool(case.aliases) and "memory" not in case.terms


# By the drivers in turns: what XLA does with the two memories is the same for both.
@pytest.mark.parametrize(
    ("driver", "case"), list(zip(itertools.cycle(DRIVERS), filter(works_in_place, cases()))), ids=str
)
def test_what_works_works_with_results_that_alias_operands(platform, driver, case):
    hold(case, platform, functools.partial(DRIVERS[driver], in_place=True))


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_driver_runs_what_it_can_express(driver):
    reasons = drivers()[driver]
    run = [case for case in cases() if is_sampled(driver, case) and skipped_for(case, driver) is None]
    assert len(run) >= reasons["at_least"]
    for term in reasons["cannot_express"]:
        assert any(term in case.terms for case in cases()), f"no case uses {term}"


def test_the_tables_speak_of_every_target():
    assert {case.target for case in cases()} == {target.name.decode() for target in _library.targets()}
