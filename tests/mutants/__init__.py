"""``make mutants``: change the product in small ways, one at a time, and see whether a test fails.

cosmic-ray says what can be changed (a mutant: one operator at one place of one file) and changes it. Of each package a
sample is drawn by a seed. Each mutant is put into a copy of the tree and judged by the tests that execute the changed
statement, known from one run of the package's tests under coverage: first the unit tests, then, if it is still alive,
the others.

killed    a test failed
timeout   the tests did not end
survived  all of them passed: something that the product does and no test looks at, or a change that changes nothing
broken    the changed module cannot be imported, so that no test ran: counted as neither
ended     pytest ended without a word: counted as neither, and judged again by the next run
"""
