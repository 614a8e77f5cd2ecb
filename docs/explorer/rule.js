// Batched speculative decoding, complete: random numbers, the rule, and a step of a batch.
//
// A small draft model proposes k tokens for each row (text) of a batch. The large target model reads all proposals in
// one pass. A rule keeps a prefix of each row's proposals and adds one token of the target's own. The texts have
// exactly the target's distribution (Leviathan et al. 2023; for batches BASS, arXiv 2404.15778).
// Lines after "//>" are quoted from the Python engine in bass_core. Tests compare both engines token by token.
// Names: x draft tokens, q their distributions, p the target's distributions, u random numbers in [0, 1).

// --- Random numbers: exactness/randomness.py -------------------------------------------------------------------------
// Each number is a hash of (seed, row, step, purpose, slot). A row draws the same numbers alone and in every batch.

const WORD = 2n ** 64n - 1n, GOLDEN = 0x9e3779b97f4a7c15n;
const DRAFT = 1n, ACCEPT = 2n, TARGET = 3n; // purposes

function mix(x) {
  x &= WORD;                                               //> x &= _WORD
  x = ((x ^ (x >> 30n)) * 0xbf58476d1ce4e5b9n) & WORD;     //> x = (x ^ x >> 30) * _MIX_1 & _WORD
  x = ((x ^ (x >> 27n)) * 0x94d049bb133111ebn) & WORD;     //> x = (x ^ x >> 27) * _MIX_2 & _WORD
  return x ^ (x >> 31n);                                   //> return x ^ x >> 31
}

export function stream(seed, row) { //> return _signed(_mix_word(_mix_word(seed + _GOLDEN) + row * _GOLDEN))
  return mix(mix(BigInt(seed) + GOLDEN) + BigInt(row) * GOLDEN);
}

export function uniform({ stream, step }, purpose, slot = 0) {
  const base = mix(stream + BigInt(step) * GOLDEN);        //> base = _mix(key.stream + key.counter * _GOLDEN)
  const bits = mix(base + (BigInt(slot) * 8n + purpose) * GOLDEN);
  return Number(bits >> 12n) * 2 ** -52;                   //> return _shift_right(bits, 12).double() * 2.0**-52
}

// --- Distributions: exactness/sampling.py ---------------------------------------------------------------------------
/** Return softmax(logits / temperature). Greedy decoding, at temperature 0, only shows the result for temperature 1. */
export function distribution(logits, temperature) {
  const largest = logits.reduce((a, b) => Math.max(a, b));
  const weights = logits.map((logit) => Math.exp((logit - largest) / (temperature || 1)));
  const total = weights.reduce((a, b) => a + b);
  return weights.map((weight) => weight / total);
}

export const likeliest = (probs) => probs.reduce((best, prob, id) => (prob > probs[best] ? id : best), 0);

/** Draw from weights: return the first id whose cumulative weight exceeds u times the total. */
export function draw(weights, u) { //> ids = torch.searchsorted(cumulative, u[:, None] * cumulative[:, -1:], right=True)
  const total = weights.reduce((a, b) => a + b);
  let sum = 0;
  return weights.findIndex((weight) => (sum += weight) > u * total);
}

// --- The rule: exactness/verification.py ----------------------------------------------------------------------------
/** Accept a prefix of a row's draft tokens x, and choose the target's token after it. q: k, p: k + 1 distributions.
 *  random(purpose, slot): a number in [0, 1). chances, numbers, weights: what the decision used, for display. */
export function verify(x, q, p, random) {
  const chances = [], numbers = [];
  let accepted = 0;
  for (; accepted < x.length; accepted++) {
    const p_x = p[accepted][x[accepted]], q_x = q[accepted][x[accepted]];
    chances.push(Math.min(1, p_x / q_x));                  //> ratio = p_x.double() / q_x.double()
    numbers.push(random(ACCEPT, accepted));
    if (!(numbers[accepted] < chances[accepted])) break;   //> return uniform(key) < probability
  }
  let weights = p[accepted]; // all accepted: a bonus token, drawn from p. Else a recovered token, from max(0, p - q):
  if (accepted < x.length) {                               //> residual = (scaled - q_next).clamp(min=0)
    const residual = weights.map((p_y, y) => Math.max(0, p_y - q[accepted][y]));
    if (residual.some((weight) => weight > 0)) weights = residual; // no mass: p equals q up to rounding
  }
  return { accepted, next: draw(weights, random(TARGET, 0)), chances, numbers, weights };
}

