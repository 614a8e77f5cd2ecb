"""`bass serve` with bad requests, full queues, deadlines, bad logits, a dead engine, and signals."""

import json
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace

import httpx
import psutil
import pytest
import sweeps
import torch
from commands import invoke
from recovery import limit_memory
from serving import PROMPT, held, post, process, raw, served
from tiny import BYTES, byte_tokenizer, tiny_model
from waiting import until

import bass_core as bass
from bass_lab.serve import connections
from bass_lab.serve import server as serve_server
from bass_lab.serve.gate import MOST_BYTES, MOST_NUMBERS, MOST_PARTS, is_loopback

SMALL = {"vocab_size": BYTES, "max_position_embeddings": 2048, "num_hidden_layers": 1}
PAIR = bass.ModelPair(tiny_model(**SMALL), tiny_model(**SMALL, noise=0.02), byte_tokenizer())
ENDLESS_ROWS = {"eos_token_id": ()}
LONG = {"prompt": PROMPT, "max_tokens": 1500, "seed": 3}
FUZZED = 250


@pytest.fixture(scope="module")
def server():
    with served(PAIR, max_batch_size=4, queue=40, session=ENDLESS_ROWS) as found:
        yield found


def works(server) -> bool:
    return post(server, prompt=PROMPT, max_tokens=4).status_code == 200


ODD = (
    None, True, False, 0, -1, 1, 2, 1.5, -0.0, 1e308, -1e308, 10**30, -(2**63), 2**63, 2**31, "", "x", "5", "\x00",
    "é€😀", "\ud800", "x" * 5000, [], [[]], [None], [1, "a"], [True], ["a", 1], [2**40], [-1], {}, {"a": 1}, [{}],
    {"role": "user"}, [{"role": "user", "content": 5}], [{"role": "nobody", "content": "x"}], float("nan"),
    float("inf"), float("-inf"),
)  # fmt: skip
FIELDS = (
    "prompt", "messages", "model", "max_tokens", "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
    "seed", "stop", "stream", "stream_options", "logprobs", "timeout", "echo", "logit_bias", "user", "tools", "no_such",
)  # fmt: skip
PATHS = ("/v1/completions", "/v1/chat/completions")


