from __future__ import annotations

import pytest

from gpuprof.rules.batching import batch_size_now, needs_padding, wait_limit_ms


@pytest.mark.parametrize(
    ("waiting", "oldest_wait_ms", "taken"), [(0, 0.0, 0), (3, 1.9, 0), (3, 2.0, 3), (4, 0.0, 4), (9, 0.0, 4)]
)
def test_a_full_batch_goes_at_once_and_a_part_of_one_after_the_longest_wait(
    waiting: int, oldest_wait_ms: float, taken: int
) -> None:
    assert batch_size_now(waiting, 4, oldest_wait_ms, 2.0) == taken


def test_without_a_wait_whatever_is_there_goes() -> None:
    assert batch_size_now(1, 8, 0.0, 0.0) == 1


def test_a_request_waits_no_longer_than_leaves_time_to_serve_it() -> None:
    assert wait_limit_ms(50.0, 100.0, (10.0, 30.0)) == 50.0
    assert wait_limit_ms(50.0, 60.0, (10.0, 30.0)) == 30.0
    assert wait_limit_ms(50.0, 20.0, (10.0, 30.0)) == 0.0
    assert wait_limit_ms(50.0, 60.0, (10.0, 35.0, 30.0)) == 25.0  # measured, a smaller batch may take longer
    assert wait_limit_ms(5.0, 3.0, ()) == 3.0


@pytest.mark.parametrize("op", ["Conv", "ConvTranspose", "FusedConv", "NhwcConv"])
def test_models_with_convolutions_are_padded(op: str) -> None:
    assert needs_padding({"Relu", op})


def test_models_without_are_not() -> None:
    assert not needs_padding({"MatMul", "Softmax", "LSTM", "ConvInteger"})
    assert not needs_padding(())
