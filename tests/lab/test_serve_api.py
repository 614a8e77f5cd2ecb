"""`bass serve` answers as OpenAI's client expects. Rows of different requests are independent."""

import json
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import jsonschema
import openai
import pytest
from documents import ROOT
from serving import PROMPT, held, post, served
from tiny import BYTES, byte_tokenizer, forward_passes, greedy_alone, tiny_model
from waiting import until

import bass_core as bass
from bass_lab.serve.answers import Answer
from bass_lab.serve.counts import Counts

TOKENIZER = byte_tokenizer()
TOKENIZER.chat_template = "{% for message in messages %}# {{ message.content }}\n{% endfor %}"
SMALL = {"vocab_size": BYTES, "dtype": "float64", "max_position_embeddings": 512, "num_hidden_layers": 1}
TARGET, DRAFT = tiny_model(**SMALL), tiny_model(**SMALL, noise=0.02)
PAIR = bass.ModelPair(TARGET, DRAFT, TOKENIZER)
NEW = 20
PROMPTS = [f"{PROMPT}{index}{'#' * index}" for index in range(9)]


@pytest.fixture(scope="module")
def server():
    with served(PAIR, max_batch_size=4, queue=40, session={"draft_length": 3}) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as found:
        yield found


def text_alone(prompt: str, new: int = NEW) -> str:
    ids = TOKENIZER(prompt, return_tensors="pt")["input_ids"][0]
    return TOKENIZER.decode(greedy_alone(TARGET, ids, new, eos=2), skip_special_tokens=True)


def complete(client, prompt=PROMPT, **options):
    return client.completions.create(**({"model": "tiny", "prompt": prompt, "max_tokens": NEW} | options))


def test_greedy_text_under_load_equals_transformers(client):
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        ways = [{"temperature": 0} if index % 2 == 0 else {"temperature": 1.2} for index in range(len(PROMPTS))]
        found = list(pool.map(lambda each: complete(client, each[0], **each[1]), zip(PROMPTS, ways, strict=True)))
    for prompt, way, answer in zip(PROMPTS, ways, found, strict=True):
        if way["temperature"] == 0:
            assert answer.choices[0].text == text_alone(prompt)


def test_stream_is_the_answer_in_pieces(client):
    options, usage = {"temperature": 0, "max_tokens": 40}, {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}, **options))
    whole = complete(client, **options)
    texts = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert "".join(texts) == whole.choices[0].text == text_alone(PROMPT, 40)
    assert len(texts) > 3
    assert chunks[-1].usage == whole.usage and whole.usage.completion_tokens == 40
    assert chunks[-2].choices[0].finish_reason == "length"
    chunks = complete(client, stream=True, stream_options=usage, **options)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[0] < counts[-1] == 40


def test_row_that_ignores_eos_ends_at_its_limit(client):
    def tokens(prompt, **options):
        return complete(client, prompt, temperature=1, seed=0, max_tokens=100, **options).usage.completion_tokens

    early = next(prompt for prompt in PROMPTS if tokens(prompt) < 100)
    assert tokens(early, extra_body={"ignore_eos": True}) == 100


def test_chat_is_written_by_the_template(client):
    messages = [{"role": "user", "content": "Hello"}]
    options = {"model": "tiny", "messages": messages, "temperature": 0, "max_completion_tokens": NEW}
    whole = client.chat.completions.create(**options)
    assert whole.choices[0].message.content == text_alone("# Hello\n") and whole.choices[0].message.role == "assistant"
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(stream=True, **options)]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}]
    assert client.chat.completions.create(**options | {"messages": parts}).choices == whole.choices


def test_chat_without_a_limit_ends_with_the_context(client):
    messages = [{"role": "user", "content": "x" * 480}]
    answer = client.chat.completions.create(model="tiny", messages=messages, temperature=0, seed=1)
    ended = answer.choices[0].bass["finish_reason"]
    assert ended == "eos" or answer.usage.total_tokens == 512


def test_chat_without_a_template_is_refused():
    with served(bass.ModelPair(TARGET, DRAFT, byte_tokenizer())) as other:
        answer = post(other, "/v1/chat/completions", messages=[{"role": "user", "content": "x"}])
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages"
    assert "chat template" in answer.json()["error"]["message"]


def test_prompts_are_texts_or_token_ids(client):
    ids = TOKENIZER([PROMPT, "x = "])["input_ids"]
    texts = [[choice.text for choice in complete(client, prompt, temperature=0).choices] for prompt in
             ([PROMPT, "x = "], ids, ids[0], PROMPT)]  # fmt: skip
    assert texts[0] == texts[1] == [text_alone(PROMPT), text_alone("x = ")]
    assert texts[2] == texts[3] == texts[0][:1]


