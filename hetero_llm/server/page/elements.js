// Elements made of texts. None of them parses HTML.

export function made(tag, name, text = "") {
  const element = document.createElement(tag);
  element.className = name;
  element.textContent = text;
  return element;
}

export function button(text, pressed) {
  const element = made("button", "quiet small", text);
  element.type = "button";
  element.addEventListener("click", () => pressed(element));
  return element;
}
