// One step of one row: a card for each draft token, with p, q and the decision.

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
  bonus: "+ bonus",
  last: "✓ kept, the last in lock-step",
  wasted: "– accepted, but another row is behind",
};
const number = (value) => (value >= 0.0005 || value === 0 ? value.toFixed(3) : value.toExponential(0));

/** Return the cards of a step. slots: of the worker. */
export function showStep({ slots }, { temperature }) {
  return slots.map(({ state, token, bars, chance, number: u, next, residual }, slot) => {
    const title = element("h3", {}, `${slot + 1} `, word(token), ` ${TITLES[state]}`);
    const legend = state === "bonus" ? "p" : "p (large) / q (small)";
    const card = element("div", { className: `slot ${state}` }, title, element("p", { className: "soft" }, legend), ...bars.map((bar, i) => showBar(bar, i === 0)));
    for (const line of decision(state, temperature, chance, u, bars[0].probs)) card.append(element("p", {}, ...line));
    if (next) card.append(element("p", {}, temperature ? "Drawn from max(0, p − q) instead: " : "Instead: ", word(next)), ...residual.map((bar) => showBar(bar, bar.token === next)));
    return card;
  });
}

function decision(state, temperature, chance, u, [p, q]) {
  if (state === "unread") return [["A guess before it was rejected."]];
  if (state === "bonus") return [[temperature ? "All guesses were kept: one more token, drawn from p." : "One more token: p’s most probable."]];
  if (temperature === 0) return [[state === "rejected" ? "It is not p’s most probable token." : "It is p’s most probable token."]];
  return [[`min(1, p/q) = min(1, ${number(p)}/${number(q)}) = ${number(chance)}`], [`random number u = ${number(u)} ${u < chance ? "<" : "≥"} ${number(chance)}`]];
}

function showBar({ token, probs }, chosen) {
  const bars = probs.map((prob) => { const bar = element("i"); bar.style.width = `${Math.min(1, prob) * 100}%`; return bar; });
  return element("div", { className: chosen ? "bar chosen" : "bar" }, word((chosen ? "▸" : " ") + token), element("div", {}, ...bars), element("small", {}, probs.map(number).join(" / ")));
}

const word = (text) => element("span", { className: "token" }, text);
