"""Load over HTTP, against a small server with the needed part of OpenAI's protocol."""

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pandas as pd
import pytest

from bass_lab.load import Workload, over_http

PIECE = 0.02  # seconds between pieces
CHAT = [{"role": "user", "content": "hello"}]


class Handler(BaseHTTPRequestHandler):
    """Send four pieces of text with eight tokens. The prompt names a fault."""

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        self._answer(json.dumps({"data": [{"id": "tiny"}]}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body, self.headers.get("Authorization")))
        if body.get("prompt") == "refuse":
            self._answer(b'{"error": {"message": "no room"}}', 429)
            return
        self.send_response(200)
        self.end_headers()
        if body.get("prompt") == "nothing":  # the first token ends the text
            time.sleep(PIECE)
            self._event({"choices": [{"text": "", "finish_reason": "stop"}]})
            self._event({"choices": [], "usage": {"completion_tokens": 1}})
            self._send("data: [DONE]\n\n")
            return
        chat = self.path.endswith("chat/completions")
        for piece in range(4):
            if body.get("prompt") == "break" and piece == 2:
                return
            time.sleep(100 * PIECE if body.get("prompt") == "slow" else PIECE)
            text = {"delta": {"content": f"{piece} "}} if chat else {"text": f"{piece} "}
            self._event({"choices": [text | {"finish_reason": "length" if piece == 3 else None}]})
        if body.get("prompt") == "ends":  # the last token has no text
            time.sleep(PIECE)
            self._event({"choices": [{"text": "", "finish_reason": "stop"}]})
        if body["stream_options"]["include_usage"]:
            self._event({"choices": [], "usage": {"completion_tokens": 8}})
        self._send("data: [DONE]\n\n")

    def _event(self, event):
        self._send(f": a comment\ndata: {json.dumps(event)}\n\n")

    def _send(self, text):
        with contextlib.suppress(OSError):  # the client has left
            self.wfile.write(text.encode())
            self.wfile.flush()

    def _answer(self, data, status=200):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server():
    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.asked, made.daemon_threads = [], True
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()


def address(server):
    return f"http://127.0.0.1:{server.server_address[1]}"


def workload(prompts, deadline=np.nan):
    columns = {"arrived": 0.05 * np.arange(len(prompts)), "prompt": prompts, "number": range(len(prompts))}
    return Workload(pd.DataFrame(columns | {"max_new_tokens": 8, "deadline": deadline, "seed": range(len(prompts))}))


def test_requests_are_sent_when_due_and_timed_by_their_pieces(server):
    run = over_http(workload(["a", CHAT, "b"]), f"{address(server)}/v1", api_key="secret", temperature=0.5)
    found = run.requests
    assert found.tokens.tolist() == [8] * 3 and found.finish_reason.tolist() == ["length"] * 3
    assert found.text.tolist() == ["0 1 2 3 "] * 3
    assert run.pieces.groupby("request").tokens.agg(["size", "sum"]).to_numpy().tolist() == [[4, 8]] * 3
    assert (found["first"] >= found.arrived + PIECE).all() and (found.ended >= found.arrived + 4 * PIECE).all()
    between = 1e3 * (found.ended - found["first"]) / 7  # eight tokens
    assert run.latencies.between_ms.tolist() == pytest.approx(between.tolist()) and run.meta["errors"] == {}
    by_path = {path: body for path, body, _ in server.asked}
    assert set(by_path) == {"/v1/completions", "/v1/chat/completions"}
    assert by_path["/v1/chat/completions"]["messages"] == CHAT
    body = by_path["/v1/completions"]
    assert (body["model"], body["temperature"], body["max_tokens"], body["stream"]) == ("tiny", 0.5, 8, True)
    assert {key for *_, key in server.asked} == {"Bearer secret"}
    assert {"queue_ms", "batch", "tokens_per_step"}.isdisjoint(run.summary(warm_up=0).reset_index().metric)


def test_failed_requests_have_their_own_errors_and_clients_leave(server):
    run = over_http(workload(["a", "refuse", "break", "slow"], deadline=[np.nan, np.nan, np.nan, 0.3]), address(server))
    assert run.requests.finish_reason.tolist() == ["length", "error", "error", "budget"]
    assert "429" in run.meta["errors"][1] and "no room" in run.meta["errors"][1]
    assert "without a finish_reason" in run.meta["errors"][2] and set(run.meta["errors"]) == {1, 2}
    assert run.latencies.late.tolist() == [False, False, False, True]
    assert 0.25 < run.requests.ended[3] - run.requests.arrived[3] < 50 * PIECE  # before the first piece
    assert run.requests.tokens[2] == 2 and run.latencies.end_ms.isna().tolist() == [False, True, True, True]


def test_last_token_without_text_is_timed(server):
    run = over_http(workload(["nothing", "ends"]), address(server))
    assert run.requests.finish_reason.tolist() == ["stop", "stop"] and run.meta["errors"] == {}
    assert run.pieces.groupby("request").at.size().tolist() == [1, 5]
    assert np.isfinite(run.latencies.first_ms).all() and (run.latencies.end_ms >= run.latencies.first_ms).all()
    assert run.requests.ended[1] - run.requests["first"][1] >= 4 * PIECE


def test_missing_server_is_refused_before_sending():
    with pytest.raises(OSError, match="refused"):
        over_http(workload(["a"]), "127.0.0.1:9")
    with pytest.raises(ValueError, match="url must be an http or https address"):
        over_http(workload(["a"]), "ftp://somewhere")
