// An element with its attributes, listeners and children: for live.js, translator.js and
// through.js. A classic script, since a page opened as a file loads no modules.
(() => {
  "use strict";
  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (typeof value === "function") element.addEventListener(name, value);
      else if (value !== false) element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children);
    return element;
  }
  globalThis.literate = { ...globalThis.literate, make };
})();
