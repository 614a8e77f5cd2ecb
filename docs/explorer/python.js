// The Python program that decodes the same tokens.

/** Return a program for these settings. JSON strings are Python strings. */
export function asPython({ k, rows, temperature, seed, draft, lockStep, prompt }) {
  const lines = ["import bass_core as bass", prompt ? "" : "from bass_lab.texts.prompt_sets import prompt_set\n"];
  lines.push(`pair = bass.load_pair(${draft === "unaligned_draft" ? 'draft="unaligned_draft"' : ""})`);
  if (draft === "guesses") lines.push("pair.draft.get_input_embeddings().weight.data.zero_()  # now every token is equally likely");
  lines.push(prompt ? `prompts = [${JSON.stringify(prompt)}] * ${rows}` : `prompts = prompt_set("mini")[:${rows}]`);
  if (lockStep) lines.push(`# BASS has no lock-step. ${temperature ? "Its texts are other draws from the same distribution." : "Its texts are the same, in fewer passes."}`);
  lines.push(`out = bass.generate(pair, prompts, draft_length=${k}, temperature=${temperature}, seed=${seed}, max_new_tokens=64)`);
  lines.push(`for row in out:\n    print(row.text)`);
  return lines.filter(Boolean).join("\n");
}