def test_samples_are_in_order_and_repeat_with_their_seed(client):
    answer = complete(client, n=8, seed=5)
    assert [choice.index for choice in answer.choices] == list(range(8))
    assert len({choice.text for choice in answer.choices}) > 4
    assert [c.text for c in complete(client, n=8, seed=5).choices] == [choice.text for choice in answer.choices]
    streamed = [""] * 8
    for chunk in complete(client, n=8, seed=5, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == [choice.text for choice in answer.choices]
    first = complete(client)
    assert complete(client, seed=first.bass["seed"]).choices[0].text == first.choices[0].text


def test_samples_share_one_prefill(server, client):
    with forward_passes(server.service.pair.target) as shapes:
        complete(client, "y" * 50, n=3)
    assert [shape for shape in shapes if shape[-1] >= 50] == [(1, len(TOKENIZER("y" * 50)["input_ids"]))]


@pytest.mark.parametrize("rule", ["token", "coupled"])
def test_seeded_answers_do_not_depend_on_load(rule):
    """Nor on the draft length, with coupled verification."""
    texts, options = {}, {"seed": 11, "n": 2, "temperature": 0.9}
    for length in (3,) if rule == "token" else (0, None):
        session = {"draft_length": length, "verification": rule}
        with served(PAIR, max_batch_size=5, session=session) as server, ThreadPoolExecutor(8) as pool:
            texts[length, "alone"] = texts_of(post(server, prompt=PROMPT, **options))
            others = [pool.submit(post, server, prompt=each, max_tokens=30) for each in PROMPTS[1:5]]
            texts[length, "loaded"] = texts_of(post(server, prompt=PROMPT, **options))
            assert all(each.result().status_code == 200 for each in others)
    assert len({tuple(each) for each in texts.values()}) == 1, texts


def texts_of(answer) -> list[str]:
    return [choice["text"] for choice in answer.json()["choices"]]


def test_stop_string_ends_the_text(client):
    text = text_alone(PROMPT, 60)
    found = complete(client, stop=[text[10:13], "absent"], max_tokens=60, temperature=0)
    assert found.choices[0].text == text[: text.index(text[10:13])] and found.choices[0].finish_reason == "stop"
    pieces = complete(client, stop=text[10:13], max_tokens=60, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in pieces) == found.choices[0].text


def test_log_probabilities_equal_generate(client):
    out = bass.generate(PAIR, PROMPT, max_new_tokens=NEW, draft_length=3)
    found = complete(client, temperature=0, logprobs=0).choices[0].logprobs
    assert found.token_logprobs == pytest.approx(out.logprobs[0].tolist(), abs=1e-5)
    assert len(found.tokens) == len(found.text_offset) == len(out.sequences[0])
    told = [c.choices[0].logprobs for c in complete(client, temperature=0, logprobs=0, stream=True)]
    assert [value for each in told if each for value in each.token_logprobs] == found.token_logprobs
    messages = [{"role": "user", "content": "Hello"}]
    chat = client.chat.completions.create(model="tiny", messages=messages, logprobs=True, max_tokens=4)
    assert len(chat.choices[0].logprobs.content) == chat.usage.completion_tokens


def test_stream_that_holds_text_back_keeps_log_probabilities(client):
    """Text at the start of a possible stop string waits for the next token."""
    options = {"temperature": 0, "logprobs": 0, "max_tokens": 40, "stop": [text_alone(PROMPT, 40)[:3] + "never"]}
    whole = complete(client, **options).choices[0].logprobs
    told = [chunk.choices[0].logprobs for chunk in complete(client, stream=True, **options)]
    told = [each for each in told if each]
    assert len(whole.tokens) == 40
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [value for each in told for value in getattr(each, name)] == getattr(whole, name)


def test_token_texts_join_to_the_text_and_bytes_to_characters():
    text = "x = '日本' + y"
    ids, chunks = [*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id], []
    answer, chat = (Answer(is_chat, "tiny", TOKENIZER, 0, 0, True, ()) for is_chat in (False, True))
    for token in ids:
        chunks.append(answer.chunk(0, [token], [0.0], [], None))
        told = chat.chunk(0, [token], [0.0], [], None)
        if told is not None:
            parts = [each["bytes"] for each in told["choices"][0]["logprobs"]["content"]]
            assert bytes(byte for part in parts for byte in part).decode() == told["choices"][0]["delta"]["content"]
    choices = [chunk["choices"][0] for chunk in chunks if chunk is not None]
    assert "".join(choice["text"] for choice in choices) == text
    for choice in choices:
        told = choice["logprobs"]
        assert "".join(told["tokens"]) == choice["text"]
        assert all(text[at:].startswith(piece) for at, piece in zip(told["text_offset"], told["tokens"], strict=True))


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}


