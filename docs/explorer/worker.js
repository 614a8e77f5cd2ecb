// Loads the models and decodes, off the page's thread: a speculative and a regular batch race on the chosen clock.

import { recordedClock } from "./clock.js";
import { guesses, Llama, Runner, safetensors } from "./llama.js";
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

const models = {}, clocks = {};
let memory, weightsEnd, tokenizer, prompts, run;
let wake = () => {}, queue = []; // requests of the page

self.onmessage = ({ data }) => { queue.push(data); wake(); };

async function main() {
  await load();
  for (let running = false; ; ) {
    try {
      if (!queue.length && !(running && run)) await new Promise((resolve) => { wake = resolve; });
      const wait = running && run ? run.due - performance.now() : 0;
      await new Promise((resolve) => setTimeout(resolve, wait)); // messages arrive meanwhile
      const { start, go, one } = queue.shift() ?? {};
      if (start && queue.some((later) => later.start)) continue; // superseded
      if (start) await begin(start);
      if (go !== undefined) running = go;
      if (running || one) step(!running);
    } catch (error) {
      run = undefined;
      postMessage({ kind: "stop", message: error.message });
    }
  }
}

// --- Loading --------------------------------------------------------------------------------------------------------
async function load() {
  memory = await arena(MEGABYTES, !new URL(location).searchParams.has("plain"));
  const [file, problems, ...records] = await Promise.all([
    json("bass_core/assets/target/tokenizer.json"), answer("bass_lab/assets/mini_set.jsonl"),
    ...Object.values(RECORDS).map(json), loadModel("target"), loadModel("draft"),
  ]);
  tokenizer = new Tokenizer(file);
  prompts = (await problems.text()).trim().split("\n").slice(0, 8).map((line) => JSON.parse(line).prompt);
  const sources = {};
  for (const [i, [clock, path]] of Object.entries(RECORDS).entries()) {
    clocks[clock] = recordedClock(records[i]);
    sources[clock] = { ...records[i].measured, device: records[i].device, path };
  }
  postMessage({ kind: "ready", arithmetic: memory.name, sources });
}

async function answer(path) {
  const found = await fetch(new URL(path, ROOT));
  if (found.ok) return found;
  throw new Error(`${path} is missing (HTTP ${found.status}). Serve the root folder of the repository or of its site.`);
}
const json = async (path) => (await answer(path)).json();

const progress = { loaded: 0, total: 0 };
async function loadModel(name) {
  const folder = `bass_core/assets/${name}/`, config = await json(folder + "config.json");
  const { body, headers } = await answer(folder + "model.safetensors");
  progress.total += Number(headers.get("Content-Length") ?? 0);
  const transform = (part, controller) => {
    controller.enqueue(part);
    progress.loaded += part.length;
    postMessage({ kind: "progress", ...progress });
  };
  const file = await new Response(body.pipeThrough(new TransformStream({ transform }))).arrayBuffer();
  models[name] = new Llama(config, safetensors(file, memory), memory);
  weightsEnd = memory.used;
}

// --- The race -------------------------------------------------------------------------------------------------------
async function begin({ k, rows, temperature, seed, draft, lockStep, clock, prompt, id }) {
  run = undefined;
  memory.used = weightsEnd; // frees the caches of the last run
  if (!models[draft] && draft !== "guesses") await loadModel(draft);
  const texts = prompt ? Array(rows).fill(prompt) : prompts.slice(0, rows);
  const tokens = texts.map((text) => tokenizer.encode(text));
  const longest = Math.max(...tokens.map((row) => row.length)), most = models.target.context - NEW_TOKENS;
  if (longest > most) throw new RangeError(`the prompt has ${longest} tokens, and the models read up to ${most}.`);
  const runner = (model) => new Runner(model, rows, Math.ceil((longest + NEW_TOKENS) / 8) * 8);
  const drafter = models[draft] ? runner(models[draft]) : guesses(models.target.vocabulary, temperature);
  const common = { temperature, seed, newTokens: NEW_TOKENS, endOfText: tokenizer.end };
  const batch = (drafting, own) => new Batch(runner(models.target), drafting, tokens, { ...common, ...own });
  const batches = [batch(drafter, { k, lockStep }), batch({ cached: [] }, { k: 0 })]; // regular decoding drafts nothing
  const lanes = batches.map((each) => ({ batch: each, seconds: 0, tokens: 0 }));
  const decoders = texts.map(() => tokenizer.decoder());
  run = { id, clock, drafter: draft !== "guesses", lanes, decoders, computing: 0, due: 0 };
  postMessage({ kind: "started", id, texts });
  for (const i of [0, 1]) decode(i); // reads the prompts, which no clock counts
}

