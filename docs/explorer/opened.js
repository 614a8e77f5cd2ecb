// One draft token of an opened step: p, q and the decision.

/** Return a new element with properties and children. */
export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

const TITLES = {
  kept: "✓ kept",
  rejected: "✗ rejected",
  unread: "– not looked at",
  bonus: "+ the large model’s own",
  last: "+ the large model’s own (the guess was right)",
  wasted: "– right, but lost: another row was wrong earlier",
  after: "– after the end",
};
const reason = { unread: "A guess before it was rejected.", after: "The text had ended before." };
const number = (value) => (value >= 0.0005 || value === 0 ? value.toFixed(3) : value.toExponential(0));
const word = (text) => element("span", { className: "token" }, text);
const line = (...parts) => element("p", {}, ...parts);

/** Return the card of a slot that the worker describes. */
export function showSlot({ state, token, bars, chance, number: u, next, residual }, slot, temperature) {
  const title = element("h3", {}, `${slot + 1} `, word(token), ` ${TITLES[state]}`);
  const card = element("div", { className: `slot ${state}` }, title, ...bars.map((bar) => showBar(bar, token, "pq")));
  const [p, q = 0] = bars[0].probs;
  if (reason[state]) card.append(line(reason[state]));
  else if (!temperature) card.append(line(`${state === "rejected" ? "Not" : "It is"} p’s likeliest token.`));
  else if (state === "bonus") card.append(line("Drawn from p."));
  else {
    card.append(line(`min(1, p/q) = min(1, ${number(p)} / ${number(q)}) = ${number(chance)}`));
    card.append(line(`random number ${number(u)} ${u < chance ? "<" : "≥"} ${number(chance)}`));
  }
  if (next) card.append(line(temperature ? "Drawn instead, from r = max(0, p − q), scaled: " : "Instead: ", word(next)));
  card.append(...(residual ?? []).map((bar) => showBar(bar, next, "r")));
  return card;
}

/** Return a token with a bar for each of its probabilities. names: a letter for each probability. */
function showBar({ token, probs }, chosen, names) {
  const made = element("div", { className: "bar" }, word((token === chosen ? "▸" : " ") + token));
  made.classList.toggle("chosen", token === chosen);
  for (const [i, prob] of probs.entries()) {
    const bar = element("i", { className: names[i] });
    bar.style.width = `${100 * prob}%`;
    made.append(element("small", {}, names[i]), element("div", {}, bar), element("small", {}, number(prob)));
  }
  return made;
}
