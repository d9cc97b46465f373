# SPDX-License-Identifier: Apache-2.0
"""llama-server with libattn's ggml backend: requests in parallel slots get the tokens that each gets alone, and with caches in f16 those
of a server without it. Next to caches of 8 and 4 bits ggml rounds queries to 8 bits, and a token may be another one.

usage: server.py LLAMA-SERVER MODEL.gguf LIBGGML-ATTN.so LIBATTN.so K V [--kv-unified]
K, V: the cache's types.
"""
from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

WORDS = "the river ran under a bridge of stone where nobody had lived for years and the light of the old lamp was green".split()
SLOTS, TOKENS = 3, 12
LOGGED = 2000  # characters of a log that a failure prints
#: Without the environment's proxies: the server is on this machine.
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Server:
    """A server of `SLOTS` slots on a free port, and what it wrote. A llama-server into which ggml's CPU backend was linked looks for
    others only where an option names a device or a buffer: -ot does, and places nothing."""

    def __init__(self, program: str, *arguments: str, **environment: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen([program, "--host", "127.0.0.1", "--port", str(self.port), "-np", str(SLOTS), "-c", "2048", "-t", "2",
                                         "-fa", "on", "-ot", "nothing=CPU", *arguments], stdout=self.log, stderr=subprocess.STDOUT, env={**os.environ, **environment})

    def text(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def ask(self, path: str, seconds: float = 120, **body: object) -> dict[str, object]:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/{path}", json.dumps(body).encode() if body else None,
                                         {"Content-Type": "application/json"})
        with opener.open(request, timeout=seconds) as answer:
            return json.load(answer)

    def wait(self) -> None:
        """Until the model is loaded, a minute at most."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"llama-server ended with {self.process.returncode}")
            try:
                self.ask("health", 5)
                return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.1)
        raise RuntimeError("llama-server does not answer")

    def tokens(self, prompt: str) -> list[int]:
        found = self.ask("completion", prompt=prompt, n_predict=TOKENS, temperature=0, cache_prompt=False, return_tokens=True)
        return found["tokens"]  # type: ignore[return-value]

    def has_open(self, name: str) -> bool:
        with open(f"/proc/{self.process.pid}/maps") as maps:
            return name in maps.read()

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def busiest(log: str) -> int:
    """How many slots were busy together, by the server's log."""
    busy = most = 0
    for line in log.splitlines():
        busy += (" launch_slot_: " in line) - (" release: " in line)
        most = max(most, busy)
    return most


def completed(server: Server, prompts: list[str], at_once: int) -> tuple[list[list[int]], bool]:
    """The tokens of each prompt, and whether libattn is loaded; stops the server, and prints the end of its log on an error."""
    try:
        server.wait()
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(server.tokens, prompts)), server.has_open("libattn.so")
    except Exception:
        print(server.text()[-LOGGED:])
        raise
    finally:
        server.stop()


def served(program: str, arguments: list[str], prompts: list[str], at_once: int, **environment: str) -> tuple[list[list[int]], str]:
    """The tokens of each prompt, and the end of the log; libattn serves where ``ATTN_LIBRARY`` is given and refuses nothing. Of
    `at_once` requests two or more are in slots together, and one is alone."""
    server = Server(program, *arguments, **environment)
    found, loaded = completed(server, prompts, at_once)
    log = server.text()
    said = [line for line in log.splitlines() if line.startswith("libattn: ")]
    if said or loaded != ("ATTN_LIBRARY" in environment):
        raise RuntimeError(f"libattn {'is' if loaded else 'is not'} loaded: {said}\n{log[-LOGGED:]}")
    if (busiest(log) > 1) != (at_once > 1):
        raise RuntimeError(f"{busiest(log)} slots were busy together; {at_once} requests were sent at once\n{log[-LOGGED:]}")
    return found, log[-LOGGED:]


def main() -> int:
    program, model, backend, library, k, v, *options = sys.argv[1:]
    prompts = [" ".join(WORDS[i:] + WORDS[:i] * i) for i in range(2 * SLOTS)]
    arguments = ["-m", model, "-ctk", k, "-ctv", v, *options]
    ours = {"GGML_BACKEND_PATH": backend, "ATTN_LIBRARY": library, "ATTN_VALIDATE": "1"}
    theirs, _ = served(program, arguments, prompts, 1, GGML_BACKEND_PATH="")
    (alone, _), (together, log) = (served(program, arguments, prompts, at_once, **ours) for at_once in (1, SLOTS))
    same, exact = sum(map(list.__eq__, together, theirs)), k == v == "f16"
    print(f"llama-server, {SLOTS} slots, K {k}, V {v}{', one cache' if '--kv-unified' in options else ''}: of {len(prompts)} requests "
          f"{sum(map(list.__eq__, together, alone))} equal to those alone, {same} to ggml's")
    good = together == alone and (same == len(prompts) or not exact) and all(len(row) == TOKENS for row in together)
    if not good:
        for i, (a, b, c) in enumerate(zip(together, alone, theirs)):
            if not a == b == c or len(a) != TOKENS:
                print(f"request {i}: together {a}\n  alone {b}\n  ggml's {c}")
        print(log)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
