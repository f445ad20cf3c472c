"""Adam on the rows of a batch: what plain Adam would do, without a step for the other rows."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpyro.distributions.transforms import IdentityTransform

from rvrs import row_adam
from rvrs.batches import Batches
from rvrs.guides._program import Programs
from rvrs.semi_training import Trainer, _scale_by_adam

FIRST_DECAY = 0.9


def moved(gradients, steps_between=1.0):
    """Steps of rows that are visited together, one visit per row of ``gradients``."""

    def visit(moments, gradient):
        step, moments = row_adam.update(gradient, moments, steps_between)
        return moments, step

    gradients = jnp.asarray(gradients)
    last, steps = jax.lax.scan(visit, row_adam.init(gradients[0]), gradients)
    return np.asarray(steps), last


def dense(gradients, optimizer):
    """Steps of plain Adam, one per gradient."""
    gradients = jnp.asarray(gradients)
    # The parameters tell optax the precision of its decays.
    params = jnp.zeros_like(gradients[0])

    def step(state, gradient):
        update, state = optimizer.update(gradient, state, params)
        return state, update

    return np.asarray(jax.lax.scan(step, optimizer.init(params), gradients)[1])


def between_visits(gradients, steps_between):
    """What plain Adam moves from one visit to the next, with a gradient at the visits alone."""
    sparse = np.zeros((len(gradients), steps_between, *gradients.shape[1:]))
    sparse[:, 0] = gradients
    steps = dense(sparse.reshape(-1, *gradients.shape[1:]), _scale_by_adam(steps_between))
    return steps.reshape(sparse.shape).sum(1)


def of_one_size(shape, seed=0):
    # So large that epsilon is below rounding.
    return 1e6 * np.random.default_rng(seed).choice([-1.0, 1.0], shape)


def windows(num_visits, most=1000):
    """Over how many gradients squares are averaged at every visit."""
    visit = np.arange(1, num_visits + 1)
    return np.minimum(visit, np.clip(0.2 * visit, 10, most))


def few(monkeypatch, most):
    """Averages over fewer gradients, so that they settle within a short test."""
    monkeypatch.setattr(row_adam, "SECOND_MOMENT_STEPS", (10, most))


def test_with_a_visit_at_every_step_gradients_of_one_size_move_a_row_as_plain_adam_does():
    # Any average of the squares is then the same, so that the other moment is what is compared.
    with jax.enable_x64():
        gradients = of_one_size((400, 5))
        wanted = dense(gradients, optax.scale_by_adam(b1=FIRST_DECAY))
        np.testing.assert_allclose(moved(gradients)[0], wanted, rtol=1e-10, atol=1e-12)
        # Plain Adam with a window that grows corrects for its start by less than it should: the
        # decays of n steps are not the n-th power of the last one, but for the first 51 steps.
        wanted = dense(gradients, _scale_by_adam(1))
        np.testing.assert_allclose(moved(gradients)[0][:51], wanted[:51], rtol=1e-10, atol=1e-12)
        decay = 1 - 1 / np.clip(0.2 * np.arange(400), 10, 1000)
        found = (1 - np.cumprod(decay)) / (1 - decay ** np.arange(1, 401))
        wanted = wanted * np.sqrt(found)[:, None]
        np.testing.assert_allclose(moved(gradients)[0], wanted, rtol=1e-10, atol=1e-12)


def test_with_a_visit_at_every_step_any_gradients_move_a_row_as_plain_adam_does_in_the_end(
    monkeypatch,
):
    few(monkeypatch, 50)
    # Both windows are 50 from visit 252 on; what was before has then a weight of exp(-25).
    gradients = np.random.default_rng(0).standard_t(3, size=(1600, 5))
    with jax.enable_x64():
        steps, wanted = moved(gradients)[0], dense(gradients, _scale_by_adam(1))
    np.testing.assert_allclose(steps[1500:], wanted[1500:], rtol=0, atol=1e-9)
    assert np.abs(wanted[1500:]).max() > 0.5


@pytest.mark.parametrize("steps_between", [2, 8])
def test_per_visit_a_row_moves_as_plain_adam_does_until_the_next_visit(monkeypatch, steps_between):
    few(monkeypatch, 50)
    gradients = of_one_size((1600, 3))
    with jax.enable_x64():
        rows = moved(gradients, float(steps_between))[0]
        wanted = between_visits(gradients, steps_between)
    # Squares that plain Adam remembers fall a little from visit to visit; from 252 on by this.
    np.testing.assert_allclose(
        wanted[1500:], rows[1500:] * _excess(steps_between, 50), rtol=0, atol=1e-9
    )
    assert np.abs(rows[1500:]).max() > np.sqrt(steps_between) / 2


def _excess(steps_between, window):
    """Of plain Adam's steps between visits, with gradients of one size, over those of a row."""
    after = np.arange(steps_between)
    decay = 1 - 1 / (steps_between * window)
    # Right after a visit, per square of a gradient; steps fall with the mean, and rise with this.
    square = (1 - decay) / (1 - decay**steps_between)
    dense = np.sum(FIRST_DECAY**after * (1 - FIRST_DECAY) / np.sqrt(square * decay**after))
    return dense / (np.sqrt(steps_between) * (1 - FIRST_DECAY**steps_between))