/** Greedy decoding: accept draft tokens while they equal the target's choices, then take the target's choice. */
export function matching(x, p) { //> accepted = leading((drafted == choices[:, :-1]) & (slots < lengths[:, None]))
  const choices = p.map(likeliest), wrong = x.findIndex((token, slot) => token !== choices[slot]);
  const accepted = wrong < 0 ? x.length : wrong;
  return { accepted, next: choices[accepted] };
}

// --- The loop: session.py -------------------------------------------------------------------------------------------
/** Rows that decode together. A model's `feed(rows)` reads the tokens that its cache lacks, in one pass over all rows,
 *  and returns the logits after each row's last `wanted` tokens. `cached[row]`: number of valid tokens in the cache.
 *  lockStep: all rows keep only as many draft tokens as the worst row. BASS does not wait; its rows are ragged. */
export class Batch {
  constructor(target, draft, prompts, { k, temperature, seed, newTokens, endOfText, lockStep = false }) {
    Object.assign(this, { target, draft, k, temperature, endOfText, lockStep, steps: 0 });
    const row = (prompt, id) => ({ id, tokens: [...prompt], limit: prompt.length + newTokens, step: 0, ended: false });
    this.rows = prompts.map((prompt, id) => ({ ...row(prompt, id), stream: stream(seed, id) }));
  }

  get live() { return this.rows.filter((row) => !row.ended); }

  /** Decode one step of all live rows. Return each row's drafts and decision. The first step reads the prompts. */
  step() {
    const { target, draft, temperature } = this, greedy = temperature === 0, k = this.steps++ ? this.k : 0;
    //> return planned, np.minimum(planned, rows.remaining - 1)
    const turns = this.live.map((row) => ({ row, x: [], q: [], k: Math.min(k, row.limit - row.tokens.length - 1) }));
    const read = ({ row, x }, wanted) => ({ id: row.id, tokens: [...row.tokens, ...x], wanted });

    // 1. Draft: each pass of the small model adds a token to every row.
    for (let slot = 0; turns.some((turn) => turn.k > slot); slot++) {
      const drafting = turns.filter((turn) => turn.k > slot);
      const logits = draft.feed(drafting.map((turn) => read(turn, 1)));
      for (const [i, { row, x, q }] of drafting.entries()) {
        q.push(distribution(logits[i][0], temperature));
        x.push(greedy ? likeliest(q[slot]) : draw(q[slot], uniform(row, DRAFT, slot)));
      }
    }

    // 2. Verify: one pass of the large model over all draft tokens of all rows.
    const logits = target.feed(turns.map((turn) => read(turn, turn.x.length + 1)));
    for (const [i, turn] of turns.entries()) {
      const { row, x, q } = turn, p = logits[i].map((each) => distribution(each, temperature));
      const decision = greedy ? matching(x, p) : verify(x, q, p, (purpose, slot) => uniform(row, purpose, slot));
      Object.assign(turn, { p, passed: decision.accepted }, decision);
    }
    const least = Math.min(...turns.map((turn) => turn.accepted));
    const cut = turns.filter((turn) => this.lockStep && turn.accepted > least);
    for (const turn of cut) Object.assign(turn, { accepted: least, next: turn.x[least] });

    // 3. Commit. A rejected token costs nothing: only the number of valid tokens in the caches changes.
    for (const turn of turns) {
      const { row, x, accepted, next } = turn, tokens = [...x.slice(0, accepted), next];
      const end = tokens.indexOf(this.endOfText);
      turn.tokens = end < 0 ? tokens : tokens.slice(0, end + 1);
      row.tokens.push(...turn.tokens);
      row.step++;                                          //> self.steps[rows] += fine
      row.ended = end >= 0 || row.tokens.length >= row.limit;
      for (const model of [target, draft]) model.cached[row.id] = Math.min(model.cached[row.id], row.tokens.length - 1);
    }
    return turns;
  }
}
