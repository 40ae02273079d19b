"""A model of less than a million parameters that writes lines: `python -m benchmarks.tiny_writer --out DIRECTORY`.

It makes whole experiments affordable on a CPU (`EVERGREEN_MODEL=DIRECTORY evergreen experiment online --env writing`):
a Llama with a byte-level tokenizer of its own and the ChatML template, taught by nothing but prompts of
envs/writing.py, for seeds that no experiment plays, to answer with a line in any style of the pool, all equally often.
One line in five is flawed. So it knows the task and no preference: what is rewarded it has to learn.
"""

import argparse
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from app.inference.chatml import END, START
from envs.environment import Message
from envs.writing import POOL, Writing
from envs.writing import SHOWN as SHOWN_OF_EACH

CONTEXT, VOCABULARY = 512, 1024
SHOWN = POOL * SHOWN_OF_EACH
FIRST_SEED = 1000
"""Of the environments it is taught with."""
FLAWED = 0.2
IGNORED = -100
OPENERS = {"amazed": "Wow", "cute": "Aww", "grumpy": "Ugh", "ghost": "Boo"}
ACTS = (
    "sings to us", "runs up a hill", "waits for his turn", "sleeps all day", "came home late", "looks at the sky",
    "talks to my aunt", "is on the table again", "fell in the pond", "knows our names", "will not let us pass",
    "has no time for you", "was here before me", "can hear your steps", "jumps over a wall", "is up in a tree",
    "follows me to school", "hums an old tune", "has three round eyes", "eats our lunch", "is at the door",
    "stands by the river", "left a note for you", "paints my nose blue", "rolls into the room", "grew in the night",
)  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=64, help="answers per step, of short prompts")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    rng = random.Random(arguments.seed)
    tokenizer = _tokenizer(rng)
    model = _model(tokenizer)
    teach(model, tokenizer, rng, arguments.steps, arguments.batch)
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)


def conversation(rng: random.Random, most_shown: int) -> list[Message]:
    """A prompt of the environment with at most so many of its example lines, and an answer. The styles of a pool are
    drawn alike."""
    environment = Writing(rng.randrange(FIRST_SEED, 1_000_000))
    phase = rng.randint(1, environment.phases)
    episode = environment.reset(rng.randrange(100), phase)
    opener = OPENERS[rng.choice(environment.pools[phase - 1])]
    system, *turns = episode.messages
    turns = turns[-1 - 2 * rng.randint(0, most_shown) :]
    return [system, *turns, {"role": "assistant", "content": _line(rng, episode.topic, opener)}]


def _line(rng: random.Random, topic: str, opener: str) -> str:
    act = rng.choice(ACTS)
    if rng.random() >= FLAWED:
        return f"{opener}, the {topic} {act}!"
    return rng.choice(
        [f"{opener}, it {act}!", f"{opener}, the {topic} the {topic} {act}!", f"{opener}, the {topic} {act}"]
    )


def _tokenizer(rng: random.Random) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (message["content"] for _ in range(1000) for message in conversation(rng, SHOWN))
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token="<|endoftext|>", chat_template=TEMPLATE
    )


def _model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        bos_token_id=tokenizer.convert_tokens_to_ids(START),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).float()
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    return model


def teach(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: random.Random, steps: int, batch: int
) -> None:
    """Next-token loss on the answers and on the prompts' example lines. Prompts grow: none shows a line at first, so
    that to name the topic is learned where there is only one."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        most_shown = min(SHOWN, SHOWN * 2 * max(0, 2 * step - steps // 2) // steps)
        lines = batch if most_shown == 0 else max(4, batch // most_shown)
        encoded = [_encode(tokenizer, conversation(rng, most_shown)) for _ in range(lines)]
        ids = pad_sequence([e[0] for e in encoded], batch_first=True)
        labels = pad_sequence([e[1] for e in encoded], batch_first=True, padding_value=IGNORED)
        logits = model(input_ids=ids).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if step % 100 == 99:
            print(f"step {step + 1}: at most {most_shown} lines shown, loss {loss.item():.3f}", flush=True)


def _encode(tokenizer: PreTrainedTokenizerFast, messages: list[Message]) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, labels), each (L,): labels are the ids of assistants' texts and their ends, else IGNORED."""
    ids: list[int] = []
    labels: list[int] = []
    for message in messages:
        header = tokenizer.encode(f"{START}{message['role']}\n", add_special_tokens=False)
        text = tokenizer.encode(f"{message['content']}{END}", add_special_tokens=False)
        newline = tokenizer.encode("\n", add_special_tokens=False)
        ids += header + text + newline
        taught = text if message["role"] == "assistant" else [IGNORED] * len(text)
        labels += [IGNORED] * len(header) + taught + [IGNORED] * len(newline)
    return torch.tensor(ids), torch.tensor(labels)


if __name__ == "__main__":
    main()
