"""Money and steps are whole numbers."""

from hypothesis import given
from hypothesis import strategies as st

from apps.estimates.quote import cost_nano, step_count


@given(
    price=st.integers(0, 10**13), more=st.integers(0, 10**12), seconds=st.integers(0, 10**8), per=st.integers(1, 86_400)
)
def test_cost_is_an_integer_rounded_half_up_and_rises_with_price_and_time(price, more, seconds, per):
    cost = cost_nano(price_nano=price, price_per_seconds=per, seconds=seconds)

    assert isinstance(cost, int)
    assert abs(2 * (cost * per - price * seconds)) <= per
    assert cost <= cost_nano(price_nano=price + more, price_per_seconds=per, seconds=seconds)
    assert cost <= cost_nano(price_nano=price, price_per_seconds=per, seconds=seconds + 1)


def test_cost_rounds_half_up():
    assert [cost_nano(price_nano=1, price_per_seconds=2, seconds=seconds) for seconds in (0, 1, 2, 3)] == [0, 1, 1, 2]


@given(rows=st.integers(1, 10**6), batch_size=st.integers(1, 512), epochs=st.integers(1, 20))
def test_every_row_is_in_one_step_of_each_epoch(rows, batch_size, epochs):
    steps = step_count(rows=rows, batch_size=batch_size, epochs=epochs)

    assert (steps // epochs - 1) * batch_size < rows <= steps // epochs * batch_size
