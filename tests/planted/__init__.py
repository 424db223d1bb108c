"""``make planted``: plant a mistake that breaks a promise, one at a time, and see which tests notice.

The mistakes are in ``faults.toml``, sixty of them. Each is planted in a copy of the tree. Tests run in the order that
finds it soonest, and stop at the first failure:

named               the test that ``faults.toml`` names
unit                its package's unit tests, as ``make unit`` runs them
other-unit          the gateway's other unit tests
simulate            ``python -m tests.simulation`` with some seeds; batches and responses are not simulated
integration         the integration tests near by, as the fault says
other-integration   the other integration tests of its part of the gateway

A failure counts if the test passes without the fault; one of an integration test if it fails again alone, too.
"""
