import { useState } from "preact/hooks";

import { token, type ApiError } from "../api";

/** Why there is nothing to show, and what to do about it. */
export function Failure({ error, onRetry }: { error: ApiError; onRetry: () => void }) {
  // 403 without a token is not about a token: its detail says what to do.
  if (error.unauthorized || (error.status === 403 && token.get() !== null)) return <TokenForm error={error} onRetry={onRetry} />;
  return (
    <div class="notice" role="alert">
      <h1>{error.missing ? "No such job" : error.title}</h1>
      <p>
        {error.missing
          ? "The server knows no job of this id. It may have been started with another database."
          : error.detail === ""
            ? "Is the server running? This page keeps trying by itself."
            : error.detail}
      </p>
      <p>
        {error.missing ? (
          <a href="/">All jobs</a>
        ) : (
          <button type="button" onClick={onRetry}>
            Try again now
          </button>
        )}
      </p>
    </div>
  );
}

function TokenForm({ error, onRetry }: { error: ApiError; onRetry: () => void }) {
  const [value, setValue] = useState("");
  const refused = token.get() !== null;
  return (
    <form
      class="notice"
      onSubmit={(event) => {
        event.preventDefault();
        token.set(value.trim());
        onRetry();
      }}
    >
      <h1>This server asks for a token</h1>
      <p>
        {refused ? `The one you gave was refused: ${error.detail} ` : ""}A token of scope <code>viewer</code> lets you
        look, one of scope <code>operator</code> also approve. It is kept until this tab is closed.
      </p>
      <p>Where the server runs, this makes one:</p>
      <pre>paceline server token create --name NAME --scope viewer</pre>
      <p class="row">
        <label class="sr" for="token">
          Token
        </label>
        <input
          id="token"
          type="password"
          autocomplete="off"
          placeholder="Token"
          value={value}
          onInput={(event) => {
            setValue(event.currentTarget.value);
          }}
        />
        <button type="submit" class="primary" disabled={value.trim() === ""}>
          Go on
        </button>
      </p>
    </form>
  );
}
