// The page: settings in the address, the race, the cells, the texts, the questions. The worker decodes.

import { element, showStep } from "./opened.js";
import { asPython } from "./python.js";

const $ = (id) => document.getElementById(id);
const controls = [...$("settings").elements].filter((control) => control.name);
const MEASURES = { // of a finished run, for the questions
  same: ["texts equal to regular decoding", 0],
  passes: ["passes of the large model", 0],
  yield: ["tokens per row and pass", 1],
  gain: ["times as fast as regular decoding", 2],
};
const MOST_PASSES = 63; // of regular decoding: 64 new tokens, the first from reading the prompt

const worker = new Worker(new URL(`worker.js${location.search.includes("plain") ? "?plain" : ""}`, import.meta.url), { type: "module" });
const results = new Map(); // finished runs, by the address of their settings
let sources, run, number = 0, whenFinished = () => {};

// --- Settings: the controls, and the address that a teacher can send -------------------------------------------------

const initial = (control) => control.defaultValue ?? control.options[0].value;
const changes = () => new URLSearchParams(controls.filter((each) => each.value !== initial(each)).map(({ name, value }) => [name, value])).toString();

/** Set all controls; absent names get their initial values. Return sentences about values that the page does not take. */
function setControls(values) {
  return controls.map((control) => {
    const asked = values.get(control.name) ?? initial(control), { min, max, step } = control;
    const number = Math.min(max, Math.max(min, Math.round(asked / step) * step));
    const taken = min ? (asked.trim() && Number.isFinite(+asked) ? String(+number.toFixed(1)) : initial(control)) : asked;
    control.value = taken;
    if (control.selectedIndex === -1) control.value = initial(control);
    const same = control.value.replaceAll(/\r?\n/g, "\n") === asked.replaceAll(/\r?\n/g, "\n") || (min && +control.value === +asked);
    return same ? "" : `The address says ${control.name}=${asked}, but the page takes ${control.value}. `;
  }).join("");
}

function settings() {
  const { keep, prompt, draft, clock, ...numbers } = Object.fromEntries(controls.map(({ name, value }) => [name, value]));
  for (const name in numbers) numbers[name] = Number(numbers[name]);
  return { ...numbers, draft, clock, lockStep: keep === "lock-step", prompt: prompt.trim() && prompt };
}

/** Decode with the current settings. on: run, else wait for single steps. */
function start(on = true) {
  whenFinished();
  for (const control of controls) control.parentNode.querySelector("output")?.replaceChildren(control.value);
  const key = changes(), plain = location.search.includes("plain") ? "plain" : "";
  history.replaceState(null, "", `${location.pathname}?${[key, plain].filter(Boolean).join("&")}`.replace(/\?$/, ""));
  run = { id: ++number, key, settings: settings(), lanes: [], cells: new Map(), ended: false };
  $("python").querySelector("pre").textContent = asPython(run.settings);
  $("note").textContent = "";
  showClock(run.settings.clock);
  worker.postMessage({ start: { ...run.settings, id: run.id } });
  go(on);
}

function go(on) {
  run.on = on;
  $("go").textContent = on ? "Pause" : "Go on";
  worker.postMessage({ go: on });
}

function showClock(clock) {
  const { device, dtype, torch, path } = sources[clock] ?? {};
  $("source").textContent = device
    ? `Clock: ${device}, modelled. Recorded pass times of these models (${dtype}, PyTorch ${torch}; file ${path}) are added up. Your browser computes the tokens.`
    : "Clock: this browser. Its passes are measured while they run.";
}

// --- The worker's messages -------------------------------------------------------------------------------------------

worker.onmessage = ({ data }) => {
  if (data.error) stop(data.error);
  else if (data.progress) showProgress(data.progress);
  else if (data.ready) begin(data);
  else if (data.id !== run.id) return; // of an earlier run
  else if (data.started) showRows(data.started);
  else if (data.finished) finish(data.finished);
  else advance(data);
};
worker.onerror = () => stop("the browser cannot start the decoder.");

