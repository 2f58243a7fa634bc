from bench.extrapolation import learn_slack, leave_ends_out, predict_left_out
from gpuprof.domain.catalogue import device
from gpuprof.domain.share import Share
from gpuprof.estimators.measured.measured import Point


def law(each_ms: float) -> list[Point]:
    return [
        Point(batch, Share(share), 1, (5.0 + each_ms * batch) * 100.0 / share, 0.0, 0.0, 1.0, 0.0, {})
        for batch in (1, 2, 4, 8)
        for share in (50.0, 100.0)
    ]


def test_what_is_left_out_is_beyond_what_is_kept() -> None:
    left_out_rows = list(leave_ends_out(law(1.0), device("v100")))
    assert {axis for axis, *_ in left_out_rows} == {
        "larger batches",
        "smaller batches",
        "larger shares",
        "smaller shares",
    }
    larger = [left_out for axis, _, left_out in left_out_rows if axis == "larger batches"]
    assert [sorted({point.batch for point in points}) for points in larger] == [[2, 4, 8], [4, 8], [8]]


def test_times_that_obey_the_bounds_need_no_slack_and_others_as_much_as_they_are_beyond() -> None:
    published = {("test", name, "v100"): law(each) for name, each in (("a", 0.1), ("b", 1.0), ("c", 10.0))}
    assert learn_slack(predict_left_out(published)) == 1.0
    worse = [
        Point(8, Share(), 1, 80.0 * 1.5, 0.0, 0.0, 1.0, 0.0, {}),
        Point(1, Share(), 1, 10.0, 0.0, 0.0, 1.0, 0.0, {}),
    ]
    rows = predict_left_out({("test", "worse", "v100"): worse})
    assert max(row.outside for row in rows) == 1.5