@pytest.mark.parametrize("steps_between", [1, 2, 8, 100, 10_000])
def test_the_window_makes_less_than_its_inverse_of_a_difference_to_plain_adam(steps_between):
    assert abs(_excess(steps_between, 1000) - 1) < 1 / 1000


def test_steps_between_visits_count_for_the_mean_and_the_factor_alone():
    gradients = np.random.default_rng(1).normal(size=(30, 4))
    with jax.enable_x64():
        _, often = moved(gradients, 1.0)
        for steps_between in (1.0, 2.5, 40.0):
            steps, seldom = moved(gradients, steps_between)
            decay = FIRST_DECAY**steps_between
            # The visit before counts by what Adam forgets within so many steps, also a half one.
            weights = decay ** np.arange(30)[::-1]
            mean = weights @ gradients / weights.sum()
            wanted = np.sqrt(steps_between) * mean / (np.sqrt(often.square) + 1e-8)
            np.testing.assert_allclose(steps[-1], wanted, rtol=1e-12)
            np.testing.assert_array_equal(seldom.square, often.square)


def test_squares_are_averaged_over_the_latest_fifth_of_the_visits():
    gradients = np.random.default_rng(2).normal(size=(5200, 2))
    with jax.enable_x64():
        for count in (1, 10, 49, 5200):
            window = windows(count)
            left = np.append(np.cumprod((1 - 1 / window)[:0:-1])[::-1], 1.0)
            weights = left / window
            np.testing.assert_allclose(weights.sum(), 1, rtol=1e-12)
            square = moved(gradients[:count])[1].square
            np.testing.assert_allclose(square, weights @ gradients[:count] ** 2, rtol=1e-10)
            # So many equal weights would average as well.
            effective = 1 / np.sum(weights**2)
            assert effective == pytest.approx(min(count, 2 * window[-1]), rel=0.15)


@pytest.mark.parametrize("steps_between", [1.0, 20.0])
def test_a_bad_start_is_forgotten(steps_between):
    gradients = np.concatenate([np.full((100, 1), 100.0), np.ones((900, 1))])
    with jax.enable_x64():
        steps, _ = moved(gradients, steps_between)
    # What is left of the large squares at every later visit.
    left = np.cumprod(1 - 1 / windows(1000)[100:])
    wanted = 1 / (np.sqrt(1 + (100.0**2 - 1) * left) + 1e-8)
    # The first moment has forgotten the start long before.
    found = steps[100:, 0] / np.sqrt(steps_between)
    np.testing.assert_allclose(found[350:], wanted[350:], rtol=1e-12)
    # It moves nearly as if it had never been; an average over all visits makes it a 30th.
    assert found[-1] > 0.95
    assert 1 / np.sqrt((100 * 100.0**2 + 900) / 1000) < 1 / 30


@pytest.mark.parametrize("steps_between", [1.0, 20.0])
def test_the_first_visit_moves_a_row_by_a_step_whatever_its_gradient(steps_between):
    size = np.array([1e-3, 1.0, 1e6])
    with jax.enable_x64():
        steps, _ = moved(np.stack([size, -size])[:, None], steps_between)
    wanted = np.sqrt(steps_between) / (1 + 1e-8 / size)
    np.testing.assert_allclose(steps[0, 0], wanted, rtol=1e-12)


