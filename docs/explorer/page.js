// The page: settings in the address, the race, cells, texts and questions. The worker decodes.

import { element, showSlot } from "./opened.js";
import { asPython } from "./python.js";

const $ = (id) => document.getElementById(id);
const controls = [...$("settings").elements].filter((control) => control.name);
const head = $("raster").tHead.rows[0], lines = $("raster").tBodies[0].rows;
const worker = new Worker(`worker.js${location.search}`, { type: "module" }); // ?plain: without WebAssembly
const MOST_PASSES = 63; // of regular decoding: 64 new tokens, the first from reading the prompt
const LONGEST = 3000; // characters of a prompt
$("status").textContent = "Loading the two models …";
let sources, run, firstResult, number = 0, whenFinished = () => {};
// --- Settings: the controls, and the address that a teacher can send ------------------------------------------------
const initial = (control) => control.defaultValue ?? control.options[0].value;

function changes() {
  const changed = controls.filter((control) => control.value !== initial(control));
  return new URLSearchParams(changed.map(({ name, value }) => [name, value])).toString();
}

/** Set all controls; absent names get their initial values. Return sentences about values that a control refuses. */
function setControls(values) {
  const notes = [];
  for (const control of controls) {
    const { name, min, max, step } = control, asked = values.get(name) ?? initial(control);
    const steps = Math.round(Math.min(max, Math.max(min, parseFloat(asked))) / step); // NaN unless both are numbers
    control.value = !min ? asked.slice(0, LONGEST) : Number.isNaN(steps) ? initial(control) : steps * step;
    if (control.selectedIndex === -1) control.value = initial(control);
    const isTaken = min ? Number(control.value) === Number(asked) : control.value === asked.replaceAll("\r\n", "\n");
    const label = control.labels[0].firstChild.data.split(/[:,]/)[0].trim();
    const taken = asked.length > LONGEST ? `its first ${LONGEST} characters` : control.value;
    if (!isTaken) notes.push(`${label} cannot be ${asked.slice(0, 30)}; the page takes ${taken}.`);
  }
  return notes.join(" ");
}

/** Decode with these values, and tell about refused values. */
function start(values) {
  whenFinished();
  whenFinished = () => {};
  const note = setControls(values), chosen = Object.fromEntries(controls.map(({ name, value }) => [name, value]));
  for (const control of controls) control.parentNode.querySelector("b")?.replaceChildren(control.value);
  for (const { name, min } of controls) if (min) chosen[name] = Number(chosen[name]);
  history.replaceState(null, "", location.pathname + (changes() && `?${changes()}`));
  run = { id: ++number, settings: chosen, isFirst: !changes(), lanes: [], cells: new Map() };
  Object.assign(chosen, { lockStep: chosen.keep === "lock-step", prompt: chosen.prompt.trim() && chosen.prompt });
  $("python").querySelector("pre").textContent = asPython(chosen);
  $("note").textContent = note;
  document.body.dataset.settings = Object.entries(chosen).map((each) => each.join(": ")).join("; "); // for print
  showRows({ texts: [] });
  worker.postMessage({ start: { ...chosen, id: run.id } });
  go(true);
}

function go(on) {
  run.on = on;
  run.ended = $("one").disabled = false;
  $("go").textContent = on ? "Pause" : "Go on";
  $("status").textContent = on ? "Decoding …" : "Paused.";
  worker.postMessage({ go: on });
}

function end() {
  run.ended = $("one").disabled = true;
  $("go").textContent = "Run again";
}

const again = () => start(new URLSearchParams(changes()));
$("settings").addEventListener("change", again);
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("go").onclick = () => (run.ended ? again() : go(!run.on));
$("one").onclick = () => {
  if (run.on) go(false);
  worker.postMessage({ one: true });
};
$("reset").onclick = () => start(new URLSearchParams());

