from __future__ import annotations

import math

import pytest

from cocofl.accounting import Accountant, Sampling, check_epsilon
from cocofl.errors import InvalidExperiment

EVERYONE = Sampling("fixed", 30, 30)


def by_hand(noise: float, rounds: int, delta: float) -> float:
    """Of Gaussian noise: the divergence of order a is a / 2 noise² (Canonne et al., 2020)."""
    orders = [1 + step / 10 for step in range(1, 1000)]
    return min(
        rounds * a / (2 * noise**2) + math.log1p(-1 / a) - math.log(delta * a) / (a - 1)
        for a in orders
    )


@pytest.mark.parametrize(("noise", "rounds"), [(1.0, 1), (2.0, 10), (5.0, 100)])
def test_without_sampling_epsilon_is_that_of_gaussian_noise(noise: float, rounds: int) -> None:
    found = Accountant(noise, 1e-5, EVERYONE).epsilon(rounds)
    assert found == pytest.approx(by_hand(noise, rounds, 1e-5), rel=2e-3)


def test_epsilon_is_rounded_up() -> None:
    # min over a of a/2 + log(1 - 1/a) - log(1e-5 a)/(a - 1) = 4.72850… at a = 5.4 of those tried
    assert Accountant(1.0, 1e-5, EVERYONE).epsilon(1) == 4.7286


def test_coins_hide_more_than_a_fixed_number_and_that_no_less_than_nothing() -> None:
    poisson, fixed, everyone = (
        Accountant(1.0, 1e-5, sampling).epsilon(100)
        for sampling in (Sampling("poisson", 100, 10), Sampling("fixed", 100, 10), EVERYONE)
    )
    # As TensorFlow Privacy's tables have it: rate 0.1, noise 1, 100 steps.
    assert poisson == pytest.approx(7.97, abs=0.01)
    assert poisson < fixed <= everyone


def test_sampling_of_two_devices_by_hand() -> None:
    # Order 2 alone: log(1 + q² (exp(1/noise²) - 1)) is the divergence (Mironov et al., 2019).
    accountant = Accountant(4.0, 1e-5, Sampling("poisson", 10, 5))
    (curve,) = [one for one in accountant._curves if len(one.orders) == 70]
    assert curve.orders[0] == 2
    assert curve.divergences[0] == pytest.approx(math.log(1 + 0.25 * math.expm1(1 / 16)))


def test_a_run_that_would_say_too_much_is_refused_with_what_would_not() -> None:
    accountant = Accountant(2.0, 1e-5, EVERYONE)
    check_epsilon(accountant, 100.0, 10)
    check_epsilon(accountant, math.inf, 10)
    fits = accountant.most_rounds(6.0, 10)
    assert accountant.epsilon(fits) <= 6.0 < accountant.epsilon(fits + 1)
    with pytest.raises(InvalidExperiment, match=f"10 rounds come to .* after {fits} rounds"):
        check_epsilon(accountant, 6.0, 10)