function stop(message) {
  $("status").textContent = `Stopped: ${message}`;
  $("progress").hidden = true;
}

function showProgress({ loaded, total }) {
  const words = `${(loaded / 1e6).toFixed(1)} of ${(total / 1e6).toFixed(1)} MB`;
  Object.assign($("progress"), { max: total || 1, value: loaded, hidden: total > 0 && loaded >= total });
  $("progress").setAttribute("aria-valuetext", words);
  if (!run || run.lanes.length === 0) $("source").textContent = words;
}

function begin(data) {
  sources = data.sources;
  document.body.dataset.backend = data.ready;
  const note = setControls(new URLSearchParams(location.search));
  start();
  $("note").textContent = note;
}

function showRows(texts) {
  $("status").textContent = "Decoding …";
  showClock(run.settings.clock);
  const line = (_, row) => element("tr", {}, element("th", { scope: "row" }, `text ${row + 1}`), element("td", { className: "tail" }, element("bdi")));
  $("raster").tHead.rows[0].replaceChildren(element("td"), element("td", { className: "tail" }));
  $("raster").tBodies[0].replaceChildren(...texts.map(line));
  $("texts").replaceChildren(...texts.map((text) => element("pre", { tabIndex: 0 }, text)));
  $("slots").replaceChildren();
  $("opened-text").textContent = "Open a cell.";
}

function advance({ lane, passes, seconds, tokens, turns }) {
  run.lanes[lane] = { passes, seconds, tokens };
  for (const turn of turns) {
    addText(turn);
    if (passes) addCell(turn, passes);
  }
  const [ours, regular] = [0, 1].map((each) => run.lanes[each] ?? { passes: 0, seconds: 0, tokens: 0 });
  const whole = Math.max(ours.seconds, regular.seconds, (MOST_PASSES * regular.seconds) / (regular.passes || 1));
  for (const [i, state] of [ours, regular].entries()) {
    const box = document.querySelectorAll(".lane")[i];
    box.querySelector("i").style.width = `${(100 * state.seconds) / (whole || 1)}%`;
    box.querySelector("span").textContent = `${state.tokens} tokens, ${state.passes} passes, ${milliseconds(state.seconds)}`;
  }
}
const milliseconds = (seconds) => `${(seconds * 1e3).toFixed(seconds < 1 ? 1 : 0)} ms`;

function addText({ row, texts }) {
  const pieces = () => texts.map(([text, guessed]) => element(guessed ? "mark" : "u", {}, text));
  const box = $("texts").children[row], tail = $("raster").tBodies[0].rows[row].querySelector("bdi");
  box.append(...pieces());
  box.scrollTop = box.scrollHeight;
  tail.append(...pieces());
  for (const piece of tail.children) piece.textContent = piece.textContent.replaceAll("\n", "↵");
  while (tail.textContent.length > 60) tail.firstChild.remove();
}

// --- Cells -----------------------------------------------------------------------------------------------------------

function addCell(turn, passes) {
  const { row, accepted, drafted } = turn, head = $("raster").tHead.rows[0];
  const label = drafted ? `kept ${accepted} of ${drafted} guesses` : "nothing guessed";
  const button = element("button", { type: "button", tabIndex: run.cells.size ? -1 : 0, ariaLabel: `text ${row + 1}, pass ${passes}: ${label}`, ariaPressed: "false" }, drafted ? `${accepted}` : "–");
  button.style.setProperty("--share", drafted ? accepted / drafted : 0);
  button.classList.toggle("deep", accepted > drafted / 2);
  button.onclick = () => open(button);
  run.cells.set(button, { ...turn, passes, label });
  $("raster").tBodies[0].rows[row].append(element("td", {}, button));
  if (head.cells.length < passes + 2) head.append(element("th", { scope: "col" }, `${passes}`));
}

