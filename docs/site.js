// Lets long names in code break between their parts only: rollout. / prompts_per_step.
for (const code of document.querySelectorAll(".md-typeset :not(pre) > code")) {
  if (code.children.length) continue;
  const longest = code.closest("td, th") ? 16 : 30; // A name of at most so many characters stays whole.
  const names = code.textContent.split(/(?<=\s)/);
  const parts = names.flatMap((name) =>
    name.trimEnd().length > longest ? name.split(/(?<=\w[.\/=:,]+)(?=[a-z_<{])/i) : [name]
  );
  // The names of tests are longer than a line of a table.
  const pieces = parts.flatMap((part) => part.length > 40 ? part.split(/(?<=_)(?=[a-z])/) : [part]);
  code.replaceChildren(...pieces.flatMap((text) => {
    const piece = document.createElement("span");
    piece.style.whiteSpace = text.length > 36 ? "" : "nowrap";
    piece.textContent = text;
    return [piece, document.createElement("wbr")];
  }).slice(0, -1));
}
