"""The chaos suite: faults in the middle of streams, and the proof that callers do not notice them.

    python -m tests.chaos --help          make chaos [SEED=1] [KILLS=1000] [SCENARIO=kill] [ENGINE=scripted]

A real Spillway runs as processes: gateways, a ledger writer, nats-server, workers. A seeded mix of requests is answered
once undisturbed: that is the oracle. Then the same requests run in a closed loop while a seeded schedule of faults
strikes, and every answer is compared with the undisturbed one, word by word.

    promise (shared by all scenarios)              figure that must be 0
    ─────────────────────────────────────────      ─────────────────────────────────────
    accepted means answered                        errors
    no token is lost in a rescue                   lost           (words and log-probabilities)
    none is sent twice                             repeated
    text, finish reason, log-probabilities and     changed
    usage are those of the undisturbed answer
    one ledger row for each accepted request       |ledger_rows - accepted|
    with the undisturbed answer's tokens           double_billed  (rows with more tokens, rows of nobody)
    nothing goes on running for nobody             orphans        (sequences still held 15 s after the last answer)

Beside inference servers there is more to an answer: where makes of engine agree undisturbed, a disturbed answer must be
exactly that one; where they do not, it begins with what they have in common and has as many tokens. Either way it is
the text of the tokens that its attempts have made, each of them once, as the bus tells. What a server does wrong must
end as its caller would wish: in the answer, or in the caller's own error at once.

A *gap* is what one caller sees of one fault: from the fault to the arrival of the first token that the next worker
made. Where the fault struck no single worker (the queue server, a gateway), it is the longest pause of each open stream
that overlaps the fault.

    __main__.py   the command              scenarios.py  which faults, how many workers, what is promised
    run.py        one run of a scenario    faults.py     every fault, one function each    strikes.py  what one is
    system.py     the processes            workers.py    worker processes, forked fast
    servers.py    inference servers        server_faults.py, upstream_faults.py  what goes wrong there
    agreement.py  what each make answers   handovers.py  answers held to the tokens that were made for them
    vllm_forks.py real vLLM, started fast
    load.py       the closed loop          client.py     one HTTP exchange      mix.py    what is asked
    watcher.py    who runs which request   oracle.py     answers compared       ledger.py rows counted
    plays.py      tool calls and JSON    played_answers.py, rescues.py  their answers, and what was hit in them
    report.py     figures and verdict      load_scenarios/  spikes, shares, tiers, callers who hang up
    hosts/        the compose installation, whose containers are lost as hosts are
"""