// --- The worker's messages ------------------------------------------------------------------------------------------
const receivers = { progress: showProgress, ready: begin, started: showRows, step: advance, finished: finish, stop };
worker.onmessage = ({ data: { kind, id, ...report } }) => {
  if (id === undefined || id === run.id) receivers[kind](report); // else of an earlier run
};
worker.onerror = () => stop({ message: "this browser cannot start the decoder." });

function stop({ message }) {
  $("status").textContent = `Stopped: ${message}`;
  $("progress").hidden = true;
  $("source").textContent = "";
  if (run) end();
}

function showProgress({ loaded, total }) {
  Object.assign($("progress"), { max: Math.max(total, loaded), value: loaded, hidden: loaded >= total });
  $("source").textContent = `${(loaded / 1e6).toFixed(1)} of ${(total / 1e6).toFixed(1)} MB`;
}

function begin(ready) {
  sources = ready.sources;
  document.body.dataset.arithmetic = ready.arithmetic;
  document.querySelector("aside").inert = false;
  start(new URLSearchParams(location.search));
}

function showRows({ texts }) {
  const { device, dtype, torch, path } = sources[run.settings.clock] ?? {};
  $("source").textContent = device
    ? `Modelled: the clock adds up pass times recorded on ${device} (${dtype}, PyTorch ${torch}; ${path}).`
    : "Measured: the clock adds up the times of this browser’s passes.";
  head.replaceChildren(element("td"), element("td", { className: "tail" }, "pass"));
  $("raster").tBodies[0].replaceChildren(...texts.map((_, row) => element("tr", {},
    element("th", { scope: "row" }, `text ${row + 1}`), element("td", { className: "tail" }, element("bdi")))));
  $("texts").replaceChildren(...texts.map((text) => element("pre", { tabIndex: 0 }, text)));
  $("slots").replaceChildren();
  $("opened-text").textContent = "Open a cell.";
  advance({ lane: 0, passes: 0, seconds: 0, tokens: 0, turns: [] });
}

function advance({ lane, passes, seconds, tokens, turns }) {
  run.lanes[lane] = { passes, seconds, tokens };
  for (const turn of turns) {
    addText(turn);
    if (passes) addCell(turn, passes);
  }
  if (turns.length && passes && !run.on) open([...run.cells.keys()].at(-turns.length)); // single steps
  const [ours, regular] = [0, 1].map((each) => run.lanes[each] ?? { passes: 0, seconds: 0, tokens: 0 });
  const width = Math.max(ours.seconds, (MOST_PASSES * regular.seconds) / Math.max(1, regular.passes), 1e-9);
  for (const [i, state] of [ours, regular].entries()) {
    const box = document.querySelectorAll(".lane")[i], milliseconds = (state.seconds * 1e3).toFixed(1);
    box.querySelector("i").style.width = `${(100 * state.seconds) / width}%`;
    box.querySelector("span").textContent = `${state.tokens} tokens, ${state.passes} passes, ${milliseconds} ms`;
  }
}

function addText({ row, texts }) {
  const piece = ([text, guessed]) => element(guessed ? "mark" : "u", {}, text);
  const box = $("texts").children[row], tail = lines[row].querySelector("bdi");
  box.append(...texts.map(piece));
  box.scrollTop = box.scrollHeight;
  tail.append(...texts.map(([text, guessed]) => piece([text.replaceAll("\n", "↵"), guessed])));
  while (tail.textContent.length > 60) tail.firstChild.remove();
}

// --- Cells ----------------------------------------------------------------------------------------------------------
function addCell(turn, pass) {
  const { row, accepted, drafted } = turn, share = drafted ? accepted / drafted : 0;
  const [sign, words] = drafted ? [accepted, `kept ${accepted} of ${drafted} guesses`] : ["–", "nothing guessed"];
  const label = `Text ${row + 1}, pass ${pass}: ${words}`, properties = { type: "button", ariaLabel: label };
  const button = element("button", { ...properties, tabIndex: run.cells.size ? -1 : 0 }, `${sign}`);
  button.style.setProperty("--share", share);
  button.classList.toggle("deep", share > 0.68);
  button.onclick = () => open(button);
  run.cells.set(button, { ...turn, label });
  lines[row].append(element("td", {}, button));
  if (head.cells.length < pass + 2) head.append(element("th", { scope: "col" }, `${pass}`));
}

