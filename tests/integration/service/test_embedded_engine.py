"""The gateway in front of the embedded engine with a tiny random model: real tokens, real log-probs, real swaps."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from app.engine.client import ControlClient
from tests.contract.tiny_model import CONTEXT, build_adapter, build_base_model
from tests.integration.service.servers import serving
from tests.integration.service.world import World, found_world
from tests.tiny_tokenizer import SMOLLM2_TEMPLATE

STARTS_WITHIN_S = 180
"""It takes 3 s of CPU time; the rest is for a machine that is busy with other things."""
HELLO = [{"role": "user", "content": "route it"}]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = build_base_model(tmp_path_factory.mktemp("tiny"))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    tokenizer.chat_template = SMOLLM2_TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> list[Path]:
    """Of versions 0 and 1, which answer differently."""
    return [build_adapter(tiny_model, tmp_path_factory.mktemp(f"v{number}"), seed=number) for number in (0, 1)]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, adapters: list[Path]) -> Iterator[World]:
    """Versions 0 and 1 are loaded and verified; 0 is live."""
    world = found_world(tmp_path_factory.mktemp("home"), tiny_model)
    port = 25100 + os.getpid() % 400
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "app.engine.embedded", "--model", str(tiny_model), "--port", str(port)]
    engine = subprocess.Popen([*command, "--dtype", "float32", "--threads", "1"])
    try:
        control = ControlClient()
        wait_until_healthy(control, url, engine)
        world.replica_id = world.add_replica(url, 0)
        world.add_version(1, world.replica_id)
        for number, path in enumerate(adapters):
            control.load_adapter(url, f"default-v{number}", str(path))
        with serving(world.app) as server:
            world.url = server.url
            yield world
    finally:
        engine.terminate()
        engine.wait(30)
        world.database.close()


def wait_until_healthy(control: ControlClient, url: str, engine: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + STARTS_WITHIN_S
    while time.monotonic() < deadline:
        if control.health(url):
            return
        assert engine.poll() is None, "the engine died"
        time.sleep(0.1)
    raise AssertionError(f"the engine was not healthy within {STARTS_WITHIN_S} s")


def test_stored_logprobs_are_those_of_a_plain_forward_pass(real: World, tiny_model: Path, adapters: list[Path]):
    reply = real.openai().chat.completions.create(
        model="default@1", messages=HELLO, max_tokens=12, temperature=0.7, seed=1, logprobs=True
    )
    row = real.interaction(reply.id)
    assert (row.version, row.state) == (1, "completed")
    prompt, completion = row.new_prompt_ids.tolist(), row.completion_ids.tolist()
    assert len(completion) == reply.usage.completion_tokens
    assert [entry.logprob for entry in reply.choices[0].logprobs.content] == pytest.approx(row.logprobs.tolist())

    base = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, adapters[1])
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / 0.7
    expected = torch.log_softmax(logits, -1)[torch.arange(len(completion)), torch.tensor(completion)]
    assert row.logprobs.tolist() == pytest.approx(expected.tolist(), abs=1e-4)


def test_stream_and_whole_reply_agree(real: World):
    options = {"model": "default", "messages": HELLO, "max_tokens": 10, "temperature": 0}
    whole = real.openai().chat.completions.create(**options)
    chunks = list(real.openai().chat.completions.create(**options, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    stored = real.interaction(chunks[0].id)
    assert stored.completion_ids.tolist() == real.interaction(whole.id).completion_ids.tolist()
    assert json.loads(stored.response)["choices"][0]["message"]["content"] == text


def test_a_swap_in_the_middle_of_traffic_fails_no_request(real: World):
    """Every reply's version is the one whose adapter served it, before and after the swap."""
    client = real.openai()

    def ask(_: int) -> tuple[str, str]:
        raw = client.chat.completions.with_raw_response.create(
            model="default", messages=HELLO, max_tokens=8, temperature=0
        )
        return raw.headers["x-policy-version"], raw.parse().choices[0].message.content

    pinned = {
        str(number): client.chat.completions.create(
            model=f"default@{number}", messages=HELLO, max_tokens=8, temperature=0
        )
        .choices[0]
        .message.content
        for number in (0, 1)
    }
    assert pinned["0"] != pinned["1"]
    with ThreadPoolExecutor(8) as pool:
        before = [pool.submit(ask, i) for i in range(24)]
        before[0].result()
        real.set_live(1)
        after = [pool.submit(ask, i) for i in range(24)]
        replies = [each.result() for each in before + after]
    real.set_live(0)
    assert {version for version, _ in replies} == {"0", "1"}
    assert all(text == pinned[version] for version, text in replies)


def test_many_at_once_are_all_logged(real: World):
    with ThreadPoolExecutor(16) as pool:
        client = real.openai()
        replies = list(
            pool.map(
                lambda i: client.chat.completions.create(
                    model="default", messages=HELLO, max_tokens=6, extra_headers={"X-Rollout-Id": f"many-{i % 8}"}
                ),
                range(48),
            )
        )
    assert len({reply.id for reply in replies}) == 48
    assert all(real.interaction(reply.id).state == "completed" for reply in replies)
    with real.http() as http:
        shown = [http.get(f"/v1/rollouts/many-{i}").json() for i in range(8)]
    assert [len(rollout["interactions"]) for rollout in shown] == [6] * 8


def test_a_prompt_beyond_the_engines_context(real: World):
    with real.http() as http:
        reply = http.post("/v1/completions", json={"model": "default", "prompt": [5] * CONTEXT})
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "context_length_exceeded"
