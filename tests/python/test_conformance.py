"""The tables of tests/conformance through XLA, as StableHLO text and as ``jax.ffi.ffi_call``.

tests/it/conformance runs the same cases, and all that can be derived from an interface, without XLA.
test_conformance_runtime.py has what the tables cannot express.
"""

import functools
import itertools

import pytest

import xla_attention.jax  # noqa: F401  registers the targets
from conformance_calls import assert_outcome, by_ffi_call, by_stablehlo
from conformance_table import cases, drivers, ffi_header_errors, skipped_for
from xla_attention import _library

DRIVERS = {"stablehlo": by_stablehlo, "ffi_call": by_ffi_call}

# tests/it/conformance runs every invalid call in the same handlers, and XLA treats them all alike.
SAMPLE = {driver: {str(case) for case in cases()[start::3]} for start, driver in enumerate(DRIVERS)}


def for_driver(driver):
    """All valid and every third invalid case as pytest parameters; those that the driver cannot express are skipped."""
    return [
        pytest.param(case, id=str(case), marks=[pytest.mark.skip(reason=reason)] if reason else [])
        for case in cases()
        if is_sampled(driver, case)
        for reason in [skipped_for(case, driver)]
    ]


def is_sampled(driver, case):
    return case.code is None or str(case) in SAMPLE[driver]


def run_case(case, platform, run):
    if platform == "gpu" and not case.results:
        pytest.skip("XLA:GPU removes a call without results")
    assert_outcome(case, platform, run)


@pytest.mark.parametrize("case", for_driver("stablehlo"))
def test_a_case_as_stablehlo_text(platform, case):
    run_case(case, platform, by_stablehlo)


@pytest.mark.parametrize("case", for_driver("ffi_call"))
def test_a_case_as_ffi_call(platform, case):
    run_case(case, platform, by_ffi_call)


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("case", ffi_header_errors(), ids=str)
def test_a_call_that_the_ffi_header_rejects(platform, driver, case):
    run_case(case, platform, DRIVERS[driver])


def can_run_in_place(case):
    return case.code is None and bool(case.aliases) and "memory" not in case.terms


# With alternating drivers: XLA handles the aliasing alike for both.
@pytest.mark.parametrize(
    ("driver", "case"), list(zip(itertools.cycle(DRIVERS), filter(can_run_in_place, cases()))), ids=str
)
def test_valid_cases_with_results_that_alias_operands(platform, driver, case):
    run_case(case, platform, functools.partial(DRIVERS[driver], in_place=True))


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_driver_runs_what_it_can_express(driver):
    reasons = drivers()[driver]
    run = [case for case in cases() if is_sampled(driver, case) and skipped_for(case, driver) is None]
    assert len(run) >= reasons["at_least"]
    for term in reasons["cannot_express"]:
        assert any(term in case.terms for case in cases()), f"no case uses {term}"


def test_the_tables_cover_every_target():
    assert {case.target for case in cases()} == {target.name.decode() for target in _library.targets()}
