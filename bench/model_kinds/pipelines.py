"""Pipelines of scikit-learn, XGBoost and LightGBM, fitted to random data and written by their converters."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from bench.model_kinds import Kind

_ROWS = 200


def _data() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    x = random.standard_normal((_ROWS, 4)).astype(np.float32)
    return x, (x[:, 0] + x[:, 1] > 0).astype(int) + (x[:, 2] > 1)


def _write(pipeline: Any, path: Path, inputs: list[tuple[str, Any]], **options: Any) -> None:
    from skl2onnx import convert_sklearn

    path.write_bytes(convert_sklearn(pipeline, initial_types=inputs, **options).SerializeToString())


def _logistic(path: Path) -> None:
    from skl2onnx.common.data_types import FloatTensorType
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    pipeline = make_pipeline(StandardScaler(), LogisticRegression()).fit(*_data())
    _write(pipeline, path, [("x", FloatTensorType([None, 4]))])


def _forest(path: Path) -> None:
    from skl2onnx.common.data_types import FloatTensorType
    from sklearn.ensemble import RandomForestClassifier

    forest = RandomForestClassifier(50, random_state=0).fit(*_data())
    _write(forest, path, [("x", FloatTensorType([None, 4]))], options={"zipmap": False})


def _xgboost(path: Path) -> None:
    from onnxmltools.convert import convert_xgboost
    from onnxmltools.convert.common.data_types import FloatTensorType
    from xgboost import XGBClassifier

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = convert_xgboost(
            XGBClassifier(n_estimators=50).fit(*_data()), initial_types=[("x", FloatTensorType([None, 4]))]
        )
    path.write_bytes(model.SerializeToString())


def _lightgbm(path: Path) -> None:
    from lightgbm import LGBMClassifier
    from onnxmltools.convert import convert_lightgbm
    from onnxmltools.convert.common.data_types import FloatTensorType

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trees = LGBMClassifier(n_estimators=50, verbose=-1).fit(*_data())
        model = convert_lightgbm(trees, initial_types=[("x", FloatTensorType([None, 4]))], zipmap=False)
    path.write_bytes(model.SerializeToString())


def _texts(path: Path) -> None:
    from skl2onnx.common.data_types import StringTensorType
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    texts = ["good film", "bad film", "very good", "very bad"] * 10
    pipeline = make_pipeline(TfidfVectorizer(lowercase=False), LogisticRegression()).fit(texts, [1, 0, 1, 0] * 10)
    _write(pipeline, path, [("text", StringTensorType([None, 1]))], options={"zipmap": False})


def _columns(path: Path) -> None:
    import pandas as pd
    from skl2onnx.common.data_types import FloatTensorType, StringTensorType
    from sklearn.compose import ColumnTransformer
    from sklearn.ensemble import GradientBoostingClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    table = pd.DataFrame({"age": np.arange(60, dtype=np.float32), "city": ["oslo", "rome", "lima"] * 20})
    columns = ColumnTransformer(
        [("number", StandardScaler(), ["age"]), ("text", OneHotEncoder(handle_unknown="ignore"), ["city"])]
    )
    pipeline = make_pipeline(columns, GradientBoostingClassifier(n_estimators=10)).fit(table, [0, 1, 1] * 20)
    inputs = [("age", FloatTensorType([None, 1])), ("city", StringTensorType([None, 1]))]
    _write(pipeline, path, inputs, options={"zipmap": False})


PIPELINES = (
    Kind("scikit-learn, scores as maps", _logistic),
    Kind("scikit-learn, random forest", _forest),
    Kind("XGBoost", _xgboost),
    Kind("LightGBM", _lightgbm),
    Kind("scikit-learn, texts", _texts),
    Kind("scikit-learn, numbers and texts", _columns),
)