@pytest.mark.parametrize("steps_between", [1.0, 1e4])
def test_rows_that_are_seldom_moved_never_jump(steps_between):
    random = np.random.default_rng(3)
    normal = random.normal(size=(200, 1000))
    # The worst that there is: nothing for long, and then something.
    sudden = np.where(np.arange(200)[:, None] == random.integers(200, size=1000), 1e6, 1e-6)
    with jax.enable_x64():
        steps, extreme = (moved(found, steps_between)[0] for found in (normal, sudden))
    # A square counts by one in its window, so that no step is longer than the root of it.
    most = np.sqrt(steps_between * windows(200))[:, None] * (1 + 1e-12)
    assert np.all(np.abs(steps) <= most)
    assert np.all(np.abs(extreme) <= most)
    # Of ordinary gradients no step is longer than any of 200,000 normal numbers.
    assert np.abs(steps).max() < 5.5 * np.sqrt(steps_between)


def test_gradients_of_zero_move_nothing():
    steps, moments = moved(np.zeros((30, 4), np.float32), 20.0)
    np.testing.assert_array_equal(steps, 0)
    np.testing.assert_array_equal(moments.square, 0)


def test_skewed_gradients_of_mean_zero_move_nothing_in_the_long_run(monkeypatch):
    # One in a hundred is large: averaged over few, it would count less than the others.
    values = np.where(np.random.default_rng(4).random((40_000, 10)) < 0.01, 99.0, -1.0)
    skewness = np.mean((values / values.std()) ** 3)

    def mean_and_error():
        with jax.enable_x64():
            means = moved(values)[0][20_000:].mean(0)
        return means.mean(), means.std(ddof=1) / np.sqrt(len(means))

    mean, error = mean_and_error()
    # A gradient is a part of the average that it is divided by: to first order of the window
    # that leaves so little.
    assert abs(mean + skewness / 2 / 1000) < 4 * error
    assert error < 0.005
    few(monkeypatch, 10)
    assert mean_and_error()[0] < -0.3


@pytest.mark.parametrize("event_shape", [(2, 3), (1, 1, 2), (0,)])
def test_rows_may_be_of_any_shape(event_shape):
    random = np.random.default_rng(5)
    mean, square, gradient = random.uniform(1, 2, size=(3, 4, *event_shape))
    # Rows that have been visited more or less often.
    visits = np.array([0, 3, 40, 7000], np.int32)
    update = jax.jit(lambda gradient, moments: row_adam.update(gradient, moments, 5.0))
    with jax.enable_x64():
        moments = row_adam.Moments(*map(jnp.asarray, (mean, square, visits)))
        step, after = update(jnp.asarray(gradient), moments)
        assert step.shape == after.mean.shape == after.square.shape == (4, *event_shape)
        np.testing.assert_array_equal(after.visits, visits + 1)
        # Every number moves as it would alone.
        visits = np.repeat(visits, math.prod(event_shape))
        alone = row_adam.Moments(*map(jnp.asarray, (mean.ravel(), square.ravel(), visits)))
        wanted, then = update(jnp.asarray(gradient.ravel()), alone)
    np.testing.assert_allclose(np.ravel(step), wanted, rtol=1e-14)
    np.testing.assert_allclose(np.ravel(after.mean), then.mean, rtol=1e-14)
    np.testing.assert_allclose(np.ravel(after.square), then.square, rtol=1e-14)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_keep_their_type(dtype):
    def twice(table):
        _, moments = row_adam.update(table, row_adam.init(table), 203 / 40)
        return row_adam.update(table, moments, 203 / 40)

    with jax.enable_x64(), jax.numpy_dtype_promotion("strict"):
        step, moments = jax.eval_shape(twice, jax.ShapeDtypeStruct((4, 2), dtype))
    assert step.dtype == moments.mean.dtype == moments.square.dtype == dtype
    assert moments.visits.dtype == np.int32


