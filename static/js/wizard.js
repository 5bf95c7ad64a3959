// A step of the wizard begins at its heading, for the keyboard and for screen readers; an error summary comes first.
(() => {
  const heading = document.querySelector("main h1");
  if (!heading || document.activeElement !== document.body) return;
  heading.tabIndex = -1;
  heading.focus({ preventScroll: true });
})();