function open(button) {
  for (const each of run.cells.keys()) each.ariaPressed = String(each === button);
  const { label, slots } = run.cells.get(button);
  $("opened-text").textContent = `${label}.`;
  $("slots").replaceChildren(...slots.map((slot, i) => showSlot(slot, i, run.settings.temperature)));
}

$("raster").addEventListener("focusin", ({ target }) => {
  for (const each of run.cells.keys()) each.tabIndex = each === target ? 0 : -1;
});
$("raster").addEventListener("keydown", (event) => {
  const moves = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] };
  if (!moves[event.key]) return;
  event.preventDefault();
  const [across, down] = moves[event.key], cell = event.target.closest("td");
  const row = lines[cell.parentNode.sectionRowIndex + down];
  row?.cells[Math.min(cell.cellIndex + across, row.cells.length - 1)].querySelector("button")?.focus();
});

// --- The end of a run, and the questions ----------------------------------------------------------------------------
function finish({ same, computing }) {
  const { rows, temperature } = run.settings, [ours, regular] = run.lanes;
  const gain = ours.tokens / ours.seconds / (regular.tokens / regular.seconds), perPass = ours.tokens / run.cells.size;
  const text = same === rows || !temperature ? `Same text in ${same} of ${rows} rows`
    : `Other random draws from the same distribution (${same} of ${rows} texts equal)`;
  const speed = `${gain < 1 ? "Only " : ""}${gain.toFixed(2)} times as many tokens per second as`;
  const clock = sources[run.settings.clock] ? `on ${sources[run.settings.clock].device}, modelled` : "in this browser";
  const yields = `${perPass.toFixed(1)} tokens per row and pass instead of 1`;
  $("status").textContent = `${text}. ${yields}. ${speed} regular decoding (${clock}).`;
  $("source").append(` Decoded here: ${ours.tokens + regular.tokens} tokens in ${(computing / 1e3).toFixed(1)} s.`);
  end();
  const cells = [...run.cells.keys()], isMixed = ({ accepted, drafted }) => accepted > 0 && accepted < drafted;
  const telling = cells.find((cell) => isMixed(run.cells.get(cell))) ?? cells[0];
  if (telling && !$("slots").children.length) open(telling);
  const result = { same, passes: ours.passes, yield: perPass, gain };
  if (run.isFirst) firstResult = result;
  whenFinished(result);
}

/** Decode with these changes of the first settings. Return the result, or undefined if another run replaces the run. */
function decoded(change) {
  start(new URLSearchParams(change));
  return new Promise((resolve) => { whenFinished = resolve; });
}

async function ask(question, prediction) {
  const { change, measure, words, why } = question.dataset, answer = question.querySelector("output");
  answer.textContent = `You say: ${prediction.textContent}. Decoding …`;
  const before = firstResult ?? await decoded(""), after = before && await decoded(change);
  if (!after) return answer.replaceChildren();
  const difference = after[measure] - before[measure];
  const direction = Math.abs(difference) < 0.02 * before[measure] ? 0 : Math.sign(difference);
  const [from, to] = [before, after].map((result) => Number(result[measure].toPrecision(3)));
  const right = question.querySelector(`[value="${direction}"]`).textContent, said = prediction.textContent;
  const verdict = said === right ? "You were right" : `You said ${said}, it is ${right}`;
  answer.textContent = `${words}: ${from} → ${to}. ${verdict}. ${why}`;
}

for (const button of $("questions").querySelectorAll("button")) button.onclick = () => ask(button.parentNode, button);
