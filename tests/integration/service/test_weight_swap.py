"""A policy that trains all weights, through the gateway and on the embedded engine: real swaps under real traffic."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from threading import Event, Semaphore

import openai
import pytest
import torch
from sqlalchemy import update

from app.db.models import Deployment, Interaction, PolicyVersion
from app.db.repositories.policies import lock_policy
from app.db.repositories.versions import NewVersion, append_version
from app.policies.deploy import Deployer
from tests.contract.engines import RunningEngine, start
from tests.contract.reference import WholeModels
from tests.contract.tiny_model import build_base_model, perturbed_model
from tests.integration.service.servers import serving
from tests.integration.service.world import World, found_world

PROBES = [[5, 6, 7, 8, 9 + step] for step in range(4)]
PROMPT = [5, 6, 7, *range(30, 60)]
TOLERANCE = 1e-4


@dataclass
class Served:
    world: World
    engine: RunningEngine
    deployer: Deployer
    models: WholeModels
    paths: dict[int, Path]
    unused: Iterator[int]

    def deploy_next(self) -> int:
        """As a learner and a tick do; the number of what is live then."""
        number = next(self.unused)
        with self.world.database.write() as session:
            policy = lock_policy(session, self.world.policy_id)
            new = NewVersion(f"default-v{number}", str(self.paths[number]), "0" * 64, probe(self.models, number))
            append_version(session, policy.id, new, parent=number - 1, update_id=None)  # type: ignore[arg-type]
            policy.head = number
        self.deployer.tick(wait_s=120)
        return number

    def deployment(self, number: int) -> Deployment:
        with self.world.database.read() as session:
            return session.query(Deployment).join(PolicyVersion).filter(PolicyVersion.number == number).one()

    def assert_reference(self, row: Interaction) -> None:
        """Each token's log-prob is that of the version that is said to have sampled it, on the whole context."""
        assert (row.state, row.reason) == ("completed", None)
        ids, prompt = row.completion_ids.tolist(), row.new_prompt_ids.tolist()
        expected: list[float] = []
        for number, tokens in row.version_runs or [[row.version, len(ids)]]:
            whole = self.models.logprobs(str(number), prompt, ids)
            expected += whole[len(expected) : len(expected) + tokens]
        assert row.logprobs.tolist() == pytest.approx(expected, abs=TOLERANCE)


def probe(models: WholeModels, number: int) -> list[list[list[float]]]:
    rows = [torch.log_softmax(models.logits(str(number), prompt)[-1], -1).topk(20) for prompt in PROBES]
    return [[[int(t), float(v)] for t, v in zip(top.indices, top.values, strict=True)] for top in rows]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("full")
    base = build_base_model(root / "base")
    paths = {0: perturbed_model(base, root / "v0", seed=0, scale=0.0)}
    for number in range(1, 7):
        paths[number] = perturbed_model(paths[number - 1], root / f"v{number}", seed=number, scale=0.03)
    models = WholeModels({str(n): path for n, path in paths.items()})
    world = found_world(root / "home", base)
    world.change_policy(training="full", live=None, probes=PROBES)
    with world.database.write() as session:
        session.execute(update(PolicyVersion).values(path=str(paths[0]), probe=probe(models, 0)))
    with start("embedded", base, root / "engine.log") as engine, serving(world.app) as server:
        world.url = server.url
        deployer = Deployer(world.database, [engine.url])
        deployer.tick(wait_s=120)
        yield Served(world, engine, deployer, models, paths, count(1))
        deployer.close()
    world.database.close()


