"""Chance in the tests: a command that looks for it, and the second look that `make test` takes at a failure.

``python -m tests.flakes`` repeats tests under load and counts failures. Its processes run pytest with
`tests.flakes.record`, which shuffles the tests and writes down each outcome. `make test` runs pytest with
`tests.flakes.confirm`, which repeats what failed once, alone.
"""
