"""The contract of collectors, as tests: subclass `CollectorContract` under pytest and implement its factory methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from gpuprof.kernel_db.schema import KernelRow, ModelRow, OpRow, to_arrow
from gpuprof.profiling.collector import Collected, Collector
from gpuprof.profiling.worker.job import Request

#: Results, shared by all tests: pytest creates an object of the class for each test.
_COLLECTED: dict[type, Collected] = {}


class CollectorContract(ABC):
    """Tests for every collector; pytest runs them for each subclass whose name begins with ``Test``."""

    @abstractmethod
    def make_collector(self) -> Collector:
        """Return the collector under test, which must be available."""

    @abstractmethod
    def make_request(self) -> Request:
        """Return a request for a small model, measurable in seconds."""

    def collect_distinct(self) -> Collected:
        """Return the collector's results for the request, measured once for all tests of the class."""
        if type(self) not in _COLLECTED:
            _COLLECTED[type(self)] = self.make_collector().collect(self.make_request())
        return _COLLECTED[type(self)]

    def test_it_says_who_it_is(self) -> None:
        """Name, kinds, version and runtime are recorded in every run."""
        collector = self.make_collector()
        assert collector.name and collector.version()
        assert set(collector.kinds) <= {"cpu", "gpu"} and collector.kinds
        assert all(collector.runtime())

    def test_it_is_available_or_says_why_not_in_one_line(self) -> None:
        """A reason is a single line, never an exception."""
        reason = self.make_collector().available()
        assert reason is None or (reason and "\n" not in reason)

    def test_every_row_hangs_on_the_request(self) -> None:
        """Rows carry the run's id, the device, the model and the batch of the request."""
        request = self.make_request()
        for row in self._rows():
            assert row.run_id == request.run_id
            assert row.device == request.device.name
            assert (row.model, row.batch) == (request.job.graph.name, request.job.graph.batch)

    def test_rows_fit_the_schema(self) -> None:
        """Every row can be stored."""
        collected = self.collect_distinct()
        for table in ("models", "ops", "kernels", "colocations"):
            assert to_arrow(table, getattr(collected, table)).num_rows == len(getattr(collected, table))

    def test_what_was_not_measured_is_null_and_times_are_positive(self) -> None:
        """Zero means measured as zero: no batch or kernel takes zero time."""
        for model in self.collect_distinct().models:
            assert model.error or model.latency_mean_ms is None or model.latency_mean_ms > 0
            assert model.memory_peak_bytes is None or model.memory_peak_bytes > 0
        for kernel in self.collect_distinct().kernels:
            assert kernel.duration_ns is None or kernel.duration_ns >= 0

    def test_ops_are_the_models_in_their_order(self) -> None:
        """Positions, names and signatures are those of the graph."""
        ops = self.make_request().job.graph.ops
        for row in self.collect_distinct().ops:
            assert (row.name, row.signature) == (ops[row.position].name, ops[row.position].signature)

    def test_kernels_are_tied_to_ops_of_the_model_or_to_none(self) -> None:
        """Kernels are tied to ops of the graph only."""
        signatures = {op.signature for op in self.make_request().job.graph.ops}
        assert {row.op_signature for row in self.collect_distinct().kernels} <= {*signatures, None}

    def _rows(self) -> Sequence[ModelRow | OpRow | KernelRow]:
        collected = self.collect_distinct()
        return (*collected.models, *collected.ops, *collected.kernels)