/** Decode the next step of the batch that is behind on the clock. whole: also let regular decoding catch up. */
function step(whole) {
  if (!run) return;
  const { lanes: [ours, regular] } = run, left = ({ batch }) => batch.live.length > 0;
  const behind = () => (left(regular) && (!left(ours) || regular.seconds < ours.seconds) ? 1 : 0);
  do decode(behind()); while (whole && left(regular) && behind() === 1);
  if (left(ours) || left(regular)) return;
  const texts = (lane) => lane.batch.rows.map((row) => row.tokens.join());
  const same = texts(ours).filter((text, i) => text === texts(regular)[i]).length;
  postMessage({ kind: "finished", id: run.id, same, computing: run.computing });
  run = undefined;
}

function decode(i) {
  const lane = run.lanes[i], { batch } = lane, began = performance.now();
  const lengths = batch.live.map((row) => row.tokens.length - 1); // the last token is not cached
  const turns = batch.step(), passes = batch.steps - 1, milliseconds = performance.now() - began;
  run.computing += milliseconds;
  if (i === 0) run.due = began + PACE;
  if (passes) {
    const k = Math.max(...turns.map((turn) => turn.x.length));
    lane.seconds += clocks[run.clock]?.({ lengths, k, drafter: run.drafter }) ?? milliseconds / 1e3;
    lane.tokens += turns.flatMap((turn) => turn.tokens).length;
  }
  const cells = i === 0 ? turns.map((turn) => shown(turn, batch)) : [];
  postMessage({ kind: "step", id: run.id, lane: i, passes, seconds: lane.seconds, tokens: lane.tokens, turns: cells });
}

// --- What the page shows of a row's step ----------------------------------------------------------------------------
function shown(turn, { temperature }) {
  const { row, x, q, p, accepted, passed, next, tokens, chances = [], numbers = [], weights } = turn;
  const isCut = accepted < passed; // lock-step: the rule would have kept more
  const kept = Math.min(accepted, tokens.length), isOver = tokens.length <= accepted; // the text ended in a draft token
  const stateOf = (slot) => {
    if (slot < kept) return "kept";
    if (isOver) return "after";
    if (slot < passed) return slot === accepted ? "last" : "wasted";
    if (slot > passed) return "unread";
    return slot === x.length ? "bonus" : "rejected";
  };
  const all = passed === x.length && !isCut && !isOver ? [...x, next] : x; // with the bonus token
  const slots = all.map((token, slot) => {
    const state = stateOf(slot), bars = top([p[slot], q[slot]], token);
    const found = { state, token: name(token), chance: chances[slot], number: numbers[slot], bars };
    if (state !== "rejected" || isCut) return found;
    return { ...found, next: name(next), residual: temperature ? top([weights], next) : [] };
  });
  const texts = tokens.map((token, i) => [run.decoders[row.id](token), i < accepted || isCut]);
  return { row: row.id, accepted: kept, drafted: x.length, slots, texts };
}

/** Return `chosen` and the three most probable other tokens, with their probabilities in each distribution. */
function top(distributions, chosen) {
  const known = distributions.filter(Boolean), most = (id) => Math.max(...known.map((probs) => probs[id]));
  const likely = [...known[0].keys()].filter((id) => id !== chosen && most(id) > 0.001);
  const ids = [chosen, ...likely.sort((a, b) => most(b) - most(a)).slice(0, 3)];
  return ids.map((id) => ({ token: name(id), probs: known.map((probs) => probs[id]) }));
}

/** Return a token in print: spaces and newlines as signs. */
function name(id) {
  if (id === tokenizer.end) return "(end)";
  return tokenizer.decoder()(id).replaceAll(" ", "␣").replaceAll("\n", "↵") || "(part of a letter)";
}

main().catch((error) => postMessage({ kind: "stop", message: error.message }));
