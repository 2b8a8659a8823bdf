// The conversation and its settings in the browser's local storage: they outlive a reload, until
// they are cleared. The key is that of the page's address, so that two servers behind one proxy have
// a conversation each. Images are not kept, they would fill the storage.

const VERSION = 1;
const MOST_CHARACTERS = 1_000_000;
const KEY = `hetero_llm.conversation ${new URL(".", document.baseURI).pathname}`;

function isTurn(turn) {
  const texts = [turn?.text, turn?.answer].every((one) => typeof one === "string");
  const marks = Array.isArray(turn?.marks)
    && turn.marks.every((one) => Array.isArray(one) && one.every(Number.isInteger));
  const end = turn?.end === null || typeof turn?.end?.text === "string";
  return texts && marks && end && Number.isInteger(turn.images);
}

// {turns, settings}; empty if nothing was kept or another version of the page has kept it.
export function keptConversation() {
  const none = { turns: [], settings: {} };
  try {
    const kept = JSON.parse(localStorage.getItem(KEY));
    const fits = kept?.version === VERSION && Array.isArray(kept.turns) && kept.turns.every(isTurn);
    return fits ? { turns: kept.turns, settings: kept.settings ?? {} } : none;
  } catch {
    return none; // the browser forbids it, or it is not ours
  }
}

// Keeps as many of the last turns as there is room for; returns how many.
export function keepConversation(turns, settings) {
  let texts = turns.map(({ chatting, text, images, answer, marks, end }) => (
    JSON.stringify({ chatting, text, images, answer, marks, end })
  ));
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
