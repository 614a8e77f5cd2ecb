// Loads the models and decodes, off the page's thread: a speculative and a regular batch race on the chosen clock.

import { recordedClock } from "./clock.js";
import { Guesses, Llama, Runner, safetensors } from "./llama.js";
import { arena } from "./matmul.js";
import { Batch } from "./rule.js";
import { Tokenizer } from "./tokenizer.js";

const ROOT = new URL("../../", import.meta.url); // of the repository, or of the site that `make docs` builds
const RECORDS = {
  h200: "bass_lab/assets/records/costs_h200.json",
  epyc: "bass_core/assets/costs/amd-epyc-2-threads-dfc6af2c9333.json",
};
const MEGABYTES = 96; // weights, caches and activations
const NEW_TOKENS = 64;
const PACE = 100; // least milliseconds between two steps, so that eyes can follow
const SHOWN = 4; // tokens of a distribution

const models = {}, clocks = {};
let memory, tokenizer, endOfText, prompts, run;
const queue = []; // requests of the page
let wake = () => {};

self.onmessage = ({ data }) => {
  queue.push(data);
  wake();
};

async function main() {
  await load();
  for (let running = false; ; ) {
    try {
      if (!queue.length && !(running && run)) await new Promise((resolve) => { wake = resolve; });
      await new Promise((resolve) => setTimeout(resolve, running && run ? run.due - performance.now() : 0)); // receives messages
      const { start, go, steps } = queue.shift() ?? {};
      if (start && queue.some((later) => later.start)) continue; // superseded
      if (start) await begin(start);
      if (go !== undefined) running = go;
      for (let i = 0; i < (steps ?? 0); i++) step(true);
      if (running) step(false);
    } catch (error) {
      run = undefined;
      postMessage({ error: error.message });
    }
  }
}

// --- Loading -------------------------------------------------------------------------------------------------------

async function load() {
  memory = await arena(MEGABYTES, !new URL(location).searchParams.has("plain"));
  const [file, problems, ...records] = await Promise.all([
    json("bass_core/assets/target/tokenizer.json"), answer("bass_lab/assets/mini_set.jsonl").then((found) => found.text()),
    ...Object.values(RECORDS).map(json), loadModel("target"), loadModel("draft"),
  ]);
  tokenizer = new Tokenizer(file);
  endOfText = file.added_tokens[0].id;
  prompts = problems.trim().split("\n").slice(0, 8).map((line) => JSON.parse(line).prompt);
  models.guesses = new Guesses(models.target.vocabulary);
  for (const [i, name] of Object.keys(RECORDS).entries()) clocks[name] = recordedClock(records[i]);
  const sources = Object.entries(RECORDS).map(([name, path], i) => [name, { device: records[i].device, path, ...records[i].measured }]);
  postMessage({ ready: memory.name, sources: Object.fromEntries(sources) });
}

async function answer(path) {
  const found = await fetch(new URL(path, ROOT));
  if (!found.ok) throw new Error(`${path} is missing (HTTP ${found.status}). Serve the repository's root folder, or the site of make docs.`);
  return found;
}
const json = async (path) => (await answer(path)).json();

const progress = { loaded: 0, total: 0 };
async function loadModel(name) {
  const folder = `bass_core/assets/${name}/`, found = await answer(folder + "model.safetensors"), parts = [];
  progress.total += Number(found.headers.get("Content-Length") ?? 0);
  for await (const part of chunks(found.body)) {
    parts.push(part);
    progress.loaded += part.length;
    postMessage({ progress });
  }
  models[name] = new Llama(await json(folder + "config.json"), safetensors(await new Blob(parts).arrayBuffer(), memory), memory);
}

async function* chunks(body) { // Safari cannot iterate over a stream
  for (const reader = body.getReader(); ; ) {
    const { done, value } = await reader.read();
    if (done) return;
    yield value;
  }
}

// --- The race ------------------------------------------------------------------------------------------------------

