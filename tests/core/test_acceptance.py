import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rvrs.core.acceptance import evaluate, log_acceptance

EPSILONS = [0.0, 1e-12, 1e-4, 1e-2, 0.1]
LOG_WEIGHTS = np.concatenate(
    [sign * np.logspace(-3, 6, 200) for sign in (-1, 1)] + [np.linspace(-30, 30, 301)]
)


def reference(lw, t, epsilon):
    """The formula sheet in extended precision, each term in a form that cannot overflow."""
    lw, t, epsilon = np.longdouble(lw), np.longdouble(t), np.longdouble(epsilon)
    x = lw + t
    e = np.exp(-np.abs(x))
    a = np.where(x >= 0, 1 / (1 + e), e / (1 + e))
    one_minus_a = np.where(x >= 0, e / (1 + e), 1 / (1 + e))
    log_a = np.where(x >= 0, -np.log1p(e), x - np.log1p(e))
    zeta = epsilon / (1 - epsilon)
    if epsilon == 0:
        return log_a, a, a, a, one_minus_a, lw - log_a
    a_e = epsilon + (1 - epsilon) * a
    kappa = (zeta + a**2) / (zeta + a)
    c = (1 - epsilon) * a * one_minus_a / a_e
    return np.log(a_e), a_e, a, kappa, c, lw - np.log(a_e)


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("t", [-40.0, 0.0, 3.5, 40.0])
def test_every_field_is_right_from_minus_1e6_to_1e6_in_float32(epsilon, t):
    lw = LOG_WEIGHTS.astype(np.float32)
    got = evaluate(jnp.asarray(lw), jnp.asarray([t], jnp.float32), epsilon)
    expected = reference(lw, np.float32(t), epsilon)
    for name, value, wanted in zip(got._fields, got, expected, strict=True):
        assert value.dtype == jnp.float32
        assert np.all(np.isfinite(value)), name
        # Rounding of lw + T, which the formulas see as their argument, is the only error allowed
        # beside that of the result itself.
        argument = np.finfo(np.float32).eps * (np.abs(lw) + abs(t))
        slope = np.minimum(argument, 1.0) * (1 if "log" in name else np.abs(wanted))
        # An `a` below the smallest float is 0, and with it c, which is at most a / eps.
        smallest = 1e-37 / epsilon if name == "c" and epsilon > 0 else 1e-37
        tolerance = 2 * slope + 4e-6 * np.abs(wanted) + smallest
        assert np.all(np.abs(np.asarray(value, np.longdouble) - wanted) <= tolerance), name


def test_log_ratio_keeps_its_value_where_subtracting_would_cancel():
    # exp(A) = exp(lw) + exp(-T), so A tends to -T; lw - log a loses all digits at lw = -1e6.
    a = evaluate(jnp.asarray([-1e6, -300.0], jnp.float32), jnp.asarray([2.75], jnp.float32), 0.0)
    np.testing.assert_allclose(a.log_ratio, -2.75, rtol=1e-6)


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_factors_are_the_derivatives_they_stand_for(epsilon):
    with jax.enable_x64():
        t = jnp.asarray(0.7)
        for lw in jnp.linspace(-12.0, 12.0, 25):
            a = evaluate(lw, t, epsilon)
            assert jnp.allclose(jax.grad(log_acceptance)(lw, t, epsilon), a.c, rtol=1e-9)
            assert jnp.allclose(1 - a.c, a.kappa, rtol=1e-9, atol=1e-15)
            assert jnp.allclose(
                jax.grad(lambda lw: evaluate(lw, t, epsilon).log_ratio)(lw), a.kappa, rtol=1e-9
            )
            # The identity behind the pathwise weight: kappa c + d kappa = 2 a c.
            slope = jax.grad(lambda lw: evaluate(lw, t, epsilon).kappa)(lw)
            assert jnp.allclose(a.kappa * a.c + slope, 2 * a.sigmoid * a.c, rtol=1e-8, atol=1e-15)


@pytest.mark.parametrize("epsilon", [0.0, 1e-4, 0.5])
@pytest.mark.parametrize("lw", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("t", [0.0, jnp.inf])
def test_non_finite_log_weights_are_never_accepted_and_have_zero_gradient(epsilon, lw, t):
    t = jnp.asarray([t], jnp.float32)
    lw = jnp.asarray([lw, 0.5], jnp.float32)
    a = evaluate(lw, t, epsilon)
    assert a.log_probability[0] == -jnp.inf
    for field in a:
        assert not jnp.any(jnp.isnan(field))
    for field in range(1, 6):
        assert a[field][0] == 0

    def total(lw, t):
        return jnp.sum(jnp.exp(log_acceptance(lw, t, epsilon)))

    gradients = jax.grad(total, argnums=(0, 1))(lw, t)
    assert all(jnp.all(jnp.isfinite(g)) for g in gradients)
    assert gradients[0][0] == 0
    jacobian = jax.jacrev(lambda lw: evaluate(lw, t, epsilon)[1:])(lw)
    assert all(jnp.all(jnp.isfinite(j)) for j in jacobian)


def test_an_infinite_threshold_accepts_everything_finite():
    a = evaluate(jnp.asarray([-1e6, 0.0, 1e6]), jnp.asarray([jnp.inf]), 0.0)
    np.testing.assert_array_equal(a.log_probability, 0.0)
    np.testing.assert_array_equal(a.kappa, 1.0)
    np.testing.assert_array_equal(a.c, 0.0)
    np.testing.assert_array_equal(a.log_ratio, [-1e6, 0.0, 1e6])
