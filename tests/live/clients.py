"""Requests of users: OpenAI's own client, and plain HTTP for what it has no method for."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Final

import httpx
import openai
from driftguard_training.corpus import prompts

MODEL: Final = "target"
CHARACTERS: Final = 120
_STOPS: Final[dict[str, Any]] = {"stop": ["e", "\n", " "], "max_tokens": 40}

Ask = Callable[[str, str, random.Random], Any]


@cache  # of one that is thrown away, the connection is closed before the end of a stream has come
def client(url: str, segment: str = "default") -> openai.OpenAI:
    headers = {"X-DriftGuard-Segment": segment}
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", default_headers=headers, max_retries=0)


def completion(url: str, prompt: str, rng: random.Random, **more: Any) -> Any:
    return client(url).completions.create(**{**_usual(rng), **more}, prompt=prompt)


def streamed_completion(url: str, prompt: str, rng: random.Random, **more: Any) -> Any:
    return list(client(url).completions.create(**{**_usual(rng), **more}, prompt=prompt, stream=True))


def chat(url: str, prompt: str, rng: random.Random) -> Any:
    return client(url).chat.completions.create(**_usual(rng), messages=[{"role": "user", "content": prompt}])


def streamed_chat(url: str, prompt: str, rng: random.Random) -> Any:
    messages: list[Any] = [{"role": "user", "content": prompt}]
    events = client(url).chat.completions.create(
        **_usual(rng), messages=messages, stream=True, stream_options={"include_usage": True}
    )
    return list(events)


def stopped_completion(url: str, prompt: str, rng: random.Random) -> Any:
    """Ends on a stop string nearly always."""
    return completion(url, prompt, rng, **_STOPS)


def streamed_stopped_completion(url: str, prompt: str, rng: random.Random) -> Any:
    return streamed_completion(url, prompt, rng, **_STOPS)


def ended_on_stop_string(answer: Any) -> bool:
    """By the answer of vLLM, or the events of a streamed one. Not where the model ended in the same step by
    itself: then it has counts."""
    events = answer if isinstance(answer, list) else [answer]
    metrics = [getattr(event, "metrics", None) or {} for event in events]
    return any(
        isinstance(getattr(choice, "stop_reason", None), str) for event in events for choice in event.choices
    ) and not any(each.get("speculative_decoding") for each in metrics)


def long_completion(url: str, prompt: str, rng: random.Random) -> Any:
    return completion(url, prompt, rng, max_tokens=64)


def greedy_completion(url: str, prompt: str, rng: random.Random) -> Any:
    return completion(url, prompt, rng, max_tokens=64, temperature=0.0)


def two_completions(url: str, prompt: str, rng: random.Random) -> Any:
    return completion(url, prompt, rng, n=2, temperature=1.0)


def native_completion(url: str, prompt: str, rng: random.Random) -> Any:
    """llama.cpp's own."""
    usual = _usual(rng)
    body = {"prompt": prompt, "n_predict": usual["max_tokens"], "temperature": usual["temperature"]}
    return httpx.post(f"{url}/completion", json=body).raise_for_status().json()


def endless_completion(url: str, prompt: str, rng: random.Random) -> Any:
    """llama.cpp's own, always of 300 tokens."""
    body = {"prompt": prompt, "n_predict": 300, "ignore_eos": True, "seed": rng.getrandbits(31)}
    return httpx.post(f"{url}/completion", json=body).raise_for_status().json()


def with_token_ids(
    url: str, prompt: str, segment: str, *, temperature: float = 0.0
) -> tuple[list[int], list[int]]:
    """llama.cpp's own: the token ids of the prompt and of the answer, sampled from the whole distribution."""
    ids = httpx.post(f"{url}/tokenize", json={"content": prompt, "add_special": True}).json()["tokens"]
    body = {"prompt": ids, "n_predict": 64, "temperature": temperature, "return_tokens": True}
    body |= {"samplers": ["temperature"], "seed": sum(ids)}
    headers = {"X-DriftGuard-Segment": segment}
    answer = httpx.post(f"{url}/completion", json=body, headers=headers).raise_for_status().json()
    return ids, answer["tokens"]


def with_token_ids_of_vllm(
    url: str, prompt: str, segment: str, *, temperature: float = 0.0
) -> tuple[list[int], list[int]]:
    """The same of vLLM."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 64, "temperature": temperature}
    body |= {"return_token_ids": True, "seed": len(prompt)}
    headers = {"X-DriftGuard-Segment": segment}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers).raise_for_status().json()
    (choice,) = answer["choices"]
    return choice["prompt_token_ids"], choice["token_ids"]


def abandoned(url: str, prompt: str, rng: random.Random) -> None:
    """A stream whose client goes away after its first event."""
    usual = {**_usual(rng), "max_tokens": 400}
    with client(url).completions.create(**usual, prompt=prompt, stream=True) as events:
        next(iter(events))


def response(url: str, prompt: str, rng: random.Random) -> Any:
    usual = _usual(rng)
    return client(url).responses.create(
        model=MODEL, input=prompt, max_output_tokens=16, temperature=usual["temperature"]
    )


def message(url: str, prompt: str, rng: random.Random) -> Any:
    """Of Anthropic's interface."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": 16}
    return httpx.post(f"{url}/v1/messages", json=body).raise_for_status().json()


def all_of(asks: Sequence[Ask], url: str, count: int, seed: int, *, at_once: int = 4) -> list[Any]:
    """`count` requests, of these kinds in turn."""
    texts = prompts("python", count, seed, characters=CHARACTERS)
    with ThreadPoolExecutor(at_once) as pool:
        jobs = [
            pool.submit(asks[number % len(asks)], url, text, random.Random(f"{seed}:{number}"))
            for number, text in enumerate(texts)
        ]
        return [job.result() for job in jobs]


def _usual(rng: random.Random) -> dict[str, Any]:
    return {
        "model": MODEL,
        "max_tokens": rng.choice([1, 2, 3, 8, 24, 40]),
        "temperature": rng.choice([0.0, 1.0]),
        "seed": rng.getrandbits(31),
    }


def many_short(url: str, count: int, seed: int, *, at_once: int = 8) -> Counter[int]:
    """Completions of one to four tokens over kept connections. Returns how many had which status."""
    texts = prompts("python", 200, seed, characters=20)

    def some(number: int) -> Counter[int]:
        rng, found = random.Random(f"{seed}:{number}"), Counter[int]()
        with httpx.Client(base_url=url, timeout=60.0) as session:
            for _ in range(number, count, at_once):
                body = {"model": MODEL, "prompt": rng.choice(texts), "max_tokens": rng.randint(1, 4)}
                found[session.post("/v1/completions", json=body).status_code] += 1
        return found

    with ThreadPoolExecutor(at_once) as pool:
        return sum(pool.map(some, range(at_once)), Counter[int]())


def segment_of(url: str, domain: str, segment: str, seed: int, *, temperature: float = 0.0) -> Iterator[Any]:
    """Completions of one segment, one after the other, without end."""
    rng, asking = random.Random(seed), client(url, segment)
    while True:
        for text in prompts(domain, 500, rng.getrandbits(31), characters=CHARACTERS):
            yield asking.completions.create(
                model=MODEL, prompt=text, max_tokens=24, temperature=temperature, seed=rng.getrandbits(31)
            )