class Quadratic:
    """Stands for a guide; the ELBO of a point falls with the square of its distance."""

    def __init__(self):
        self.programs = Programs()
        self.local_proposal = SimpleNamespace(tables=lambda plate: ("loc", "scale"))

    def first_state(self, num_points):
        zeros, count = jnp.zeros(num_points), jnp.int32(0)
        state = dict.fromkeys(("value", "memory", "drift", "power"), zeros)
        state |= {"moments": jnp.zeros((4, num_points)), "acceptance": jnp.ones(())}
        return state | {"num_proposals": count, "num_dropped": count}

    def objective(self, plate, reject, axis, rng_key, params, points, arguments):
        (x,), _ = arguments
        share = points.num_points / len(x)
        distance = params["loc"] - x + params["shared"]
        spread = params["scale"][:, 0] - x[:, None]
        return -0.5 * share * (jnp.sum(distance**2) + jnp.sum(spread**2)), None


NUM_POINTS, BATCH = 20, 4


def training(x):
    """A trainer, and a state in which all rows have been visited."""
    data = Batches(((x,), {}), (0,), NUM_POINTS, BATCH, (1, 2))
    random = np.random.default_rng(7)
    shapes = {"loc": (NUM_POINTS,), "scale": (NUM_POINTS, 1, 2), "shared": ()}
    values = {name: jnp.asarray(random.normal(size=shape)) for name, shape in shapes.items()}
    transforms = dict.fromkeys(shapes, IdentityTransform())
    trainer = Trainer(Quadratic(), None, transforms, data, 0.1)
    state = trainer.first_state(values)
    rows = {
        name: row_adam.Moments(0.3 * values[name], values[name] ** 2, 1 + jnp.arange(NUM_POINTS))
        for name in ("loc", "scale")
    }
    state = state._replace(opt_state=state.opt_state._replace(rows=rows))
    return trainer, jax.tree.map(jnp.copy, state)


def own_rows(state):
    """Everything that has one row per data point."""
    return jax.tree.leaves(
        ({name: state.trainable[name] for name in ("loc", "scale")}, state.opt_state.rows)
    )


def test_a_step_moves_the_rows_of_its_batch_and_leaves_all_bits_of_the_others():
    x = np.random.default_rng(8).normal(size=NUM_POINTS).astype(np.float32)
    trainer, state = training(x)
    assert trainer.steps_between == 5
    old = jax.tree.map(np.asarray, state)
    index = trainer.data.indices(0, 3)
    others = np.setdiff1d(np.arange(NUM_POINTS), index)
    assert len(others) == NUM_POINTS - 3 * BATCH
    state, info = trainer.run_chunk("training", jax.random.key(0), state, 0, 3, 10**6)
    assert not np.any(info.skipped)
    for before, after in zip(own_rows(old), own_rows(state), strict=True):
        after = np.asarray(after)
        np.testing.assert_array_equal(after[others], before[others])
        assert np.all(after[index.ravel()] != before[index.ravel()])
    for moments in state.opt_state.rows.values():
        visits = 1 + np.arange(NUM_POINTS) + np.bincount(index.ravel(), minlength=NUM_POINTS)
        np.testing.assert_array_equal(moments.visits, visits)
    # The first batch, by hand: its gradient per data point of all is that of its share.
    first = index[0]
    distance = old.trainable["loc"][first] - x[first] + old.trainable["shared"]
    before = jax.tree.map(lambda leaf: leaf[first], old.opt_state.rows["loc"])
    step, moments = row_adam.update(jnp.asarray(distance / BATCH), before, 5.0)
    wanted = old.trainable["loc"][first] - 0.1 * np.asarray(step)
    # To a few units in the last place of numbers of size 1, as compiled sums are ordered anew.
    close = {"rtol": 0, "atol": 1e-6}
    np.testing.assert_allclose(state.trainable["loc"][first], wanted, **close)
    np.testing.assert_allclose(state.opt_state.rows["loc"].mean[first], moments.mean, **close)


def test_a_step_without_a_finite_gradient_leaves_all_bits():
    x = np.ones(NUM_POINTS, np.float32)
    trainer, state = training(x)
    # Of one point of the second batch.
    x[trainer.data.indices(1, 1)[0, 2]] = np.inf
    first, info = trainer.run_chunk("training", jax.random.key(0), state, 0, 1, 10**6)
    assert not info.skipped[0]
    second, info = trainer.run_chunk("training", jax.random.key(0), first, 1, 1, 10**6)
    assert info.skipped[0]
    for before, after in zip(jax.tree.leaves(first[:2]), jax.tree.leaves(second[:2]), strict=True):
        np.testing.assert_array_equal(before, after)
