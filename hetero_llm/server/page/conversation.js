// The conversation and its settings in the browser's local storage: they outlive a reload, until
// they are cleared. The key is that of the page's address, so that two servers behind one proxy have
// a conversation each. Images are not kept, they would fill the storage.

const VERSION = 1;
const MOST_CHARACTERS = 1_000_000;
const KEY = `hetero_llm.conversation ${new URL(".", document.baseURI).pathname}`;

// What earlier versions of the page have not kept.
const NEWER = { results: null, reasoning: "", reasoningMarks: [], calls: [] };

function areMarks(marks) {
  return Array.isArray(marks)
    && marks.every((one) => Array.isArray(one) && one.every(Number.isInteger));
}

// A list of objects that have texts under these names.
function areObjects(list, names) {
  return Array.isArray(list)
    && list.every((one) => names.every((name) => typeof one?.[name] === "string"));
}

function isTurn(turn) {
  const { text, answer, reasoning, marks, reasoningMarks, results, calls, end, images } = turn;
  return [text, answer, reasoning].every((one) => typeof one === "string")
    && areMarks(marks) && areMarks(reasoningMarks)
    && (results === null || areObjects(results, ["id", "name", "text"]))
    && areObjects(calls, ["id", "name", "arguments"])
    && (end === null || typeof end?.text === "string")
    && Number.isInteger(images);
}

// {turns, settings}; empty if nothing was kept or another version of the page has kept it.
export function keptConversation() {
  const none = { turns: [], settings: {} };
  try {
    const kept = JSON.parse(localStorage.getItem(KEY));
    if (kept?.version !== VERSION || !Array.isArray(kept.turns)) return none;
    const turns = kept.turns.map((turn) => ({ ...NEWER, ...turn }));
    return turns.every(isTurn) ? { turns, settings: kept.settings ?? {} } : none;
  } catch {
    return none; // the browser forbids it, or it is not ours
  }
}

// Keeps as many of the last turns as there is room for; returns how many.
export function keepConversation(turns, settings) {
  const texts = turns.map(({ uris, ...turn }) => JSON.stringify(turn));
  let characters = texts.reduce((sum, text) => sum + text.length, 0);
  for (;;) {
    while (texts.length && characters > MOST_CHARACTERS) characters -= texts.shift().length;
    const rest = JSON.stringify({ version: VERSION, settings }).slice(0, -1);
    try {
      localStorage.setItem(KEY, `${rest},"turns":[${texts.join(",")}]}`);
      return texts.length;
    } catch {
      if (!texts.length) return 0; // full of what is not ours, or forbidden
      characters -= texts.shift().length;
    }
  }
}

export function forgetConversation() {
  try {
    localStorage.removeItem(KEY);
  } catch {
    // the browser forbids it: then nothing was kept
  }
}