async function begin({ k, rows, temperature, seed, draft, lockStep, clock, prompt, id }) {
  if (run) memory.used = run.mark;
  run = undefined;
  if (!models[draft]) await loadModel(draft);
  const texts = prompt ? Array(rows).fill(prompt) : prompts.slice(0, rows);
  const tokens = texts.map((text) => tokenizer.encode(text)), mark = memory.used;
  const longest = Math.max(...tokens.map((row) => row.length)), { context } = models.target;
  if (longest + NEW_TOKENS > context) throw new RangeError(`The prompt has ${longest} tokens. The models read up to ${context - NEW_TOKENS}.`);
  try {
    const runner = (model) => new Runner(model, rows, Math.ceil((longest + NEW_TOKENS) / 8) * 8);
    const options = { k, temperature, seed, newTokens: NEW_TOKENS, endOfText };
    const drafter = models[draft] instanceof Llama ? runner(models[draft]) : models[draft];
    const lanes = [
      new Batch(runner(models.target), drafter, tokens, { ...options, lockStep }),
      new Batch(runner(models.target), models.guesses, tokens, { ...options, k: 0 }), // regular decoding drafts nothing
    ];
    const decoders = texts.map(() => tokenizer.decoder());
    run = { id, mark, clock, drafter: draft !== "guesses", lanes, decoders, seconds: [0, 0], tokens: [0, 0], computing: 0, due: 0 };
  } catch (error) {
    memory.used = mark;
    throw error;
  }
  postMessage({ started: texts, id });
  for (const lane of [0, 1]) decode(lane); // reads the prompts, which no clock counts
}

/** Decode the next step of the batch that is behind on the clock. whole: also let regular decoding catch up. */
function step(whole) {
  if (!run) return;
  const { lanes, seconds } = run, left = () => lanes.map((lane) => lane.live.length > 0);
  const behind = () => (left()[1] && (!left()[0] || seconds[1] < seconds[0]) ? 1 : 0);
  do decode(behind()); while (whole && left()[1] && behind() === 1);
  if (left().includes(true)) return;
  const [ours, regular] = lanes.map((lane) => lane.rows.map((row) => row.tokens.join()));
  postMessage({ id: run.id, finished: { same: ours.filter((text, i) => text === regular[i]).length, computing: run.computing } });
  memory.used = run.mark;
  run = undefined;
}

function decode(lane) {
  const batch = run.lanes[lane], lengths = batch.live.map((row) => row.tokens.length - 1), began = performance.now();
  const turns = batch.step(), milliseconds = performance.now() - began;
  const k = Math.max(...turns.map((turn) => turn.x.length)), first = batch.steps === 1;
  run.computing += milliseconds;
  if (!first) run.seconds[lane] += clocks[run.clock]?.({ lengths, k, drafter: run.drafter }) ?? milliseconds / 1e3;
  for (const { tokens } of turns) run.tokens[lane] += first ? 0 : tokens.length;
  if (lane === 0) run.due = began + PACE;
  postMessage({
    id: run.id, lane, passes: batch.steps - 1, seconds: run.seconds[lane], tokens: run.tokens[lane],
    turns: lane === 0 ? turns.map((turn) => shown(turn, batch)) : [],
  });
}

// --- What the page shows of a row's step ---------------------------------------------------------------------------

function shown(turn, { temperature }) {
  const { row, x, q, p, accepted, passed = accepted, next, tokens, chances = [], numbers = [], weights } = turn;
  const waits = accepted < passed, end = x.length === passed; // lock-step cut this row; the target pass rejected nothing
  const slots = p.map((target, slot) => {
    const state = slot < accepted ? "kept" : slot < passed ? (slot === accepted ? "last" : "wasted") : slot > passed ? "unread" : end ? "bonus" : "rejected";
    const replaced = state === "rejected" && !waits ? { next: name(next), residual: temperature ? top([weights], next) : [] } : {};
    const token = x[slot] ?? next;
    return { state, token: name(token), chance: chances[slot], number: numbers[slot], bars: top([target, q[slot]], token), ...replaced };
  });
  const texts = tokens.map((token, i) => [run.decoders[row.id](token), i < accepted || waits]);
  return { row: row.id, accepted, drafted: x.length, slots: waits && end ? slots.slice(0, -1) : slots, texts };
}

/** Return the most probable tokens of some distributions and `chosen`, with their probabilities. */
function top(distributions, chosen) {
  const known = distributions.filter(Boolean), most = (id) => Math.max(...known.map((probs) => probs[id]));
  const ids = [...known[0].keys()].filter((id) => id !== chosen && most(id) > 0.001).sort((a, b) => most(b) - most(a));
  return [chosen, ...ids.slice(0, SHOWN - 1)].map((id) => ({ token: name(id), probs: known.map((probs) => probs[id]) }));
}

/** Return a token in print: spaces and newlines as signs. */
function name(id) {
  if (id === endOfText) return "(end)";
  return tokenizer.decoder()(id).replaceAll(" ", "␣").replaceAll("\n", "↵") || "(part of a letter)";
}

main().catch((error) => postMessage({ error: error.message }));
