// Passkeys: a form with data-passkey asks the browser for one and sends what it answers.
(() => {
  const words = document.querySelector("[data-words=passkeys]").dataset;
  const trouble = (form, text) => {
    const line = form.querySelector("[data-passkey-error]");
    line.textContent = text;
    line.hidden = false;
    form.querySelector("[type=submit]").removeAttribute("aria-busy");
  };
  const ask = async (form) => {
    const { publicKey } = JSON.parse(document.getElementById(form.dataset.passkeyOptions).textContent);
    const creates = form.dataset.passkey === "create";
    const options = creates
      ? PublicKeyCredential.parseCreationOptionsFromJSON(publicKey)
      : PublicKeyCredential.parseRequestOptionsFromJSON(publicKey);
    const credential = await navigator.credentials[form.dataset.passkey]({ publicKey: options });
    form.elements.credential.value = JSON.stringify(credential.toJSON());
    form.submit();
  };
  document.addEventListener("submit", (e) => {
    const form = e.target.closest("[data-passkey]");
    if (!form) return;
    e.preventDefault();
    if (!window.PublicKeyCredential?.parseCreationOptionsFromJSON)
      return trouble(form, words.unsupported);
    ask(form).catch((error) =>
      trouble(form, error.name === "NotAllowedError" ? words.refused : words.failed.replace("{error}", error.message)));
  });
})();
