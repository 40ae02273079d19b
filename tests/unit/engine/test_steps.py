"""Continuous batching shown by step count, on a stepped engine: no clock, no thread."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.embedded.options import BLOCK_SIZE
from tests.contract.reference import Reference
from tests.unit.engine.conftest import Driver, Files, make_driver

PROMPT = list(range(5, 55))
Drive = Callable[..., Driver]


def assert_reference(driver: Driver, reference: Reference, name: str, model: str, prompt: list[int]) -> None:
    tokens = driver.tokens(name)
    expected = reference.logprobs(model, prompt, [token.id for token in tokens])
    assert [token.logprob for token in tokens] == pytest.approx(expected, abs=1e-4)


def test_a_request_that_arrives_mid_generation_has_its_first_token_at_the_next_step(drive: Drive) -> None:
    driver = drive()
    running = driver.add(PROMPT, max_tokens=20)
    for _ in range(5):
        driver.step()
    late = driver.add(list(reversed(PROMPT)), max_tokens=3)
    driver.run()
    assert driver.step_of_first_token(late) == 5
    assert driver.step_of_end(late) == 7
    assert driver.step_of_end(running) == 19
    assert driver.engine.counts.steps == 20
    """Not one more pass than the longest request needs: they ran in the same ones."""


def test_two_adapters_and_the_base_decode_in_one_pass(drive: Drive, reference: Reference) -> None:
    driver = drive()
    names = {model: driver.add(PROMPT, model, max_tokens=6) for model in ("one", "base", "two")}
    driver.run()
    assert driver.engine.counts.steps == 6
    assert driver.engine.counts.mixed_adapter_steps == 6
    for model, name in names.items():
        assert_reference(driver, reference, name, model, PROMPT)


def test_a_long_prompt_does_not_hold_up_those_that_run_or_arrive(drive: Drive, reference: Reference) -> None:
    driver = drive(max_num_batched_tokens=32)
    running = driver.add(PROMPT[:4], max_tokens=20)
    driver.step()
    prompt = [*range(100, 300)]
    long = driver.add(prompt, max_tokens=2)
    driver.step()
    late = driver.add(PROMPT[:5], max_tokens=1)
    driver.run()
    assert all(running in step for step in driver.steps[:20])
    assert driver.step_of_first_token(late) == 2
    assert driver.step_of_first_token(long) == 13
    """200 tokens, at most 16 of them a pass, in one of them 15: passes 1 to 13."""
    assert_reference(driver, reference, long, "base", prompt)


def test_long_prompts_leave_room_for_those_that_arrive(drive: Drive, reference: Reference) -> None:
    """By hand, of 32 tokens: pass 0 is 16 of each long prompt, 1 is 10 and 11 of them and 11 of the newcomer, 2 its
    last 9 tokens, and it decodes in 3 and 4; the one of 5 tokens finds room in pass 4."""
    driver = drive(max_num_batched_tokens=32)
    prompts = [[*range(100, 300)], [*range(300, 100, -1)]]
    long = [driver.add(prompt, max_tokens=2) for prompt in prompts]
    driver.step()
    late = driver.add(PROMPT[:20], max_tokens=3)
    for _ in range(3):
        driver.step()
    later = driver.add(PROMPT[30:35], max_tokens=3)
    driver.run()
    assert [driver.step_of_first_token(late), driver.step_of_end(late)] == [2, 4]
    assert [driver.step_of_first_token(later), driver.step_of_end(later)] == [4, 6]
    assert all(driver.step_of_first_token(name) > 6 for name in long)
    assert driver.engine.counts.computed_tokens == 2 * 200 + 20 + 5 + 2 + 4
    for name, prompt in zip(long, prompts, strict=True):
        assert_reference(driver, reference, name, "base", prompt)


def test_a_known_prefix_is_not_computed_again_and_belongs_to_its_adapter(drive: Drive, reference: Reference) -> None:
    driver = drive()
    driver.add(PROMPT, "one", max_tokens=1)
    driver.step()
    assert driver.engine.counts.computed_tokens == 50
    prompt = [*PROMPT[:40], 9, 9]
    same = driver.add(prompt, "one", max_tokens=1)
    driver.step()
    assert driver.engine.counts.computed_tokens == 50 + 42 - 2 * BLOCK_SIZE
    other = driver.add(prompt, "two", max_tokens=1)
    driver.step()
    assert driver.engine.counts.computed_tokens == 50 + 42 - 2 * BLOCK_SIZE + 42
    assert_reference(driver, reference, same, "one", prompt)
    assert_reference(driver, reference, other, "two", prompt)


def test_a_fully_known_prompt_still_computes_its_last_block(drive: Drive, reference: Reference) -> None:
    driver = drive()
    names = []
    for _ in range(2):
        names.append(driver.add(PROMPT[:48], max_tokens=2))
        driver.run()
    assert driver.engine.counts.computed_tokens == 48 + 1 + BLOCK_SIZE + 1
    for name in names:
        assert_reference(driver, reference, name, "base", PROMPT[:48])


def test_requests_of_one_pass_share_the_prefix_that_it_computes(drive: Drive, reference: Reference) -> None:
    driver = drive()
    prompts = [[*PROMPT[:48], last] for last in range(60, 68)]
    names = [driver.add(prompt, "two", max_tokens=2) for prompt in prompts]
    driver.step()
    assert driver.engine.counts.computed_tokens == 49 + 7
    driver.run()
    for name, prompt in zip(names, prompts, strict=True):
        assert_reference(driver, reference, name, "two", prompt)


def test_an_adapter_loaded_again_under_the_same_name_and_path_shares_no_kv(drive: Drive) -> None:
    driver = drive()
    driver.add(PROMPT, "one", max_tokens=1)
    driver.step()
    path = driver.engine.adapters.served()["one"]
    assert driver.engine.adapters.unload("one")
    driver.engine.adapters.load("one", path)
    driver.add(PROMPT, "one", max_tokens=1)
    driver.step()
    assert driver.engine.counts.computed_tokens == 100


def test_the_kv_budget_holds_and_preempted_requests_give_the_same_tokens(drive: Drive, reference: Reference) -> None:
    prompts = [[seed, *PROMPT[:20]] for seed in range(60, 66)]
    roomy, tight = drive(), drive(kv_tokens=8 * BLOCK_SIZE)
    results = []
    for driver in (roomy, tight):
        names = [driver.add(p, "one", max_tokens=60, seed=i) for i, p in enumerate(prompts)]
        while driver.engine.busy:
            driver.step()
            held = {b for s in driver.engine.scheduler.running for b in s.blocks}
            assert len(held) + driver.engine.scheduler.blocks.free == driver.engine.options.num_blocks
        results.append([[token.id for token in driver.tokens(name)] for name in names])
        assert_reference(driver, reference, names[-1], "one", prompts[-1])
    assert tight.engine.scheduler.preemptions > 0
    assert roomy.engine.scheduler.preemptions == 0
    assert results[0] == results[1]


def test_max_loras_bounds_the_adapters_of_a_pass(drive: Drive) -> None:
    driver = drive(max_loras=1)
    names = [driver.add(PROMPT[:9], model, max_tokens=4) for model in ("one", "two", "one", "base")]
    driver.run()
    assert [driver.finish(name) for name in names] == ["length"] * 4
    assert all(not {names[0], names[1]} <= set(step) for step in driver.steps)


def test_unloading_ends_what_waits_and_lets_finish_what_runs(drive: Drive) -> None:
    driver = drive(max_num_seqs=1)
    running, waiting = (driver.add(PROMPT, "one", max_tokens=5) for _ in range(2))
    driver.step()
    assert driver.engine.adapters.unload("one")
    driver.run()
    assert (driver.finish(running), len(driver.tokens(running))) == ("length", 5)
    assert (driver.finish(waiting), driver.tokens(waiting)) == ("missing", [])


def test_a_request_aborted_in_the_middle_of_its_prompt_leaves_nothing_behind(drive: Drive) -> None:
    driver = drive(max_num_batched_tokens=32)
    name = driver.add([*range(100, 300)], max_tokens=5)
    driver.step()
    aborted = driver.engine.abort(name)
    assert aborted is not None
    assert aborted.finish_reason == "abort"
    assert driver.engine.abort(name) is None
    assert not driver.engine.busy
    assert driver.engine.scheduler.blocks.free == driver.engine.options.num_blocks


@pytest.fixture(scope="module")
def small(files: Files) -> Driver:
    return make_driver(files, kv_tokens=16 * BLOCK_SIZE, max_num_batched_tokens=48, max_num_seqs=6, max_loras=2)


REQUEST = st.tuples(
    st.sampled_from(["base", "one", "two"]),
    st.integers(1, 120),
    st.integers(1, 30),
    st.booleans(),
)


@settings(max_examples=25, deadline=None)
@given(plan=st.lists(st.tuples(REQUEST, st.integers(0, 4)), min_size=1, max_size=12))
def test_any_traffic_ends_within_the_budget_with_the_right_numbers(
    small: Driver, reference: Reference, plan: list[tuple[tuple[str, int, int, bool], int]]
) -> None:
    driver = small
    driver.steps.clear()
    requests = []
    for (model, length, max_tokens, aborted), steps in plan:
        prompt = [5 + i % 90 for i in range(length)]
        name = driver.add(prompt, model, max_tokens=max_tokens, seed=length)
        requests.append((name, model, prompt, aborted))
        for _ in range(steps):
            driver.step()
        if aborted:
            driver.engine.abort(name)
    driver.run()
    assert driver.engine.scheduler.blocks.free == driver.engine.options.num_blocks
    for name, model, prompt, aborted in requests:
        assert aborted or driver.finish(name) == "length"
        if driver.tokens(name):
            assert_reference(driver, reference, name, model, prompt)