METHODS = ("GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "BREW")
OTHER_PATHS = ("/", "/v1", "/v1/completion", "/v1/../x", "//", "/v1/models/%ff", "/%00", "/v1/files")
TYPES = ("text/plain", "", "application/xml", "multipart/form-data")
HOSTS = ("evil.example", "", "[", "127.0.0.1.evil.example", "[::1")
BYTE_FAULTS = (b"\xff", b"\xc3(", b"\xed\xa0\x80", b"\x00")
TEXTS = (
    b"[" * 10**5, b'{"prompt":' + b"[" * 5000 + b"]" * 5000 + b"}", b'{"a":' * 10**4, b"", b"null", b"[]", b'"x"',
    b"5", b"{}", b"9" * 5000, b'{"n":' + b"9" * 5000 + b"}",
)  # fmt: skip


def fuzzed(generator: random.Random) -> tuple[str, str, dict, bytes]:
    path, method, headers = generator.choice(PATHS), "POST", {"Content-Type": "application/json"}
    body = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": PROMPT}
    changes = {generator.choice(FIELDS): generator.choice(ODD) for _ in range(generator.randint(0, 3))}
    text = json.dumps(body | {"max_tokens": 2} | changes).encode()
    at = generator.randrange(len(text))
    match generator.randrange(12):
        case 0:
            text = text[:at]
        case 1:
            text = text[:at] + generator.choice(BYTE_FAULTS) + text[at:]
        case 2 | 3:
            text = generator.choice(TEXTS)
        case 4:
            text = generator.randbytes(generator.randrange(200))
        case 5:
            method = generator.choice(METHODS)
        case 6:
            path = generator.choice(OTHER_PATHS)
        case 7:
            headers = {"Content-Type": generator.choice(TYPES)}
        case 8:
            headers |= {"Host": generator.choice(HOSTS)}
    return method, path, headers, text


def test_fuzzed_requests_are_refused_and_leave_nothing(server, capfd):
    generator, seen = random.Random(26), set()
    with httpx.Client(base_url=server.address, trust_env=False, verify=False, timeout=30) as client:
        for _ in range(FUZZED):
            method, path, headers, body = fuzzed(generator)
            answer = client.request(method, path, headers=headers, content=body)
            seen.add(answer.status_code)
            said = f"{method} {path} {headers} {body[:300]!r}: {answer.status_code} {answer.text[:300]}"
            assert answer.status_code == 200 or 400 <= answer.status_code < 500, said
            if answer.status_code >= 400 and method != "HEAD":
                assert "\n" not in answer.json()["error"]["message"] and len(answer.text) < 1500, said
    assert {200, 400, 403, 404, 405, 415} <= seen
    log = capfd.readouterr()
    assert "Traceback" not in log.err and "fault" not in log.err and log.out == ""
    assert works(server)
    until(lambda: server.gate.rows == 0)


def test_malformed_http_is_refused(server):
    for sent in (
        b"\x00\xff\r\n\r\n",
        b"GET / HTTP/9.9\r\nConnection: close\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    ):
        assert raw(server, sent).startswith(b"HTTP/1.1 4"), sent
    assert works(server)


def test_text_far_beyond_the_context_is_refused_unread(server):
    began = time.monotonic()
    answer = post(server, prompt="x " * 3_500_000)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    assert "far longer than the context" in answer.json()["error"]["message"] and time.monotonic() - began < 5


def test_endless_line_is_not_read(server):
    with pytest.raises(OSError):
        for _ in range(100):
            raw(server, b"GET /" + b"x" * 10**6)
    assert works(server)


def many(item: str, count: int = 400_000) -> bytes:
    return f"[{','.join([item] * count)}]".encode()


def test_body_of_many_faults_is_refused_at_once(server):
    names = ",".join(f'"{index}":0' for index in range(MOST_PARTS // 2)).encode()
    for path, body, status in (
        ("/v1/completions", b'{"prompt":%b}' % many("-1"), 400),
        ("/v1/completions", b'{"prompt":"x","stop":%b}' % many("0"), 400),
        ("/v1/chat/completions", b'{"messages":%b}' % many("0"), 400),
        ("/v1/chat/completions", b'{"messages":[{"role":"user","content":%b}]}' % many("0"), 400),
        ("/v1/completions", b'{"prompt":"x",%b}' % names, 400),
        ("/v1/completions", b'{"prompt":"x","metadata":{%b},"n":0}' % names, 400),
        ("/v1/completions", b'{"prompt":%b}' % many("1", MOST_NUMBERS + 2), 413),
        *(("/v1/completions", b'{"prompt":%b}' % many(item, MOST_PARTS), 413) for item in ("[]", "{}", '"\\""')),
        ("/v1/completions", b" " * (MOST_BYTES + 1), 413),
    ):
        began = time.monotonic()
        headers = {"Content-Type": "application/json"}
        answer = httpx.post(server.address + path, content=body, headers=headers, trust_env=False, verify=False)
        assert answer.status_code == status and len(answer.text) < 1500, (body[:40], answer.text)
        assert time.monotonic() - began < 2, body[:40]
    signs = post(server, prompt='[{"\\' * MOST_PARTS)  # signs inside a text are no parts
    assert signs.status_code == 400 and signs.json()["error"]["param"] == "prompt"


def test_extreme_and_neutral_values_are_accepted(server):
    for given in (
        {"temperature": 1e-300}, {"temperature": 100}, {"repetition_penalty": 100}, {"repetition_penalty": 0.01},
        {"top_p": 1e-300}, {"min_p": 1}, {"top_k": 2**31 - 1}, {"seed": -(2**63)}, {"timeout": 1e-9},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "echo": False, "best_of": 1, "n": None},
        {"suffix": None, "user": "me", "logprobs": None, "stream": False},
    ):  # fmt: skip
        assert post(server, prompt=PROMPT, max_tokens=2, **given).status_code == 200, given


def test_silent_connections_leave_room(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (40, 40))
    with served(PAIR) as server:
        host, port = server.address.removeprefix("http://").split(":")
        for sent in (b"", b"GET /health HTTP/1.1\r\nHost: "):
            with ExitStack() as held, httpx.Client(base_url=server.address, trust_env=False, verify=False) as client:
                for _ in range(60):
                    held.enter_context(socket.create_connection((host, int(port)))).sendall(sent)
                assert client.get("/health").status_code == 200
                assert len(server.server_state.connections) <= 20
                assert client.get("/health").status_code == 200  # the same connection


def test_request_that_does_not_arrive_ends_its_connection(monkeypatch):
    monkeypatch.setattr(connections, "ARRIVAL", dict.fromkeys(connections.ARRIVAL, 0.2))
    complete = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    body = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
    with served(PAIR, session=ENDLESS_ROWS) as server, ThreadPoolExecutor(5) as pool:
        parts = [b"", b"GET /health HT", body, complete, complete + b"GET /hea"]
        for sent, answer in zip(parts, pool.map(lambda each: raw(server, each), parts), strict=True):
            assert answer.count(b"HTTP/1.1 200") == sent.count(complete), sent
        with held(server):
            running = pool.submit(post, server, prompt=PROMPT, max_tokens=4)
            until(lambda: server.gate.rows == 1)
            time.sleep(0.3)
        assert running.result().status_code == 200


def test_full_queue_answers_429_and_retry_after():
    with served(PAIR, max_batch_size=1, queue=1, session=ENDLESS_ROWS) as server, ThreadPoolExecutor(2) as pool:
        with held(server):
            running = [pool.submit(post, server, prompt=PROMPT, max_tokens=20) for _ in range(2)]
            until(lambda: server.gate.rows == 2)
            refused = post(server, prompt=PROMPT)
        assert refused.status_code == 429 and int(refused.headers["Retry-After"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        assert all(each.result().status_code == 200 for each in running)
        assert works(server)


def test_deadline_ends_a_row_with_its_tokens(server):
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool, held(server, after=5):
        running = pool.submit(post, server, **LONG, timeout=0.8)
        time.sleep(0.9)
    answer = running.result().json()
    (choice,) = answer["choices"]
    assert time.monotonic() - began < 5
    assert (choice["finish_reason"], choice["bass"]["finish_reason"]) == ("length", "budget")
    assert 0 < answer["usage"]["completion_tokens"] < LONG["max_tokens"]


def test_deadline_of_the_server_bounds_every_request():
    with served(PAIR, deadline=0.2, session=ENDLESS_ROWS) as server:
        (choice,) = post(server, **LONG, timeout=60).json()["choices"]
    assert choice["bass"]["finish_reason"] == "budget"


BAD = "Z"  # the target's logits are NaN after this token


class BadAfter(torch.nn.Module):
    def __init__(self, embeddings: torch.nn.Embedding, token: int):
        super().__init__()
        self.embeddings, self.token = embeddings, token

    def forward(self, ids):
        return self.embeddings(ids).masked_fill((ids == self.token)[..., None], torch.nan)


def test_bad_logits_fail_their_request_alone():
    with served(PAIR, max_batch_size=4, session=ENDLESS_ROWS) as server, ThreadPoolExecutor(4) as pool:
        good = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0}
        alone = post(server, **good).json()["choices"][0]["text"]
        target = server.service.pair.target
        (token,) = byte_tokenizer()(BAD)["input_ids"]
        target.set_input_embeddings(BadAfter(target.get_input_embeddings(), token))
        beside = [pool.submit(post, server, **good) for _ in range(2)]
        failed = post(server, prompt=PROMPT + BAD, max_tokens=5)
        streamed = post(server, prompt=PROMPT + BAD, max_tokens=5, stream=True)
        assert failed.status_code == 500 and failed.json()["error"]["code"] == "bad_logits"
        assert '"bad_logits"' in streamed.text and streamed.text.endswith("data: [DONE]\n\n")
        assert [each.result().json()["choices"][0]["text"] for each in beside] == [alone] * 2
        until(lambda: server.gate.rows == 0)


def test_request_too_large_for_the_memory_fails_alone(monkeypatch):
    limit_memory(monkeypatch, 700)
    with served(PAIR, max_batch_size=4, session=ENDLESS_ROWS) as server, ThreadPoolExecutor(3) as pool:
        first = post(server, **LONG)  # nothing has been decoded yet
        assert first.status_code == 507 and first.json()["error"]["code"] == "out_of_memory"
        good = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0}
        with held(server, after=1):
            beside = pool.submit(post, server, **good)
            until(lambda: server.engine.session.rows.live)
            failed = [pool.submit(post, server, **LONG, n=2, stream=stream) for stream in (False, True)]
            until(lambda: server.gate.rows == 5)
        assert all("out_of_memory" in each.result().text for each in failed)
        alone = post(server, **good).json()["choices"][0]["text"]
        assert beside.result().json()["choices"][0]["text"] == alone
        until(lambda: server.gate.rows == 0)
    with served(PAIR, max_batch_size=1, session=ENDLESS_ROWS) as server, ThreadPoolExecutor(4) as pool:
        with held(server):
            both = pool.submit(post, server, prompt=[PROMPT, PROMPT * 60], max_tokens=90)  # the second is too long
            until(lambda: server.gate.rows == 2)
            small = [pool.submit(post, server, **good) for _ in range(2)]
            until(lambda: server.gate.rows == 4)
        assert both.result().status_code == 507
        assert [each.result().json()["choices"][0]["text"] for each in small] == [alone] * 2
        until(lambda: server.gate.rows == 0)


def test_request_that_the_session_refuses_leaves_no_rows(server, monkeypatch):
    session, handles = server.engine.session, []
    submit = session.submit

    def second_refused(*given, **options):
        if handles:
            raise ValueError("no second row")
        handles.append(submit(*given, **options))
        return handles[0]

    monkeypatch.setattr(session, "submit", second_refused)
    refused = post(server, **LONG | {"prompt": [PROMPT, PROMPT]})
    assert refused.status_code == 400 and "no second row" in refused.text
    until(lambda: handles[0].finish_reason is not None)
    assert handles[0].finish_reason == "cancelled" and server.gate.rows == 0


@pytest.mark.parametrize("error", [ZeroDivisionError("division by zero"), torch.OutOfMemoryError("CUDA out of memory")])
def test_dead_engine_fails_its_requests_and_ends_the_server(capfd, monkeypatch, error):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(serve_server, "LAST_WORDS", 1.5)
    with served(PAIR, max_batch_size=1, session=ENDLESS_ROWS) as server, ThreadPoolExecutor(2) as pool:
        running = [pool.submit(post, server, **LONG, stream=stream) for stream in (False, True)]
        session = server.engine.session
        until(lambda: session.rows.live and len(session.rows.waiting) == 1)  # a prefill is over, and a row waits
        session.device_step.verify = fail
        whole, streamed = (each.result() for each in running)
        assert whole.status_code == 500 and "engine has stopped" in whole.json()["error"]["message"]
        assert "engine has stopped" in streamed.text
        health = httpx.get(f"{server.address}/health", trust_env=False, verify=False)
        assert health.status_code == 503 and health.json()["status"] == "dead"
        assert post(server, prompt=PROMPT).status_code == 500
        until(lambda: server.should_exit)
    assert server.failed
    log = capfd.readouterr().err
    assert log.startswith(f"error: the engine has stopped: {type(error).__name__}: ") and log.count("\n") == 1


def test_internal_fault_is_a_500_in_one_line(server, capfd, monkeypatch):
    monkeypatch.setattr(server.service, "_rows", lambda *arguments: {}["nowhere"])
    answer = post(server, prompt=PROMPT)
    assert answer.status_code == 500 and "error" in answer.json()
    assert capfd.readouterr().err == "error: a fault in bass serve: KeyError: 'nowhere'\n"
    assert server.gate.rows == 0


def test_key_protects_everything_but_health():
    with served(PAIR, api_key="secret-ключ", session=ENDLESS_ROWS) as server:
        for path in ("/v1/models", "/metrics", "/docs", "/openapi.json", "/v1/completions", "/nowhere"):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
                answer = httpx.get(server.address + path, headers=headers, trust_env=False, verify=False)
                assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"
        assert httpx.get(f"{server.address}/health", trust_env=False, verify=False).status_code == 200
        key = {"Authorization": "Bearer secret-ключ".encode()}
        assert httpx.get(f"{server.address}/v1/models", headers=key, trust_env=False, verify=False).status_code == 200


@pytest.mark.parametrize("option", [(), ("--api-key", "secret \r\n")])
def test_key_has_no_space_around_it(monkeypatch, option):
    given = []
    started = SimpleNamespace(run=lambda sockets: None, failed=False)
    monkeypatch.setattr(serve_server, "Server", lambda pair, settings, say: given.append(settings.api_key) or started)
    monkeypatch.setenv("BASS_API_KEY", "\tsecret\n")
    assert invoke("serve", "--port", "0", *option).exit_code == 0
    assert given == ["secret"]


def test_unusable_options_are_refused_in_one_line(monkeypatch):
    monkeypatch.delenv("BASS_API_KEY", raising=False)
    far = ("0.0.0.0", "::", "192.168.0.1", "example.org")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for option, value, said in (
            ("--api-key", "", "is empty"), ("--api-key", " \n", "is empty"), ("--api-key", "a\nb", "unprintable"),
            ("--allow-origin", "https://a.example/", "without a path"), ("--allow-origin", "a.example", "scheme://host"),
            ("--port", str(taken.getsockname()[1]), "Address already in use; --port 0 selects a free port"),
            *(("--host", host, "set an API key") for host in far),
        ):  # fmt: skip
            result = invoke("serve", "--port", "0", option, value)
            assert result.exit_code == 2 and said in result.stderr and result.stderr.count("\n") == 1, value
    assert not any(map(is_loopback, far)) and all(map(is_loopback, ("127.0.0.1", "::1", "localhost")))


def test_pages_of_allowed_origins_alone_may_call(server):
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    with served(PAIR, api_key="secret", allow_origins=("https://a.example",)) as opened:
        for allowed, origin in ((True, "https://a.example"), (False, "https://b.example"), (False, "null")):
            url, headers = f"{opened.address}/v1/completions", {"Origin": origin}
            preflight = httpx.options(url, headers=headers | asked, trust_env=False, verify=False)
            refused = httpx.post(url, headers=headers, trust_env=False, verify=False)
            assert preflight.status_code == (200 if allowed else 400) and refused.status_code == 401
            for answer in (preflight, refused):
                assert answer.headers.get("Access-Control-Allow-Origin") == (origin if allowed else None)
    default = httpx.options(f"{server.address}/v1/completions", headers=headers | asked, trust_env=False, verify=False)
    assert default.status_code == 405 and "Access-Control-Allow-Origin" not in default.headers


def test_draining_finishes_running_rows_and_refuses_new_ones():
    with served(PAIR, max_batch_size=2, session=ENDLESS_ROWS) as server, ThreadPoolExecutor(1) as pool:
        with held(server):
            running = pool.submit(post, server, prompt=PROMPT, max_tokens=100, temperature=0)
            until(lambda: server.gate.rows == 1)
            server._loop.call_soon_threadsafe(server.drain)
            until(lambda: server.gate.draining)
            refused = post(server, prompt=PROMPT)
        assert refused.status_code == 503 and "shutting down" in refused.json()["error"]["message"]
        assert running.result().status_code == 200
        assert running.result().json()["choices"][0]["bass"]["finish_reason"] in ("length", "eos")
        server.drain = lambda: None


def test_draining_is_bounded():
    with served(PAIR, max_batch_size=1, drain=0.2, session=ENDLESS_ROWS) as server, ThreadPoolExecutor(1) as pool:
        running = pool.submit(post, server, **LONG, temperature=0)
        until(lambda: server.gate.rows == 1)
        server._loop.call_soon_threadsafe(server.drain)
        assert running.result().json()["choices"][0]["bass"]["finish_reason"] in ("cancelled", "eos")
        server.drain = lambda: None


ENDLESS = """
import httpx
with httpx.stream("POST", "{address}/v1/completions", timeout=60, trust_env=False, verify=False,
                  json=dict(prompt="x = ", n=8, max_tokens=450, stream=True, temperature=1.5,
                            ignore_eos=True)) as answer:
    for line in answer.iter_lines():
        print(line[:20], flush=True)
"""


@pytest.mark.ci
def test_sigterm_drains_and_ends_with_code_0():
    with process() as (child, address), ThreadPoolExecutor(1) as pool:
        running = pool.submit(post, address, prompt=PROMPT, max_tokens=300, temperature=1.2, seed=1, n=4)
        until(lambda: httpx.get(f"{address}/health", trust_env=False, verify=False).json()["rows"] == 4)
        child.send_signal(signal.SIGTERM)
        assert running.result().status_code == 200
        assert child.wait(20) == 0
        assert child.stderr.read().count("\n") <= 1 and child.stdout.read() == ""


@pytest.mark.ci
def test_killed_client_leaves_no_rows_and_killed_server_no_process():
    with process() as (child, address):
        client = subprocess.Popen([sys.executable, "-c", ENDLESS.format(address=address)], stdout=subprocess.PIPE)
        client.stdout.readline()
        assert httpx.get(f"{address}/health", trust_env=False, verify=False).json()["rows"] == 8
        client.kill()
        client.communicate()
        until(lambda: httpx.get(f"{address}/health", trust_env=False, verify=False).json()["rows"] == 0, 5)
        assert post(address, prompt=PROMPT, max_tokens=4).status_code == 200
        processes = [child.pid, *(each.pid for each in psutil.Process(child.pid).children(recursive=True))]
        child.kill()
        child.wait(10)
        until(lambda: not any(map(sweeps.alive, processes)), 5)


@pytest.mark.slow
def test_second_sigterm_ends_running_rows():
    with process("--drain", "600") as (child, address), ThreadPoolExecutor(1) as pool:
        running = pool.submit(post, address, prompt=PROMPT, max_tokens=450, temperature=1.5, n=40)
        until(lambda: httpx.get(f"{address}/health", trust_env=False, verify=False).json()["rows"] > 0)
        child.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(f"{address}/health", trust_env=False, verify=False).json()["status"] == "draining")
        child.send_signal(signal.SIGTERM)
        assert running.result().status_code == 200
        assert child.wait(20) == 0
