"""What all tests share: how hypothesis behaves on machines that are busy with other things."""

from hypothesis import HealthCheck, settings

# Nothing asserts on wall-clock time, and hypothesis does so unless told otherwise.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")