def test_completions_that_span_a_swap_are_stored_token_for_token(served: Served) -> None:
    client = served.world.openai()
    begun = [Event() for _ in range(8)]

    def read(index: int) -> str:
        stream = client.completions.create(
            model="default", prompt=PROMPT, max_tokens=900, seed=index, stream=True, logprobs=0
        )
        identifier = ""
        for chunk in stream:
            identifier = chunk.id
            begun[index].set()
        return identifier

    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(read, index) for index in range(8)]
        for event in begun:
            assert event.wait(60)
        number = served.deploy_next()
        rows = [served.world.interaction(stream.result(120)) for stream in streams]
    spanning = [row for row in rows if row.version_runs]
    assert spanning, "all of them had ended before the swap"
    for row in rows:
        served.assert_reference(row)
    for row in spanning:
        assert [run[0] for run in row.version_runs] == [number - 1, number]
        assert row.version == number - 1
    deployment = served.deployment(number)
    assert (deployment.state, deployment.verdict) == ("verified", "verified")
    assert deployment.score == pytest.approx(1.0, abs=0.02)
    with served.world.http() as http:
        shown = http.get(f"/v1/rollouts/{spanning[0].rollout_id}").json()["interactions"][0]
        assert [run["version"] for run in shown["version_runs"]] == [number - 1, number]
        assert sum(run["tokens"] for run in shown["version_runs"]) == shown["completion_tokens"]
        listed = http.get("/admin/rollouts?limit=1000").json()["data"]
        (row,) = [each for each in listed if each["id"] == str(spanning[0].rollout_id)]
        assert row["versions"] == [number - 1, number]
        (replica,) = http.get("/admin/replicas").json()["data"]
        assert replica["swap_began_at"] is None
        (deployed,) = [each for each in replica["deployments"] if each["version"] == number]
        assert 0 < deployed["paused_ms"] <= deployed["closed_ms"]


def test_no_request_fails_while_weights_are_swapped(served: Served) -> None:
    """openai's client with max_retries=0, eight at a time, over three swaps."""
    client = served.world.openai()
    stop = Event()
    answered = Semaphore(0)

    def ask_on(index: int) -> list[str]:
        replies = []
        while not stop.is_set():
            reply = client.completions.create(model="default", prompt=PROMPT, max_tokens=8, seed=index)
            replies.append(reply.id)
            answered.release()
        return replies

    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask_on, index) for index in range(8)]
        numbers = []
        for _ in range(3):
            numbers.append(served.deploy_next())
            for _ in range(16):
                assert answered.acquire(timeout=60)
        stop.set()
        identifiers = [identifier for each in asking for identifier in each.result(120)]
    rows = [served.world.interaction(identifier) for identifier in identifiers]
    assert {row.version for row in rows} >= set(numbers)
    for row in rows[:: max(1, len(rows) // 40)] + [row for row in rows if row.version_runs]:
        served.assert_reference(row)


def test_stream_and_whole_reply_agree(served: Served) -> None:
    client = served.world.openai()
    options = {"model": "default", "prompt": PROMPT, "max_tokens": 10, "seed": 3}
    whole = client.completions.create(**options)
    chunks = list(client.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    rows = [served.world.interaction(identifier) for identifier in (whole.id, chunks[0].id)]
    assert rows[0].completion_ids.tolist() == rows[1].completion_ids.tolist()
    for row in rows:
        served.assert_reference(row)


def test_the_loaded_version_can_be_pinned_and_no_other(served: Served) -> None:
    number = served.deploy_next()
    client = served.world.openai()
    reply = client.completions.with_raw_response.create(model=f"default@{number}", prompt=PROMPT, max_tokens=4, seed=1)
    assert reply.headers["x-policy-version"] == str(number)
    served.assert_reference(served.world.interaction(reply.parse().id))
    with pytest.raises(openai.NotFoundError) as gone:
        client.completions.create(model=f"default@{number - 1}", prompt=PROMPT)
    assert gone.value.code == "version_not_loaded"


def test_what_an_unlabelled_engine_sampled_is_served_and_not_trained(served: Served) -> None:
    """It was restarted, and control has not noticed yet: for so long its base model answers."""
    served.deployer._work.label_weights(served.engine.url, "default")
    reply = served.world.openai().completions.create(model="default", prompt=PROMPT, max_tokens=4)
    row = served.world.interaction(reply.id)
    assert (row.state, row.reason, row.version_runs) == ("completed", "unknown_weights", None)
    served.deployer.tick(wait_s=120)
    after = served.world.openai().completions.create(model="default", prompt=PROMPT, max_tokens=4)
    served.assert_reference(served.world.interaction(after.id))