@pytest.mark.parametrize("stream", [False, True])
def test_answers_follow_a_schema(client, stream):
    options = {"model": "tiny", "messages": [USER], "max_completion_tokens": 60, "n": 3, "temperature": 1.0}
    answer = client.chat.completions.create(response_format=FORMAT, stream=stream, **options)
    texts = Counter()
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] = (texts[choice.index] or "") + (
                (choice.delta if stream else choice.message).content or ""
            )
            assert choice.finish_reason in (None, "stop")
    for text in texts.values():
        jsonschema.validate(json.loads(text), SCHEMA)
    found = complete(client, max_tokens=60, extra_body={"response_format": {"type": "regex", "regex": "a{2,5}b"}})
    assert re.fullmatch("a{2,5}b", found.choices[0].text)


@pytest.mark.parametrize("stream", [False, True])
def test_likeliest_tokens_of_each_position(client, stream):
    options = {"model": "tiny", "messages": [USER], "max_completion_tokens": 12, "temperature": 0, "stream": stream}
    answer = client.chat.completions.create(logprobs=True, top_logprobs=3, **options)
    tokens = []
    for part in answer if stream else [answer]:
        tokens += [token for choice in part.choices if choice.logprobs for token in choice.logprobs.content]
    assert 0 < len(tokens) <= 12
    for token in tokens:
        values = [each.logprob for each in token.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True)
        assert token.logprob == pytest.approx(values[0], abs=1e-5)  # greedy
    found = complete(client, temperature=0, max_tokens=4, logprobs=2).choices[0].logprobs
    for value, likeliest in zip(found.token_logprobs, found.top_logprobs, strict=True):  # by text: equal texts are one
        assert 1 <= len(likeliest) <= 2 and max(likeliest.values()) == pytest.approx(value, abs=1e-5)


def test_fields_of_a_request_change_only_that_request(client):
    ids = TOKENIZER(PROMPT, return_tensors="pt")["input_ids"][0]
    plain = greedy_alone(TARGET, ids, NEW).tolist()
    common = Counter(plain).most_common(1)[0][0]
    for fields, own in (
        ({"logit_bias": {str(plain[0]): -100}}, {"processors": [bass.Bias({plain[0]: -100.0})]}),
        ({"frequency_penalty": 2.0}, {"processors": [bass.Penalties(frequency=2.0)]}),
        ({"presence_penalty": 1.5, "draft_length": 0}, {"processors": [bass.Penalties(presence=1.5)]}),
        ({"stop_token_ids": [common]}, {"stop_token_ids": [common]}),
        (
            {"stop_token_ids": [common], "min_tokens": 9},
            {"stop_token_ids": [common], "processors": [bass.MinTokens(9)]},
        ),
    ):
        found = complete(client, temperature=0, extra_body={"ignore_eos": True, "seed": 3} | fields)
        with bass.Session(PAIR, draft_length=4) as session:
            row = session.submit(ids, max_new_tokens=NEW, ignore_eos=True, **own)
            while not session.idle:
                session.step()
            assert found.choices[0].text == session.result(row).text
            assert found.choices[0].bass["finish_reason"] == row.finish_reason
            assert session.result(row).sequence.tolist() != plain
        assert "draft_length" not in fields or found.bass["drafted"] == 0


def test_processors_without_a_possible_token_are_the_requests_fault(server):
    asked = {"response_format": {"type": "regex", "regex": "ab"}, "min_tokens": 8, "max_tokens": 12}
    for draft_length in (0, 3):
        answer = post(server, prompt=PROMPT, draft_length=draft_length, **asked)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "no_token"


def test_log_probabilities_end_where_the_text_ends(client):
    whole = complete(client, temperature=0, max_tokens=40, logprobs=0).choices[0]
    stop = whole.text[6:9]
    for options in ({}, {"stream": True}):
        answer = complete(client, temperature=0, max_tokens=40, logprobs=0, stop=stop, **options)
        choices = [each.choices[0] for each in (answer if options else [answer])]
        tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.tokens]
        assert "".join(tokens) == "".join(choice.text for choice in choices) == whole.text[: whole.text.index(stop)]


