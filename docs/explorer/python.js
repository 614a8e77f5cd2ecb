// The Python program that decodes the same tokens.

/** Return a program for these settings. A string of JSON is a string of Python. */
export function asPython({ k, rows, temperature, seed, draft, lockStep, prompt }) {
  const texts = temperature ? "other draws from the same distribution" : "the same, in fewer passes";
  return `import bass_core as bass
${prompt ? "" : "from bass_lab.texts.prompt_sets import prompt_set\n"}
pair = bass.load_pair(${draft === "unaligned_draft" ? 'draft="unaligned_draft"' : ""})
${draft === "guesses" ? "pair.draft.get_input_embeddings().weight.data.zero_()  # no knowledge\n" : ""}\
${lockStep ? `# BASS has no lock-step: its texts are ${texts}.\n` : ""}\
prompts = ${prompt ? `[${JSON.stringify(prompt)}] * ${rows}` : `prompt_set("mini", ${rows})`}
options = dict(draft_length=${k}, temperature=${temperature}, seed=${seed}, max_new_tokens=64)
out = bass.generate(pair, prompts, **options)
print(*(row.text for row in out), sep="\\n\\n")`;
}
