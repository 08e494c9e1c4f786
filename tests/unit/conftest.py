"""Settings of the unit tests. No test here has a time limit: a busy machine is not a defect."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("unit", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unit")
