from __future__ import annotations

from dataclasses import replace

from gpuprof.estimators.learned.evaluation import ROOFLINE, UNSEEN, Prediction
from gpuprof.pipeline.evaluate import draw_predictions


def test_a_plot_has_a_point_for_each_prediction_of_its_panel() -> None:
    shown = [Prediction(UNSEEN, "latency", "stack", f"net<{i}>", 1, 1.0 + i, 2.0) for i in range(3)]
    (chart,) = draw_predictions([*shown, replace(shown[0], predictor=ROOFLINE)])
    assert [(points.x, points.y) for points in chart.points] == [((1.0 + i,), (2.0,)) for i in range(3)]
    assert "net<0> batch 1: measured 1, predicted 2 ms" in chart.points[0].tips[0]
