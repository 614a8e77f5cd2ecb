// Calls of the explorer's modules, for test_web_explorer.py.

import { recordedClock } from "/docs/explorer/clock.js";
import { Llama, Runner, safetensors } from "/docs/explorer/llama.js";
import { arena } from "/docs/explorer/matmul.js";
import { Batch } from "/docs/explorer/rule.js";
import { Tokenizer } from "/docs/explorer/tokenizer.js";

const file = (path) => fetch(`/bass_core/assets/${path}`);
const tokenizer = async () => new Tokenizer(await (await file("target/tokenizer.json")).json());

/** Decisions of a rule, given as source text. */
export async function decide([source, vectors]) {
  const rule = await import(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
  return vectors.map(({ seed, row, step, x, q, p }) => {
    const key = { stream: rule.stream(seed, row), step }, floats = (rows) => rows.map((each) => Float32Array.from(each));
    const random = (purpose, slot) => rule.uniform(key, purpose, slot);
    const token = rule.verify(x, floats(q), floats(p), random), greedy = rule.matching(x, floats(p));
    const numbers = [1n, 2n, 3n].map((purpose) => random(purpose, x.length));
    return [token.accepted, token.next, greedy.accepted, greedy.next, ...numbers];
  });
}

export async function decode([simd, texts, options]) {
  const memory = await arena(240, simd), { encode, end } = await bound();
  const load = async (name) => {
    const tensors = safetensors(await (await file(`${name}/model.safetensors`)).arrayBuffer(), memory);
    return new Runner(new Llama(await (await file(`${name}/config.json`)).json(), tensors, memory), texts.length, 128);
  };
  const prompts = texts.map(encode), kept = texts.map(() => []);
  const batch = new Batch(await load("target"), await load("draft"), prompts, { ...options, endOfText: end });
  while (batch.live.length) for (const { row, accepted } of batch.step()) kept[row.id].push(accepted);
  return [memory.name, batch.rows.map(({ id, tokens }) => tokens.slice(prompts[id].length)), kept];
}

async function bound() {
  const made = await tokenizer();
  return { encode: (text) => made.encode(text), end: made.end };
}

export async function encode(texts) {
  return texts.map((await bound()).encode);
}

export async function seconds([path, steps]) {
  const clock = recordedClock(await (await fetch(path)).json());
  return steps.map(([lengths, k]) => clock({ lengths, k, drafter: true }));
}

/** Plant each mutant into the rule. Return the mutants with the decisions of the true rule. */
export async function survivors([source, vectors]) {
  const expected = JSON.stringify(await decide([source, vectors])), found = [];
  for (const [old, changed] of MUTANTS) {
    if (source.split(old).length !== 2) throw new Error(`the rule has not one ${old}`);
    const outcome = await decide([source.replace(old, () => changed), vectors]);
    if (JSON.stringify(outcome) === expected) found.push(changed);
  }
  return found;
}

const MUTANTS = [
  ["Math.min(1, p_x / q_x)", "Math.min(1, q_x / p_x)"],
  ["numbers[accepted] < chances[accepted]", "numbers[accepted] > chances[accepted]"],
  ["Math.max(0, p_y - q[accepted][y])", "Math.abs(p_y - q[accepted][y])"],
  ["if (accepted < x.length) {", "if (false) {"],
  ["let weights = p[accepted];", "let weights = p[0];"],
  ["random(ACCEPT, accepted)", "random(ACCEPT, 0)"],
  ["random(TARGET, 0)", "random(ACCEPT, accepted)"],
  ["(sum += weight) > u * total", "(sum += weight) > u"],
  ["wrong < 0 ? x.length", "wrong < 0 ? x.length - 1"],
  ["prob > probs[best]", "prob < probs[best]"],
  ["BigInt(slot) * 8n + purpose", "BigInt(slot) + purpose"],
  [">> 12n", ">> 13n"],
];