def test_answer_counts_drafts(client):
    own = complete(client, temperature=0, max_tokens=40).bass
    out = bass.generate(PAIR, PROMPT, max_new_tokens=40, draft_length=3).trace
    assert (own["drafted"], own["accepted"]) == (out.steps.drafted.sum(), out.steps.accepted.sum())
    assert own["tokens_per_step"] == pytest.approx(out.summary()["tokens_per_step"], abs=1e-3)


def test_closed_stream_ends_its_rows(server, client):
    with held(server, after=4):
        stream = complete(client, n=4, max_tokens=400, seed=0, stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        assert server.gate.rows == 4
        stream.close()
        queue = server.engine._engine.thread._work_queue
        until(lambda: queue.qsize() or not server.gate.rows)  # the server has noticed
    until(lambda: server.gate.rows == 0)
    assert 'bass_rows_total{reason="cancelled"}' in metrics(server)


def test_client_that_times_out_ends_its_rows(server, client):
    with pytest.raises(openai.APITimeoutError):
        complete(client.with_options(timeout=0.3), n=30, max_tokens=450, temperature=0)
    until(lambda: server.gate.rows == 0, 5)


def test_model_is_listed_and_no_other_is_served(client):
    (model,) = client.models.list().data
    assert model.id == client.models.retrieve("tiny").id == "tiny" and model.max_model_len == 512
    with pytest.raises(openai.NotFoundError, match="'gpt-9' is not served here"):
        complete(client, model="gpt-9")


def metrics(server) -> str:
    return httpx.get(f"{server.address}/metrics", trust_env=False, verify=False).text


def test_metrics_count_tokens(server, client):
    def generated() -> float:
        return float(re.search(r'bass_tokens_total{kind="generated"} (\S+)', metrics(server))[1])

    before = generated()
    complete(client, temperature=0, max_tokens=7)
    assert generated() >= before + 7
    assert "bass_rows_waiting 0.0" in metrics(server) and "bass_step_seconds_bucket" in metrics(server)


def test_metrics_count_draft_tokens_by_position():
    counts = Counts()
    counts.step(bass.StepEvent(0, [0, 1], [[5, 6, 7], [8]], drafted=[3, 1], accepted=[2, 0]), 0.1)
    found = re.findall(r'position_tokens_total{kind="(.)\w+",position="(.)"} (\S+)', counts.text().decode())
    assert found == [(*"d1", "2.0"), (*"d2", "1.0"), (*"d3", "1.0"), (*"a1", "1.0"), (*"a2", "1.0")]


REFUSED = [
    ("prompt", {}), ("prompt", {"prompt": ""}), ("prompt", {"prompt": []}), ("prompt", {"prompt": [[]]}),
    ("prompt", {"prompt": [BYTES]}), ("prompt", {"prompt": {"text": "x"}}), ("prompt", {"prompt": "x" * 600}),
    ("max_tokens", {"max_tokens": 5000}), ("max_tokens", {"max_tokens": "5"}), ("max_tokens", {"max_tokens": -1}),
    ("temperature", {"temperature": -0.1}), ("temperature", {"temperature": True}), ("top_p", {"top_p": 0}),
    ("top_k", {"top_k": 1.5}), ("seed", {"seed": 2**63}), ("n", {"n": 0}), ("n", {"n": 45}), ("stop.0", {"stop": [""]}),
    ("stop", {"stop": ["a"] * 17}), ("logprobs", {"logprobs": 21}), ("logit_bias.x.[key]", {"logit_bias": {"x": 1}}),
    ("logit_bias", {"logit_bias": {"999": 1}}), ("logit_bias.5", {"logit_bias": {"5": 101}}),
    ("presence_penalty", {"presence_penalty": 2.5}), ("draft_length", {"draft_length": -1}),
    ("response_format", {"response_format": {"type": "regex", "regex": "("}}),
    ("response_format", {"response_format": {"type": "yaml"}}), ("stop_token_ids", {"stop_token_ids": [999]}),
    ("logit_bias.03.[key]", {"logit_bias": {"3": 1, "03": 2}}),
    ("response_format", {"response_format": FORMAT | {"json_schema": {"schema": {"title": "x" * 70_000}}}}),
    ("response_format.regex.regex", {"response_format": {"type": "regex", "regex": "ab" * 40_000}}),
    ("response_format.json_schema.json_schema.schema", {"response_format": {"type": "json_schema", "json_schema": {}}}),
    ("response_format", {"response_format": {"type": "json_object"}, "ignore_eos": True}), ("echo", {"echo": True}),
    ("timeout", {"timeout": 0}),
    ("stream_options", {"stream_options": {"include_usage": True}}), ("mirostat", {"mirostat": 2}),
    ("prompt.1", {"prompt": [1, -1]}), ("prompt.1.0", {"prompt": [[1], [2**31]]}), ("prompt.1", {"prompt": ["a", 1]}),
    ("stream_options", {"stream_options": True}), ("stream_options.x", {"stream_options": {"x": 1}}),
    ("logit_bias", {"logit_bias": [1]}),
]  # fmt: skip
USER = {"role": "user", "content": "Hello"}
REFUSED_MESSAGES = [
    ("messages", None), ("messages", []), ("messages", "hi"), ("messages.0", ["hi"]), ("messages.0.role", [{}]),
    ("messages.1.tool_calls", [USER, {"role": "assistant", "tool_calls": [{"id": "a"}]}]),
    ("messages.0.content", [USER | {"content": 5}]), ("messages.0.content", [USER | {"content": None}]),
    ("messages.0.content.0", [USER | {"content": ["hi"]}]),
    ("messages.0.content.0.type", [USER | {"content": [{"type": "image_url"}]}]),
]  # fmt: skip


def test_unsupported_values_are_refused_by_field(server):
    cases = [(field, {} if field.startswith("prompt") else {"prompt": PROMPT}, body) for field, body in REFUSED]
    cases += [(field, {}, {"path": "/v1/chat/completions", "messages": given}) for field, given in REFUSED_MESSAGES]
    for field, prompt, body in cases:
        answer = post(server, **prompt, **body)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == field, body
        assert error["type"] == "invalid_request_error"
        assert error["message"].startswith(f"{field}: ") and "\n" not in error["message"]


def test_null_fields_of_messages_are_absent(client):
    options = {"model": "tiny", "max_completion_tokens": 4, "temperature": 0}
    said = client.chat.completions.create(messages=[USER], **options).choices[0].message.model_dump()
    assert said["tool_calls"] is said["refusal"] is None
    parts = USER | {"content": [{"type": "text", "text": "Hello", "cache_control": None}]}
    short = {"role": "assistant", "content": said["content"]}
    empty = {"tool_calls": [], "annotations": [], "function_call": {}, "audio": None, "refusal": ""}
    texts = [client.chat.completions.create(messages=given, **options).choices[0].message.content for given in
             ([USER, said, parts], [USER, short, USER], [USER, short | empty, USER])]  # fmt: skip
    assert len(set(texts)) == 1


def test_assistant_message_without_content_is_an_empty_text(client):
    options = {"model": "tiny", "max_completion_tokens": 4, "temperature": 0}
    silent = [{"role": "assistant"}, {"role": "assistant", "content": None}, {"role": "assistant", "content": ""}]
    texts = [client.chat.completions.create(messages=[USER, each, USER], **options).choices[0].message.content for each
             in silent]  # fmt: skip
    assert len(set(texts)) == 1 and texts[0] == text_alone("# Hello\n# \n# Hello\n", 4)


def test_fields_without_effect_are_accepted(client):
    options = {"model": "tiny", "messages": [USER], "max_completion_tokens": 4, "temperature": 0}
    ignored = {"service_tier": "auto", "parallel_tool_calls": False, "reasoning_effort": "low", "user": "me"}
    ignored |= {"safety_identifier": "a", "prompt_cache_key": "b", "verbosity": "low", "metadata": {"a": "b"}}
    texts = [client.chat.completions.create(**options | own).choices[0].message.content for own in ({}, ignored)]
    assert texts[0] == texts[1]


def test_usage_is_null_before_the_last_chunk(server):
    for path, prompt in (("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", {"messages": [USER]})):
        options = {"max_tokens": NEW, "stream": True, "temperature": 0}
        for wanted in (True, False):
            answer = post(server, path, **prompt, **options, stream_options={"include_usage": wanted})
            *chunks, last = (json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {"))
            assert len(chunks) > 1 and (last["usage"] is not None if wanted else "usage" not in last)
            assert all(chunk["usage"] is None if wanted else "usage" not in chunk for chunk in chunks)


def test_documented_client_works(capsys):
    text = (ROOT / "docs/SERVING.md").read_text(encoding="utf-8")
    (program,) = [block for block in re.findall(r"```text\n(.*?)```", text, re.DOTALL) if "OpenAI(" in block]
    with served(PAIR, "embedded") as server:
        exec(program.replace("http://127.0.0.1:8000", server.address), {})
    assert "'seed': 7" in capsys.readouterr().out
