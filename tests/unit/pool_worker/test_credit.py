"""The arithmetic of what fits, and of how much to pull."""

from hypothesis import given
from hypothesis import strategies as st

from pool_worker.credit import Cost, Credit, reserve_of
from pool_worker.engines.base import Capacity
from protocol.job import PROTOCOL_VERSION, Job, ResumePoint, Sampling, pack_token_ids

capacities = st.builds(Capacity, st.integers(1, 64), st.integers(1, 5000), st.integers(1, 2000))
sizes = st.tuples(st.integers(1, 12), st.integers(1, 300), st.integers(1, 300))  # n, prompt tokens, max_tokens


def job(n: int = 1, prompt_tokens: int = 10, max_tokens: int = 5, resume: tuple[ResumePoint, ...] = ()) -> Job:
    prompt_ids = pack_token_ids(range(prompt_tokens))
    sampling = Sampling(max_tokens=max_tokens, n=n)
    return Job(PROTOCOL_VERSION, "r", 1, "m", "fr.g", sampling, prompt_ids, resume=resume)


def test_a_job_costs_prompt_and_output_for_every_choice() -> None:
    credit = Credit(Capacity(64, 5000, 2000))
    assert credit.cost_of(job(n=3, prompt_tokens=10, max_tokens=5)) == Cost(3, 45)


def test_complete_choices_cost_nothing() -> None:
    credit = Credit(Capacity(64, 5000, 2000))
    resume = (ResumePoint(0, b"", 0, "stop"), ResumePoint(1, b"", 0))
    assert credit.cost_of(job(n=3, prompt_tokens=10, max_tokens=5, resume=resume)) == Cost(2, 30)


def test_a_prompt_by_reference_costs_what_the_gateway_counted() -> None:
    credit = Credit(Capacity(64, 5000, 2000))
    sampling = Sampling(max_tokens=5)
    by_reference = Job(PROTOCOL_VERSION, "r", 1, "m", "fr.g", sampling, b"", prompt_object="p", prompt_tokens=700)
    assert credit.cost_of(by_reference) == Cost(1, 705)


@given(capacities, st.lists(sizes, max_size=100), st.randoms())
def test_credit_is_never_overdrawn_and_is_fully_returned(capacity, jobs, chance) -> None:
    credit = Credit(capacity)
    taken: list[Cost] = []
    for n, prompt_tokens, max_tokens in jobs:
        cost = credit.cost_of(job(n, prompt_tokens, max_tokens))
        credit.note(cost)
        while not credit.fits(cost):  # an empty engine has room for any job
            credit.give_back(taken.pop(chance.randrange(len(taken))))
        credit.take(cost)
        taken.append(cost)
        assert credit.free_sequences >= 0
        assert credit.free_kv_tokens >= 0
    for cost in taken:
        credit.give_back(cost)
    assert (credit.free_sequences, credit.free_kv_tokens) == (capacity.max_sequences, capacity.max_kv_tokens)


@given(capacities, st.lists(sizes, min_size=1, max_size=64))
def test_pulled_jobs_fit_if_they_resemble_recent_ones(capacity, jobs) -> None:
    credit = Credit(capacity)
    costs = [credit.cost_of(job(*size)) for size in jobs]
    for cost in costs:
        credit.note(cost)
    for cost in costs[::-1]:
        asked = credit.jobs_to_pull()
        assert asked <= credit.free_sequences
        largest = Cost(max(c.sequences for c in costs), max(c.kv_tokens for c in costs))
        sure = asked - 1
        assert sure * largest.sequences <= credit.free_sequences
        assert sure * largest.kv_tokens <= credit.free_kv_tokens
        if credit.fits(cost):
            credit.take(cost)


@given(capacities, sizes, st.floats(0, 0.99))
def test_batch_jobs_leave_the_reserve_free_unless_the_engine_is_idle(capacity, size, share) -> None:
    credit = Credit(capacity, share)
    reserve = reserve_of(capacity, share)
    cost = credit.cost_of(job(*size))
    assert credit.jobs_to_pull(is_batch=True) >= 1
    assert credit.fits(cost, is_batch=True)  # of any size
    one = Cost(1, 1)
    credit.take(one)
    while credit.fits(one, is_batch=True):
        credit.take(one)
    left = Cost(credit.free_sequences, credit.free_kv_tokens)
    assert left.sequences == reserve.sequences or left.kv_tokens <= reserve.kv_tokens
    assert left.sequences >= reserve.sequences
    assert credit.jobs_to_pull(is_batch=True) == 0 or left.sequences > reserve.sequences


def test_the_reserve_is_at_least_one_sequence_where_there_are_two() -> None:
    assert reserve_of(Capacity(1, 1000, 100), 0.5) == Cost(0, 0)
    assert reserve_of(Capacity(2, 1000, 100), 0.1) == Cost(1, 100)
    assert reserve_of(Capacity(64, 1000, 100), 0.1) == Cost(6, 100)
    assert reserve_of(Capacity(64, 1000, 100), 0.0) == Cost(0, 0)


def test_an_empty_engine_always_pulls_and_a_full_one_never_does() -> None:
    capacity = Capacity(4, 100, 100)
    credit = Credit(capacity)
    for cost in (Cost(4, 100), Cost(1, 2)):
        credit.note(cost)
        assert credit.jobs_to_pull() >= 1
    credit.take(Cost(1, 99))
    assert credit.jobs_to_pull() == 0  # one token is free, and no recent job was that small
    credit.give_back(Cost(1, 99))
    credit.take(Cost(4, 4))
    assert credit.jobs_to_pull() == 0