function open(button) {
  for (const each of run.cells.keys()) each.ariaPressed = String(each === button);
  const { row, passes, label, ...turn } = run.cells.get(button);
  $("opened-text").textContent = `Text ${row + 1}, pass ${passes}: ${label}.`;
  $("slots").replaceChildren(...showStep(turn, run.settings));
}

function focus(button) {
  for (const each of run.cells.keys()) each.tabIndex = each === button ? 0 : -1;
  button.focus();
}

$("raster").addEventListener("focusin", ({ target }) => { if (target.tabIndex) focus(target); });
$("raster").addEventListener("keydown", (event) => {
  const [across, down] = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key] ?? [0, 0];
  const cell = event.target.closest("td"), row = $("raster").tBodies[0].rows[cell.parentNode.sectionRowIndex + down];
  const next = row?.cells[Math.min(cell.cellIndex + across, row.cells.length - 1)]?.querySelector("button");
  if (!across && !down) return;
  event.preventDefault();
  if (next) focus(next);
});

// --- The end of a run, and predictions ---------------------------------------------------------------------------------

function finish({ same, computing }) {
  const { rows, temperature } = run.settings, [ours, regular] = run.lanes;
  const result = { same, passes: ours.passes, yield: ours.tokens / run.cells.size, gain: ours.tokens / ours.seconds / (regular.tokens / regular.seconds) };
  const text = temperature ? `${same} of ${rows} texts equal (both are draws from the same distribution)` : `Same text in ${same} of ${rows} rows`;
  const pace = result.gain >= 1 ? `${result.gain.toFixed(2)} times as fast as` : `only ${result.gain.toFixed(2)} times the speed of`;
  $("status").replaceChildren(element("b", {}, `${text}. ${result.yield.toFixed(1)} tokens per row and pass. ${pace} regular decoding`),
    ` on the clock below. Your browser decoded ${ours.tokens + regular.tokens} tokens in ${(computing / 1e3).toFixed(1)} s.`);
  run.ended = true;
  $("go").textContent = "Run again";
  results.set(run.key, result);
  const cells = [...run.cells.keys()], telling = cells.find((cell) => { const { accepted, drafted } = run.cells.get(cell); return accepted > 0 && accepted < drafted; });
  if (cells.length && !cells.some((cell) => cell.ariaPressed === "true")) open(telling ?? cells[0]);
  $("runs").hidden = false;
  $("runs").tBodies[0].append(element("tr", {}, ...[decodeURIComponent(run.key.replaceAll("+", " ")).slice(0, 60) || "start", `${same} of ${rows}`, result.passes, result.yield.toFixed(1), result.gain.toFixed(2)].map((each) => element("td", {}, `${each}`))));
  whenFinished(result);
}

function decoded(key) {
  setControls(new URLSearchParams(key));
  start();
  return new Promise((resolve) => { whenFinished = resolve; });
}

for (const question of $("questions").children) {
  for (const button of question.querySelectorAll("button")) button.onclick = async () => {
    const { change, measure } = question.dataset, [name, digits] = MEASURES[measure];
    const answer = question.querySelector("output") ?? question.appendChild(element("output"));
    answer.textContent = `Your prediction: ${button.textContent}. Decoding …`;
    const before = results.get("") ?? await decoded(""), after = before && await decoded(change);
    if (!after) return answer.replaceChildren();
    const difference = after[measure] - before[measure], direction = Math.abs(difference) < 0.02 * before[measure] ? 0 : Math.sign(difference);
    const [from, to] = [before, after].map((result) => result[measure].toFixed(digits));
    answer.textContent = `${name}: ${from} → ${to}. ` + (direction === +button.value ? "You were right." : `You said “${button.textContent}”. Why?`);
  };
}

for (const control of controls) control.addEventListener("change", () => start());
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("reset").onclick = () => { setControls(new URLSearchParams()); start(); };
$("go").onclick = () => (run.ended ? start() : go(!run.on));
$("one").onclick = () => {
  if (run.ended) start(false);
  else if (run.on) go(false);
  worker.postMessage({ steps: 1 });
};
